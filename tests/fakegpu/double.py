"""Builds the fake NVIDIA libraries for an installed torch and gives the environment in which a process sees fake GPUs."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCES = HERE / "src"
SITE = HERE / "site"
COMPILE = ("gcc", "-O1", "-g", "-fPIC", "-pthread", "-Wall", "-Wextra")

NODE = ("fault_language", "fault", "node", "ledger")
RUNTIME = (*NODE, "cudart_core", "cudart_device", "cudart_memory", "cudart_stream", "cudart_event", "cudart_kernel")
NCCL = ("nccl_log", "nccl_fault", "nccl_segment", "nccl_data", "nccl_queue", "nccl_comm", "nccl_split")
OWN = ("libcudart.so.13", "libcuda.so.1", "libnvidia-ml.so.1", "libnccl.so.2")

# Which stand-in gets a symbol that carries no version node; others are told by theirs ("cublasCreate_v2@libcublas.so.13").
UNVERSIONED = {"libcusparseLt": "cusparseLt", "libcufile": "cuFile", "libcurand": "curand", "libnvshmem_host": "nvshmem"}

OPTIONS = {
    "cc": "FAKE_CUDA_CC",
    "mem": "FAKE_CUDA_MEM",
    "name": "FAKE_CUDA_NAME",
    "driver": "FAKE_CUDA_DRIVER",
    "runtime": "FAKE_CUDA_RUNTIME",
    "mig": "FAKE_CUDA_MIG",
    "mig_seen": "FAKE_CUDA_MIG_SEEN",
    "compute_mode": "FAKE_CUDA_COMPUTE_MODE",
    "node": "FAKE_CUDA_NODE",
    "state": "FAKE_CUDA_STATE",
    "fault": "FAKE_FAULT",
    "nccl": "FAKE_NCCL_VERSION",
    "shm": "FAKE_NCCL_SHM",
    "peer_death": "FAKE_NCCL_PEER_DEATH",
    "p2p_status": "FAKE_NVML_P2P",
    "fabric_state": "FAKE_NVML_FABRIC",
    "ecc_errors": "FAKE_NVML_ECC",
}


# What torch looks up in NVML by name (c10/cuda/driver_api.cpp): a missing one is an internal error there.
NVML_OF_TORCH = {"nvmlDeviceGetNvLinkRemoteDeviceType", "nvmlDeviceGetNvLinkRemotePciInfo_v2"}


class CannotBuild(RuntimeError):
    """The double cannot be built here; the message says why and what would help."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Double:
    """A built double.

    Attributes:
        folder: where libcudart.so.13, libcuda.so.1, libnvidia-ml.so.1 and libnccl.so.2 lie.
        stand_ins: folder of empty stand-ins for the other NVIDIA libraries; None where torch has the real ones.
    """

    folder: Path
    stand_ins: Path | None

    def env(self, devices: int = 4, *, ops: bool = False, **options: object) -> dict[str, str]:
        """The variables to add to a process's environment so that it sees `devices` fake GPUs.

        Options, all described in README.md: cc, mem (bytes per GPU), name, driver, runtime, mig, mig_seen, compute_mode, node,
        state (a folder), fault, nccl (23007 means 2.30.7), shm (a folder), peer_death, p2p_status, fabric_state, ecc_errors.
        `ops` gives kernels an effect. Existing LD_PRELOAD, LD_LIBRARY_PATH and PYTHONPATH are kept behind ours. Raises
        TypeError for other options.
        """
        unknown = sorted(set(options) - set(OPTIONS))
        if unknown:
            raise TypeError(f"unknown option {unknown[0]!r}; the options are {', '.join(OPTIONS)}")
        env = {"FAKE_CUDA_DEVICES": str(devices)}
        env.update({OPTIONS[name]: str(value) for name, value in options.items()})
        if self.stand_ins is None:
            # torch's DT_RPATH beats LD_LIBRARY_PATH, so only a preload comes before the real libraries.
            env["LD_PRELOAD"] = _join(" ", *(str(self.folder / name) for name in OWN), os.environ.get("LD_PRELOAD", ""))
        else:
            paths = (str(self.folder), str(self.stand_ins), os.environ.get("LD_LIBRARY_PATH", ""))
            env["LD_LIBRARY_PATH"] = _join(":", *paths)
        if ops:
            env["FAKE_CUDA_OPS"] = "1"
            env["PYTHONPATH"] = _join(":", str(SITE), os.environ.get("PYTHONPATH", ""))
        return env


