"""Small ELF64 libraries with fatbin sections, written byte by byte: the reader's tests need no binary in the tree."""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

_BASE = 0x10000  # virtual address of the file's first byte
X86_64, AARCH64 = 62, 183
HOST = AARCH64 if os.uname().machine == "aarch64" else X86_64
FLAGS = {"": 0, "a": 1 << 20, "f": 1 << 21}


def entry(image: str, *, isa: tuple[int, int] = (8, 8), payload: bytes = b"\x90" * 24, header_bytes: int = 64) -> bytes:
    """One image: "sm_90", "compute_120", "sm_100f"."""
    kind, number, suffix = re.fullmatch(r"(sm|compute)_(\d+)([af]?)", image).groups()
    head = struct.pack(
        "<HHIQIIHHIIIQ", 1 if kind == "compute" else 2, 0x101, header_bytes, len(payload), 0, 0, isa[1], isa[0],
        int(number), 0, 0, FLAGS[suffix],
    )  # fmt: skip
    return head.ljust(header_bytes, b"\0") + payload


def container(images: str | Sequence[bytes], *, isa: tuple[int, int] = (8, 8), version: int = 1) -> bytes:
    """A container of images, given as "sm_80 sm_90 compute_90" or as ready entries."""
    entries = [entry(image, isa=isa) for image in images.split()] if isinstance(images, str) else list(images)
    body = b"".join(entries)
    return struct.pack("<IHHQ", 0xBA55ED50, version, 16, len(body)) + body


def elf(
    sections: Mapping[str, bytes],
    *,
    machine: int = HOST,
    needed: Sequence[str] = (),
    rpath: str = "",
    runpath: str = "",
    soname: str = "",
    strip: bool = False,
) -> bytes:
    """A shared library with these sections and loader tags; `strip` leaves its section table out."""
    strings, offsets = b"\0", {}
    for text in (*needed, rpath, runpath, soname):
        if text and text not in offsets:
            offsets[text] = len(strings)
            strings += text.encode() + b"\0"
    blobs = {**sections, ".dynstr": strings}
    body, places = bytearray(64 + 2 * 56), {}
    for name, data in blobs.items():
        body += b"\0" * (-len(body) % 8)
        places[name] = (len(body), len(data))
        body += data
    tags = [(1, offsets[name]) for name in needed]
    tags += [(tag, offsets[text]) for tag, text in ((14, soname), (15, rpath), (29, runpath)) if text]
    tags += [(5, _BASE + places[".dynstr"][0]), (10, len(strings)), (0, 0)]
    body += b"\0" * (-len(body) % 8)
    places[".dynamic"] = (len(body), 16 * len(tags))
    body += b"".join(struct.pack("<qQ", *tag) for tag in tags)
    table = b"" if strip else _sections(body, places)
    start, size = places[".dynamic"]
    struct.pack_into("<IIQQQQQQ", body, 64, 1, 5, 0, _BASE, _BASE, len(body), len(body), 0x1000)
    struct.pack_into("<IIQQQQQQ", body, 120, 2, 6, start, _BASE + start, _BASE + start, size, size, 8)
    count = len(table) // 64
    ident = b"\x7fELF\x02\x01\x01".ljust(16, b"\0")
    shoff = 0 if strip else len(body)
    struct.pack_into(
        "<16sHHIQQQIHHHHHH", body, 0, ident, 3, machine, 1, 0, 64, shoff, 0, 64, 56, 2, 64, count, max(count - 1, 0)
    )
    return bytes(body) + table


def _sections(body: bytearray, places: Mapping[str, tuple[int, int]]) -> bytes:
    """The section header table for what `body` holds; appends the names to `body`, and lists them last."""
    names, heads = b"\0", [(0, 0, 0, 0)]
    for name, (offset, size) in places.items():
        heads.append((len(names), 1, offset, size))
        names += name.encode() + b"\0"
    own = len(names)
    names += b".shstrtab\0"
    heads.append((own, 3, len(body), len(names)))
    body += names + b"\0" * (-(len(body) + len(names)) % 8)
    return b"".join(struct.pack("<IIQQQQIIQQ", n, kind, 0, 0, off, size, 0, 0, 8, 0) for n, kind, off, size in heads)


def version_string(nccl: str, cuda: str) -> bytes:
    return f"\0NCCL version {nccl} compiled with CUDA {cuda}\0".encode()


def libnccl(
    path: Path,
    images: str = "sm_80 sm_90 compute_90",
    *,
    nccl: str = "2.30.7",
    cuda: str = "12.9",
    isa: tuple[int, int] = (8, 8),
    **more: object,
) -> str:
    """Write a library like NCCL's: one device-linked container of its SASS, two relocatable ones with everything."""
    sass = " ".join(image for image in images.split() if image.startswith("sm_"))
    sections = {
        ".rodata": version_string(nccl, cuda),
        ".nv_fatbin": container(sass) if sass else b"",
        "__nv_relfatbin": container(images, isa=isa) + b"\0" * 8 + container(images, isa=isa),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(elf({k: v for k, v in sections.items() if v}, soname="libnccl.so.2", **more))
    return str(path)
