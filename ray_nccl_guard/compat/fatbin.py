"""Which GPU images a CUDA library holds: its fatbin headers, read from the ELF file; nothing is loaded or decompressed.

Layout, little-endian, found on the libraries of docs/gpu-support.md (CUDA 11.0 to 13.4) and with controlled images from
ptxas and fatbinary: a container is `u32 magic, u16 version, u16 header bytes, u64 bytes after the header`; inside it entries
follow each other as `u16 kind (1 PTX, 2 SASS), u16, u32 header bytes, u64 payload bytes, u32, u32, u16 minor, u16 major (of
the PTX ISA), u32 arch, u32, u32, u64 flags`. Headers are never compressed. Section .nv_fatbin holds what the runtime loads
first, __nv_relfatbin the relocatable code that is linked, or compiled, on the device.
"""

from __future__ import annotations

import itertools
import mmap
import re
import struct
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ray_nccl_guard.compat.arch import Arch
from ray_nccl_guard.compat.elf import Elf, Span
from ray_nccl_guard.compat.errors import BrokenFatbin, NoGpuCode
from ray_nccl_guard.compat.mapping import PIECE_BYTES, first_nonzero, let_go, mapped, search

MAGIC = 0xBA55ED50
EXECUTABLE, RELOCATABLE = ".nv_fatbin", "__nv_relfatbin"
_ANYWHERE = "*"

_MAGIC = re.compile(re.escape(struct.pack("<I", MAGIC)))
_CONTAINER = struct.Struct("<IHHQ")
_ENTRY = struct.Struct("<HHIQIIHHIIIQ")
_VERSION = 1  # in every file seen, CUDA 11.0 to 13.4
_KIND_PTX, _KIND_SASS = 1, 2
# Proven with controlled images: 90/90a, 100/100a/100f, 120/120a/120f differ in these bits only.
_FLAG_A, _FLAG_F = 1 << 20, 1 << 21
_NCCL = re.compile(
    rb"NCCL version (\d{1,3}\.\d{1,3}\.\d{1,3})"
    rb"(?:[ -~]{0,40}? compiled with CUDA |[ -~]{0,12}\+cuda)(\d{1,3}\.\d{1,3})"
)
_LONGEST_VERSION = 128  # of _NCCL, whose parts are all bounded
# libtorch_cuda 2.15.0 has 476 containers of 6 to 12 entries, libnccl 2.30.7 155; bounds that only a forged file meets.
_MAX_ENTRIES = 1_000_000
_MAX_GROUPS = 4096
_MAX_ARCH = 999  # three digits: sm_121 is the highest today


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Containers that hold the same images: where they lie, what they hold, how many there are."""

    section: str
    sass: frozenset[Arch]
    ptx: frozenset[Arch]
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Images:
    """What a library holds for GPUs.

    Attributes:
        path, size_bytes, machine: the file.
        nccl_version, cuda_build: from NCCL's own version string; None where the library is not NCCL or does not say.
        sass, ptx: the images that every ordinary kernel of the library has, lowest first; a verdict rests on these.
        extra_sass, extra_ptx: images that only some kernels have (NCCL 2.27.5: sm_100f, for fp8 multimem kernels).
        ptx_isa: PTX image -> highest (major, minor) of its PTX ISA; the driver must know that ISA to compile it.
        counts: "sm_90" or "compute_90" -> number of images.
        groups: the containers, by content.
        stripped: the section table is gone, so containers were searched for in the whole file.
    """

    path: str
    size_bytes: int
    machine: str
    nccl_version: str | None
    cuda_build: str | None
    sass: tuple[Arch, ...]
    ptx: tuple[Arch, ...]
    extra_sass: tuple[Arch, ...]
    extra_ptx: tuple[Arch, ...]
    ptx_isa: Mapping[Arch, tuple[int, int]]
    counts: Mapping[str, int]
    groups: tuple[Group, ...]
    stripped: bool


def scan(path: str) -> Images:
    """Read the images of one library, in time linear in its headers (15 ms of CPU for a libnccl of 430 MB).

    Raises:
        LibraryUnreadable, NotALibrary: see `elf`.
        BrokenFatbin: the GPU code does not follow the layout above.
        NoGpuCode: there is none.
    """
    with mapped(path) as data:
        elf = Elf(data, path)
        tally = _Tally(path)
        for span in _spans(elf):
            for entries in _containers(data, span, path, strict=bool(elf.sections)):
                tally.add(span.name, entries)
        if not tally.groups:
            raise NoGpuCode(f"{path} holds no CUDA code at all: it is a stub, another vendor's library, or not NCCL")
        version, build = _nccl_version(data, elf)
        return tally.images(elf, version, build)


def core(groups: tuple[Group, ...]) -> tuple[frozenset[Arch], frozenset[Arch]]:
    """The (sass, ptx) that every ordinary kernel has: the intersection over containers.

    A container with only "a" or "f" images is a feature of some GPUs and left out, unless the library has no other kind. A
    device-linked container carries no PTX of its own: where there is relocatable code, that is what the driver compiles.
    """
    plain = [g for g in groups if any(not arch.suffix for arch in g.sass | g.ptx)] or list(groups)
    # Without a section table the two kinds cannot be told apart: PTX that is there is taken for the driver's, since a probe
    # tests it, whereas "no code at all" would be believed without one.
    relocatable = [g.ptx for g in plain if g.section == RELOCATABLE or (g.section == _ANYWHERE and g.ptx)]
    loaded = [g.ptx for g in plain if g.section == EXECUTABLE and (g.ptx or not relocatable)]
    sass = frozenset.intersection(*(g.sass for g in plain))
    ptx = frozenset.intersection(*relocatable, *loaded) if relocatable or loaded else frozenset()
    return sass, ptx


class _Tally:
    """What has been seen so far, kept small whatever the file holds."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.counts: Counter[str] = Counter()
        self.isa: dict[Arch, tuple[int, int]] = {}
        self.groups: Counter[tuple[str, frozenset[Arch], frozenset[Arch]]] = Counter()
        self.entries = 0

    def add(self, section: str, entries: list[tuple[int, int, int, int, int]]) -> None:
        sass: set[Arch] = set()
        ptx: set[Arch] = set()
        for kind, number, flags, major, minor in entries:
            arch = Arch(number, "a" if flags & _FLAG_A else "f" if flags & _FLAG_F else "")
            if kind == _KIND_SASS:
                sass.add(arch)
                self.counts[arch.sm] += 1
            elif kind == _KIND_PTX:
                ptx.add(arch)
                self.counts[arch.compute] += 1
                self.isa[arch] = max(self.isa.get(arch, (0, 0)), (major, minor))
        self.entries += len(entries)
        if sass or ptx:
            self.groups[section, frozenset(sass), frozenset(ptx)] += 1
        if self.entries > _MAX_ENTRIES or len(self.groups) > _MAX_GROUPS:
            raise BrokenFatbin(f"{self.path} holds more GPU images than any real library: its headers are not to be trusted")

    def images(self, elf: Elf, version: str | None, build: str | None) -> Images:
        groups = tuple(Group(section=s, sass=a, ptx=p, count=n) for (s, a, p), n in self.groups.items())
        sass, ptx = core(groups)
        return Images(
            path=self.path,
            size_bytes=len(elf.data),
            machine=elf.machine,
            nccl_version=version,
            cuda_build=build,
            sass=tuple(sorted(sass)),
            ptx=tuple(sorted(ptx)),
            extra_sass=tuple(sorted(frozenset().union(*(g.sass for g in groups)) - sass)),
            extra_ptx=tuple(sorted(frozenset().union(*(g.ptx for g in groups)) - ptx)),
            ptx_isa=self.isa,
            counts=dict(self.counts),
            groups=groups,
            stripped=not elf.sections,
        )