def build(site_packages: Path | None = None) -> Double:
    """Builds, or finds in the cache, the double for the torch under `site_packages` (default: the one imported here).

    Takes about 5 s of CPU the first time. The cache is keyed by our sources and by torch's libraries, and locked, so that
    test processes may call this at once. Raises CannotBuild where gcc or nm or a CUDA build of torch is missing.
    """
    site = site_packages or site_of_torch()
    torch_libraries = sorted((site / "torch" / "lib").glob("*.so"))
    if not any(path.name == "libtorch_cuda.so" for path in torch_libraries):
        raise CannotBuild(f"no CUDA build of torch under {site}; install torch from the default package index")
    for tool in ("gcc", "nm", "readelf"):
        if shutil.which(tool) is None:
            raise CannotBuild(f"{tool} is not installed; install gcc and binutils")
    with _locked_cache() as cache:
        folder = cache / _key(torch_libraries, _absent(torch_libraries, site))
        if not (folder / "complete").exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            _compile_all(folder, torch_libraries, site)
            (folder / "complete").touch()
            _prune(cache)
    return Double(folder=folder, stand_ins=folder / "stand_ins" if (folder / "stand_ins").exists() else None)


def site_of_torch() -> Path:
    """Where `import torch` finds it, which a .pth file may have put elsewhere than this interpreter's own packages."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise CannotBuild("torch is not installed; install it from the default package index")
    return Path(spec.origin).parents[1]


def _join(separator: str, *parts: str) -> str:
    return separator.join(part for part in parts if part)


def _key(torch_libraries: list[Path], absent: set[str]) -> str:
    digest = hashlib.sha256()
    for source in [*sorted(SOURCES.iterdir()), Path(__file__)]:
        digest.update(source.name.encode() + source.read_bytes())
    for library in torch_libraries:  # by name and size: their content is hundreds of MB
        digest.update(f"{library.resolve()}:{library.stat().st_size}:{library.stat().st_mtime_ns}".encode())
    digest.update(" ".join(sorted(absent)).encode())
    return digest.hexdigest()[:16]


def _prune(cache: Path) -> None:
    """Removes all builds but the newest 16: more than one machine has installations of torch in use at once."""
    builds = sorted((path.parent for path in cache.glob("*/complete")), key=lambda path: path.stat().st_mtime)
    for folder in builds[:-16]:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _locked_cache() -> Iterator[Path]:
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    cache = Path(base) / "ray_nccl_guard_fakegpu"
    cache.mkdir(parents=True, exist_ok=True)
    with open(cache / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield cache


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)  # each takes a second or two
    if done.returncode:
        raise CannotBuild(f"{' '.join(command[:2])} failed:\n{done.stderr[-2000:]}")
    return done.stdout


def _symbols(libraries: list[Path], which: str) -> set[str]:
    """Dynamic symbols, "name" or "name@VERSION"; `which` is nm's --undefined-only or --defined-only."""
    lines = _run("nm", "-D", which, *map(str, libraries)).splitlines() if libraries else []
    return {line.split()[-1].replace("@@", "@") for line in lines if line and not line.endswith(":")}


def _needed(libraries: list[Path]) -> set[str]:
    return set(re.findall(r"\(NEEDED\).*\[(.+)\]", _run("readelf", "-d", *map(str, libraries))))


def _compile_all(folder: Path, torch_libraries: list[Path], site: Path) -> None:
    undefined = _symbols(torch_libraries, "--undefined-only")
    real = [path for name in OWN for path in site.glob(f"nvidia/**/{name}")]
    wanted = {name.partition("@")[0] for name in undefined | _symbols(real, "--defined-only")}
    _library(
        folder,
        "libcudart.so.13",
        RUNTIME,
        {n for n in wanted if re.match(r"(__)?cuda[A-Z]", n)},
        "return runtime_unsupported",
    )
    drivers = {n for n in wanted if re.match(r"cu[A-Z]", n) and not n.startswith("cuFile")} | {
        "cuGetProcAddress_v2",
        "cuGetExportTable",
    }
    _library(folder, "libcuda.so.1", ("libcuda",), drivers, "return runtime_unsupported")
    _library(folder, "libnvidia-ml.so.1", ("nvml", *NODE), _nvml_names(site), "return 3; (void)")
    _library(folder, "libnccl.so.2", NCCL, {n for n in wanted if n.startswith("nccl")}, "runtime_unsupported", "return 5")
    if absent := _absent(torch_libraries, site):
        (folder / "stand_ins").mkdir()
        for soname in sorted(absent):
            _stand_in(folder / "stand_ins", soname, undefined)


