"""Which libnccl IS loaded in this process, and is it the one torch was compiled against; asks the loader, not file names."""

from __future__ import annotations

import ctypes
import os
import sys
from dataclasses import dataclass
from typing import Any

from ray_nccl_guard.compat.locate import find_libtorch_cuda

Version = tuple[int, int, int]

_MAPS = "/proc/self/maps"
_RTLD_NOLOAD = getattr(os, "RTLD_NOLOAD", 4)


class _DlInfo(ctypes.Structure):
    _fields_ = [
        ("dli_fname", ctypes.c_char_p),
        ("dli_fbase", ctypes.c_void_p),
        ("dli_sname", ctypes.c_char_p),
        ("dli_saddr", ctypes.c_void_p),
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedLibrary:
    """The NCCL that calls in this process reach.

    Attributes:
        path: the file its `ncclGetVersion` lies in; libtorch_cuda.so itself where NCCL is linked into it.
        version: what that function returns.
        copies: every libnccl file mapped, in the order of /proc/self/maps; two mean that one shadows the other.
        compiled: what torch was compiled against (`torch.cuda.nccl.version()`, a constant of the build), None without torch.
    """

    path: str
    version: Version
    copies: tuple[str, ...]
    compiled: Version | None

    @property
    def swapped(self) -> bool:
        """True if the library in use is not of the version that torch was compiled against."""
        return self.compiled is not None and self.compiled != self.version


def loaded_libnccl() -> LoadedLibrary | None:
    """The NCCL loaded in this process, None if none is. Never loads one, and makes no CUDA call."""
    # Order of the loader's lookup: the global scope (a preloaded copy lives there), then the scope of libtorch_cuda.
    handles = [None, *(path for path in [_torch_library()] if path), *mapped_copies()]
    for path in handles:
        function = _symbol(path)
        if function is None:
            continue
        number = ctypes.c_int()
        if function(ctypes.byref(number)) != 0:
            continue
        return LoadedLibrary(
            path=_file_of(function) or path or "",
            version=decode(number.value),
            copies=mapped_copies(),
            compiled=compiled_version(),
        )
    return None


def decode(code: int) -> Version:
    """NCCL_VERSION_CODE as (major, minor, patch): 23007 is 2.30.7; below 2.9 the digits are shorter (nccl.h)."""
    return (
        (code // 10_000, code // 100 % 100, code % 100) if code >= 10_000 else (code // 1000, code // 100 % 10, code % 100)
    )


def compiled_version() -> Version | None:
    """The NCCL version torch was compiled against; None if torch is not imported already or has no CUDA."""
    nccl = getattr(getattr(sys.modules.get("torch"), "cuda", None), "nccl", None)
    if nccl is None or find_libtorch_cuda() is None:
        return None
    found = nccl.version()
    return (int(found[0]), int(found[1]), int(found[2])) if isinstance(found, tuple) else decode(int(found))


def mapped_copies() -> tuple[str, ...]:
    """Every libnccl.so* file mapped into this process, once each."""
    try:
        with open(_MAPS, encoding="utf-8", errors="replace") as file:
            paths = [line.split(maxsplit=5)[5].strip() for line in file if "libnccl" in line]
    except OSError:
        return ()
    return tuple(dict.fromkeys(path for path in paths if os.path.basename(path).startswith("libnccl.so")))


def _torch_library() -> str | None:
    if "torch" not in sys.modules:
        return None
    library = find_libtorch_cuda()
    return library.path if library else None


def _symbol(path: str | None) -> Any | None:
    try:
        # NOLOAD: an already loaded library is found, another one is never brought in.
        library = ctypes.CDLL(path, mode=os.RTLD_LAZY | _RTLD_NOLOAD) if path else ctypes.CDLL(None)
        return library.ncclGetVersion
    except (OSError, AttributeError):
        return None


def _file_of(function: Any) -> str | None:
    info = _DlInfo()
    dladdr = ctypes.CDLL(None).dladdr
    dladdr.argtypes = [ctypes.c_void_p, ctypes.POINTER(_DlInfo)]
    address = ctypes.cast(function, ctypes.c_void_p)
    if not dladdr(address, ctypes.byref(info)) or not info.dli_fname:
        return None
    name: bytes = info.dli_fname
    return os.path.realpath(name.decode("utf-8", "replace"))
