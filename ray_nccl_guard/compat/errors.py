"""What goes wrong when a library is looked at: each is one sentence, and none of them is ever a pass."""

from __future__ import annotations

from ray_nccl_guard.errors import GuardError


class CompatError(GuardError):
    """The library cannot be shown compatible: it is absent, unreadable, or not what it should be."""


class LibraryUnreadable(CompatError):
    """The path is no readable regular file: absent, a directory, a FIFO, no permission."""


class NotALibrary(CompatError):
    """The file is readable, but no whole little-endian ELF64 library: a script, an archive, 32 bit, cut short."""


class BrokenFatbin(CompatError):
    """The ELF file is whole, but its GPU code is not laid out as `fatbin` knows it."""


class NoGpuCode(CompatError):
    """The library is whole and holds no CUDA code at all: a stub, another vendor's, or not the library meant."""
