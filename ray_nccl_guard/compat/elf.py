"""A reader of ELF64 shared libraries by mmap and struct: sections, segments and the loader's tags; nothing is loaded or run.

The file is hostile input: every offset is checked against the file before it is used, names are read in bounded pieces, and
a file that ends before its own tables say so is an error, never a shorter answer. Layout: the ELF-64 object file format and
System V gABI, chapters 4 and 5.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from ray_nccl_guard.compat.errors import NotALibrary

# ELF e_machine -> the name `platform.machine()` gives such a host. NCCL ships for these two only.
MACHINES = {62: "x86_64", 183: "aarch64"}

_EHDR = struct.Struct("<16sHHIQQQIHHHHHH")
_SHDR = struct.Struct("<IIQQQQIIQQ")
_PHDR = struct.Struct("<IIQQQQQQ")
_DYN = struct.Struct("<qQ")
_PT_LOAD, _PT_DYNAMIC = 1, 2
_SHT_NOBITS = 8
_DT_NULL, _DT_NEEDED, _DT_STRTAB, _DT_STRSZ, _DT_SONAME, _DT_RPATH, _DT_RUNPATH = 0, 1, 5, 10, 14, 15, 29
# A shared library has a few dozen sections (41 in libtorch_cuda 2.15.0); the bound keeps a forged count from costing memory.
_MAX_SECTIONS = 65_536
_MAX_TAGS = 65_536
_MAX_NAME_BYTES = 4096  # PATH_MAX; an RPATH of several directories may be longer, hence the larger bound below
_MAX_PATH_LIST_BYTES = 65_536


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A named piece of the file: bytes `start` up to, not including, `end`."""

    name: str
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Loading:
    """What the dynamic loader reads of a library: the names it needs and where to look for them."""

    needed: tuple[str, ...] = ()
    rpath: tuple[str, ...] = ()
    runpath: tuple[str, ...] = ()
    soname: str = ""