def _spans(elf: Elf) -> list[Span]:
    if not elf.sections:
        return [Span(name=_ANYWHERE, start=0, end=len(elf.data))]
    spans = sorted((s for s in elf.sections if s.name in (EXECUTABLE, RELOCATABLE)), key=lambda s: s.start)
    for before, after in itertools.pairwise(spans):
        if after.start < before.end:  # a forged table may name the same bytes often: time would no longer be linear
            raise BrokenFatbin(f"{elf.path} has overlapping GPU code sections, at {after.start:#x}")
    return spans


def _containers(data: mmap.mmap, span: Span, path: str, *, strict: bool) -> Iterator[list[tuple[int, int, int, int, int]]]:
    """Yield the entries of each container in a span, as (kind, arch, flags, major, minor).

    `strict` (a fatbin section): between containers only zero padding is allowed, so that a damaged container is an error and
    not a missing image. Without sections the magic may also occur by chance, so only a plausible header counts.
    """
    at = kept_from = span.start
    while at < span.end:
        if strict:
            start = first_nonzero(data, at, span.end)  # the magic has no zero byte: it starts where padding ends
        else:
            found = search(data, _MAGIC, at, span.end, longest=4)
            start = found.start() if found else None
        if start is None:
            return
        at = start
        if at - kept_from > PIECE_BYTES:
            let_go(data, at)
            kept_from = at
        if at + _CONTAINER.size > span.end:
            raise BrokenFatbin(f"{path}: a GPU code container at {at:#x} is cut short")
        magic, version, header_bytes, body_bytes = _CONTAINER.unpack_from(data, at)
        plausible = magic == MAGIC and version == _VERSION and header_bytes >= _CONTAINER.size
        if not plausible and not strict:
            at += 4
            continue
        if not plausible:
            raise BrokenFatbin(
                f"{path}: at {at:#x} of {span.name} there is no GPU code container of a known form"
                f" (magic {magic:#x}, version {version})"
            )
        end = at + header_bytes + body_bytes
        if end > span.end:
            raise BrokenFatbin(f"{path}: the GPU code container at {at:#x} runs past the end of {span.name}")
        yield list(_entries(data, at + header_bytes, end, path))
        at = end


def _entries(data: mmap.mmap, at: int, end: int, path: str) -> Iterator[tuple[int, int, int, int, int]]:
    while at + _ENTRY.size <= end:
        kind, _, header_bytes, payload_bytes, _, _, minor, major, number, _, _, flags = _ENTRY.unpack_from(data, at)
        if header_bytes < _ENTRY.size or at + header_bytes + payload_bytes > end:
            raise BrokenFatbin(f"{path}: the GPU image at {at:#x} runs past its container")
        if kind in (_KIND_PTX, _KIND_SASS) and not 10 <= number <= _MAX_ARCH:
            raise BrokenFatbin(f"{path}: the GPU image at {at:#x} claims architecture {number}, which is none")
        yield kind, number, flags, major, minor
        at += header_bytes + payload_bytes
    if first_nonzero(data, at, end) is not None:
        raise BrokenFatbin(f"{path}: {end - at} bytes at {at:#x} belong to no GPU image")


def _nccl_version(data: mmap.mmap, elf: Elf) -> tuple[str | None, str | None]:
    spans = [s for s in elf.sections if s.name == ".rodata"] or [Span(name=_ANYWHERE, start=0, end=len(data))]
    for span in spans:
        found = search(data, _NCCL, span.start, span.end, longest=_LONGEST_VERSION)
        if found:
            return found[1].decode(), found[2].decode()
    return None, None