def _absent(torch_libraries: list[Path], site: Path) -> set[str]:
    """The NVIDIA libraries, other than ours, that torch is linked to and that are not installed."""
    installed = {path.name for path in site.glob("nvidia/**/*.so*")}
    nvidia = {name for name in _needed(torch_libraries) if re.match(r"lib(cu|nv|nccl).*\.so\.", name)}
    return nvidia - installed - set(OWN)


def _nvml_names(site: Path) -> set[str]:
    """What torch and the installed nvidia-ml-py may ask for: functions not written here answer NOT_SUPPORTED."""
    spec = importlib.util.find_spec("pynvml")
    sources = [site / "pynvml.py", *([Path(spec.origin)] if spec and spec.origin else [])]
    text = next((source.read_text() for source in sources if source.exists()), "")
    python_names = re.findall(r'"(nvml[A-Z]\w+)"', text)
    return NVML_OF_TORCH | set(python_names)


def _library(folder: Path, soname: str, sources: tuple[str, ...], names: set[str], call: str, after: str = "") -> None:
    """Links our sources and a stub for every wanted name that they do not define."""
    objects = []
    for name in sources:
        objects.append(folder / f"{soname}.{name}.o")
        _run(*COMPILE, "-c", str(SOURCES / f"{name}.c"), "-o", str(objects[-1]))
    written = {
        line.split()[-1] for line in _run("nm", "--defined-only", *map(str, objects)).splitlines() if len(line.split()) == 3
    }
    stubs = folder / f"{soname}.stubs.c"
    body = (f'int {name}(void) {{ {call}("{name}"); {after}; }}\n' for name in sorted(names - written))
    stubs.write_text("int runtime_unsupported(const char *);\n" + "".join(body))
    link = [f"-Wl,-soname,{soname}", "-o", str(folder / soname), *map(str, objects), str(stubs), "-ldl"]
    if soname == "libcudart.so.13":
        link.append(f"-Wl,--version-script={SOURCES / 'cudart.map'}")
    elif soname != "libnvidia-ml.so.1":
        link += [f"-L{folder}", "-l:libcudart.so.13", "-Wl,-rpath,$ORIGIN"]
    _run("gcc", "-O1", "-fPIC", "-shared", "-pthread", *link)


def _stand_in(folder: Path, soname: str, undefined: set[str]) -> None:
    """A library of that name whose functions all return 1, which is an error in each of these interfaces."""
    stem = soname.split(".so")[0]
    own = {
        name
        for name in undefined
        if name.partition("@")[2] in (soname, stem) or name.partition("@")[2].startswith(f"{stem}.so")
    }
    prefix = UNVERSIONED.get(stem)
    own |= {name for name in undefined if prefix and name.startswith(prefix)}
    nodes = {name.partition("@")[2] for name in own} - {""}
    source, script = folder / f"{stem}.c", folder / f"{stem}.map"
    names = sorted({name.partition("@")[0] for name in own})
    source.write_text(f"int {stem}_is_a_stand_in;\n" + "".join(f"int {name}(void) {{ return 1; }}\n" for name in names))
    script.write_text("".join(f"{node} {{ global: *; }};\n" for node in sorted(nodes)[:1]))
    version = [f"-Wl,--version-script={script}"] if nodes else []
    _run("gcc", "-O1", "-fPIC", "-shared", "-w", f"-Wl,-soname,{soname}", *version, "-o", str(folder / soname), str(source))


def exports(env: Mapping[str, str]) -> str:
    """Lines for a shell to eval."""
    return "\n".join(f"export {name}={shlex.quote(value)}" for name, value in env.items())


if __name__ == "__main__":
    try:
        print(exports(build(Path(sys.argv[1]) if len(sys.argv) > 1 else None).env()))
    except CannotBuild as reason:
        sys.exit(f"double: {reason}")