class Elf:
    """The headers of one mapped ELF64 file, checked as they are read.

    Attributes:
        data: the mapped file.
        machine: "x86_64" or "aarch64".
        sections: name and place of every section that occupies the file; empty if the section table was stripped.
        segments: the loaded segments, as `(virtual address, start, end)` in the file.

    Raises:
        NotALibrary: not a whole little-endian ELF64 file for a machine that NCCL ships for.
    """

    def __init__(self, data: mmap.mmap, path: str) -> None:
        self.data = data
        self.path = path
        if data[:4] != b"\x7fELF":
            raise NotALibrary(f"{path} is not an ELF file: it is {_looks_like(data)}")
        if len(data) < _EHDR.size:
            raise self._cut("its header")
        if data[4] != 2 or data[5] != 1:
            width, order = {1: "32-bit"}.get(data[4], "64-bit"), {2: "big-endian "}.get(data[5], "")
            raise NotALibrary(f"{path} is a {order}{width} ELF file; NCCL exists as little-endian 64-bit only")
        fields = _EHDR.unpack_from(data, 0)
        if fields[2] not in MACHINES:
            raise NotALibrary(
                f"{path} is built for ELF machine {fields[2]}; NCCL exists for {' and '.join(MACHINES.values())}"
            )
        self.machine = MACHINES[fields[2]]
        self._phoff, self._shoff = fields[5], fields[6]
        self._phentsize, self._phnum, self._shentsize, self._shnum, self._shstrndx = fields[9:14]
        headers = list(self._program_headers())
        self.segments = [(vaddr, offset, offset + size) for kind, offset, vaddr, size in headers if kind == _PT_LOAD]
        self._dynamic = next(((o, o + s) for kind, o, _, s in headers if kind == _PT_DYNAMIC), None)
        self.sections = tuple(self._sections())

    def _cut(self, what: str) -> NotALibrary:
        return NotALibrary(f"{self.path} is cut short: {what} would end after the file does ({len(self.data)} bytes)")

    def _program_headers(self) -> Iterator[tuple[int, int, int, int]]:
        if self._phnum and self._phentsize != _PHDR.size:
            raise NotALibrary(f"{self.path} has program headers of {self._phentsize} bytes, where ELF64 has {_PHDR.size}")
        if self._phoff + self._phnum * _PHDR.size > len(self.data):
            raise self._cut("the program header table")
        for i in range(self._phnum):
            kind, _, offset, vaddr, _, size, _, _ = _PHDR.unpack_from(self.data, self._phoff + i * _PHDR.size)
            if kind in (_PT_LOAD, _PT_DYNAMIC):
                if offset + size > len(self.data):
                    raise self._cut(f"segment {i}")
                yield kind, offset, vaddr, size

    def _sections(self) -> Iterator[Span]:
        if self._shoff == 0:
            return  # stripped of its section table, which the loader does not need
        if self._shentsize != _SHDR.size:
            raise NotALibrary(f"{self.path} has section headers of {self._shentsize} bytes, where ELF64 has {_SHDR.size}")
        count, names = self._section_count()
        if self._shoff + count * _SHDR.size > len(self.data):
            raise self._cut("the section header table")
        if count == 0:
            return
        if names >= count:
            raise NotALibrary(f"{self.path} has no names for its sections (index {names} of {count})")
        heads = (_SHDR.unpack_from(self.data, self._shoff + i * _SHDR.size) for i in range(count))
        text = _SHDR.unpack_from(self.data, self._shoff + names * _SHDR.size)
        names_start, names_end = text[4], text[4] + text[5]
        if names_end > len(self.data):
            raise self._cut("the table of section names")
        for name, kind, _, _, offset, size, *_ in heads:
            if kind == _SHT_NOBITS or size == 0:
                continue
            if offset + size > len(self.data):
                raise self._cut("a section")
            yield Span(name=self._text(names_start + name, names_end, _MAX_NAME_BYTES), start=offset, end=offset + size)

    def _section_count(self) -> tuple[int, int]:
        count, names = self._shnum, self._shstrndx
        if count == 0 or names == 0xFFFF:  # extended numbering: the first header carries the real numbers
            if self._shoff + _SHDR.size > len(self.data):
                raise self._cut("the section header table")
            first = _SHDR.unpack_from(self.data, self._shoff)
            count, names = (count or first[5]), (first[6] if names == 0xFFFF else names)
        if count > _MAX_SECTIONS:
            raise NotALibrary(f"{self.path} claims {count} sections; no library has more than {_MAX_SECTIONS}")
        return count, names

    def _text(self, start: int, end: int, limit: int) -> str:
        if not 0 <= start < end:
            return ""
        piece = self.data[start : min(end, start + limit)]
        return piece.split(b"\0", 1)[0].decode("utf-8", "replace")

    def _at(self, address: int) -> int | None:
        """Where in the file a virtual address lies, None if no loaded segment holds it."""
        return next((s + address - v for v, s, e in self.segments if v <= address < v + e - s), None)

    def loading(self) -> Loading:
        """The dynamic section as the loader reads it; empty for a file that has none."""
        if self._dynamic is None:
            return Loading()
        start, end = self._dynamic
        tags: list[tuple[int, int]] = []
        for i in range(min((end - start) // _DYN.size, _MAX_TAGS)):
            tag, value = _DYN.unpack_from(self.data, start + i * _DYN.size)
            if tag == _DT_NULL:
                break
            tags.append((tag, value))
        known = dict(tags)
        table = self._at(known.get(_DT_STRTAB, -1))
        if table is None:
            return Loading()
        limit = min(len(self.data), table + known.get(_DT_STRSZ, 0))

        def texts(wanted: int) -> tuple[str, ...]:
            found = (self._text(table + v, limit, _MAX_PATH_LIST_BYTES) for t, v in tags if t == wanted)
            return tuple(text for text in found if text)

        def paths(wanted: int) -> tuple[str, ...]:
            return tuple(part for text in texts(wanted) for part in text.split(":") if part)

        soname = next(iter(texts(_DT_SONAME)), "")
        return Loading(needed=texts(_DT_NEEDED), rpath=paths(_DT_RPATH), runpath=paths(_DT_RUNPATH), soname=soname)


def _looks_like(data: mmap.mmap) -> str:
    head = data[:256]
    if head.startswith(b"!<arch>"):
        return "a static archive"
    if b"GROUP" in head or b"INPUT" in head or b"GNU ld script" in head:
        return "a linker script, which names the library instead of holding it"
    if head.startswith(b"version https://git-lfs"):
        return "a Git LFS pointer, not the file itself"
    if all(byte in b"\t\n\r" or 32 <= byte < 127 for byte in head):
        return "text"
    return "something else"
