"""Which libnccl this process will load, found as the dynamic loader would, without importing torch or loading anything."""

from __future__ import annotations

import glob
import importlib.util
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from ray_nccl_guard.compat.elf import Elf, Loading
from ray_nccl_guard.compat.errors import CompatError
from ray_nccl_guard.compat.ldcache import system_library
from ray_nccl_guard.compat.mapping import mapped

SONAME = "libnccl.so.2"


class Via(Enum):
    """How the loader comes to the file."""

    PRELOAD = "LD_PRELOAD"
    RPATH = "the RPATH of libtorch_cuda.so"
    LIBRARY_PATH = "LD_LIBRARY_PATH"
    RUNPATH = "the RUNPATH of libtorch_cuda.so"
    SYSTEM = "the loader's cache and default directories"
    STATIC = "NCCL linked into libtorch_cuda.so"
    TORCH_PRELOAD = "torch's own search of nvidia/nccl on sys.path"
    WHEEL = "the nvidia-nccl wheel; there is no torch here that would load it"
    GIVEN = "the path given"


@dataclass(frozen=True, slots=True, kw_only=True)
class LibraryFile:
    """A library file, and how the loader comes to it."""

    path: str
    via: Via


def find_libtorch_cuda() -> LibraryFile | None:
    """The libtorch_cuda.so of the torch that `import torch` would find; None without torch, or if it has no CUDA."""
    directory = torch_directory()
    if directory is None:
        return None
    # Wheels and images keep it inside the package; conda-forge splits libtorch off into the environment's lib folder.
    folders = (os.path.join(directory, "lib"), os.path.join(directory, *[os.pardir] * 3), os.path.join(sys.prefix, "lib"))
    found = next(iter(_in(folders, ("libtorch_cuda.so",))), None)
    return LibraryFile(path=os.path.realpath(found), via=Via.GIVEN) if found else None


def torch_directory() -> str | None:
    """The folder of the torch that `import torch` would find, None without torch. A torch without CUDA counts."""
    return _package("torch")


def find_libnccl(env: Mapping[str, str] | None = None) -> LibraryFile | None:
    """The libnccl that this process will load, None if none is to be found, or if torch is built without CUDA.

    The order is ld.so(8)'s: LD_PRELOAD, the DT_RPATH of libtorch_cuda.so if it has no DT_RUNPATH, LD_LIBRARY_PATH,
    DT_RUNPATH, the cache and default directories; at last the wheels on sys.path, which torch preloads where the loader
    finds nothing (torch/__init__.py, `_preload_cuda_deps`). Without torch it is LD_PRELOAD, LD_LIBRARY_PATH,
    the nvidia-nccl wheel, the system's.

    Raises:
        CompatError: libtorch_cuda.so is there and cannot be read as a library.
    """
    env = os.environ if env is None else env
    torch = find_libtorch_cuda()
    if torch is None and torch_directory():
        return None  # an NCCL wheel may lie about, but this torch loads none
    if torch is None:
        return _first([(Via.PRELOAD, _preloaded(env)), (Via.LIBRARY_PATH, _in(_library_path(env), (SONAME,))),
                       (Via.WHEEL, _wheels()), (Via.SYSTEM, _system((SONAME,)))])  # fmt: skip
    return resolve(torch.path, env)


def resolve(libtorch_cuda: str, env: Mapping[str, str]) -> LibraryFile | None:
    """What the loader finds for the NCCL that this libtorch_cuda.so needs; the file itself if NCCL is linked into it."""
    with mapped(libtorch_cuda) as data:
        loading = Elf(data, libtorch_cuda).loading()
    names = tuple(name for name in loading.needed if name.startswith("libnccl.so"))
    if not names:
        return _first([(Via.PRELOAD, _preloaded(env)), (Via.STATIC, [libtorch_cuda])])
    origin = os.path.dirname(os.path.realpath(libtorch_cuda))
    # ld.so ignores DT_RPATH where the library also has a DT_RUNPATH.
    rpath = () if loading.runpath else loading.rpath
    return _first([
        (Via.PRELOAD, _preloaded(env)),
        (Via.RPATH, _in(_expanded(rpath, origin), names)),
        (Via.LIBRARY_PATH, _in(_library_path(env), names)),
        (Via.RUNPATH, _in(_expanded(loading.runpath, origin), names)),
        (Via.SYSTEM, _system(names)),
        (Via.TORCH_PRELOAD, _wheels()),
    ])  # fmt: skip


def _first(places: Sequence[tuple[Via, Iterable[str]]]) -> LibraryFile | None:
    return next((LibraryFile(path=os.path.realpath(path), via=via) for via, paths in places for path in paths), None)


def _in(directories: Iterable[str], names: Sequence[str]) -> Iterable[str]:
    return (path for d in directories for name in names if os.path.isfile(path := os.path.join(d, name)))


def _expanded(entries: Iterable[str], origin: str) -> list[str]:
    return [entry.replace("${ORIGIN}", origin).replace("$ORIGIN", origin) for entry in entries]


def _library_path(env: Mapping[str, str]) -> list[str]:
    # Both separators are the loader's; an empty entry is the current directory.
    text = env.get("LD_LIBRARY_PATH", "")
    return [entry or os.curdir for entry in text.replace(";", ":").split(":")] if text else []


def _preloaded(env: Mapping[str, str]) -> Iterable[str]:
    """Preloaded files that are NCCL, by soname: they win the symbol lookup even where torch's own copy is mapped too."""
    for entry in env.get("LD_PRELOAD", "").replace(":", " ").split():
        path = entry if "/" in entry else next(iter(_in(_library_path(env), (entry,))), system_library(entry))
        if path and os.path.isfile(path) and _soname(path).startswith("libnccl.so"):
            yield path


def _soname(path: str) -> str:
    try:
        with mapped(path) as data:
            loading: Loading = Elf(data, path).loading()
    except CompatError:
        return ""  # the loader itself skips what it cannot preload, with a message of its own
    return loading.soname or os.path.basename(path)


def _system(names: Sequence[str]) -> Iterable[str]:
    return (path for name in names if (path := system_library(name)))


def _wheels() -> Iterable[str]:
    """libnccl of an nvidia-nccl-cu* wheel on sys.path."""
    for directory in sys.path:
        yield from sorted(
            glob.glob(os.path.join(glob.escape(directory or os.curdir), "nvidia", "nccl", "lib", "libnccl.so.*[0-9]"))
        )


def _package(name: str) -> str | None:
    """The directory of an installed package, found without importing it."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):  # ValueError: a module object without a spec sits in sys.modules
        return None
    return os.path.dirname(spec.origin) if spec and spec.origin else None
