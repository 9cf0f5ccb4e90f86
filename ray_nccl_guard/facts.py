"""Facts: what is true of each rank before anything is tried: host, GPU, versions, settings. Standard library only."""

from __future__ import annotations

import importlib.metadata
import os
import resource
import socket
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from ray_nccl_guard import nccl_conf
from ray_nccl_guard.classes import FailureClass

if TYPE_CHECKING:
    from ray_nccl_guard.network.addresses import AddressChoice

_T = TypeVar("_T")

# Settings that decide how NCCL, gloo and CUDA behave; compared across ranks and across attempts.
SETTING_PREFIXES = ("NCCL_", "TORCH_NCCL_", "TORCH_DIST_", "GLOO_", "CUDA_", "PYTORCH_CUDA_ALLOC_CONF", "TORCH_GLOO_")

# NCCL's buffers in /dev/shm take about 10 MB a rank and more with many channels; Docker's default of 64 MB is what users
# run into (NVIDIA troubleshooting guide, "/dev/shm"; nccl#1466).
SMALL_SHM_BYTES = 128 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something a stage saw besides the ranks' own words: a fact, a network cell, a hazard.

    Attributes:
        failure: the class (its value) that it speaks for.
        decides: True if it is a verdict by itself, False if it only explains a failure that happened.
        culprit_ranks: the ranks it points at, empty if none.
        relief: the smallest setting known to sidestep it.
    """

    failure: str
    text: str
    decides: bool = False
    culprit_ranks: tuple[int, ...] = ()
    relief: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One physical GPU (or MIG slice) as NVML tells it. `capability` is (major, minor), memory is in bytes."""

    uuid: str
    name: str = ""
    capability: tuple[int, int] | None = None
    total_bytes: int | None = None
    free_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFacts:
    """What is true of one rank.

    Attributes:
        node: identity of the node as the launcher (Ray) knows it; `host` is its name, `address` its IP.
        device_index: the rank's device among those its process sees; None on the CPU.
        gpu_ids: the ids that the launcher gave this rank.
        gpu: its GPU through NVML, None if NVML was not run; then `not_run` says why.
        driver_version, driver_cuda: the driver, and the CUDA version it supports as (major, minor).
        torch_version: of the installed package; torch itself is not imported for it.
        settings: environment variables under `SETTING_PREFIXES`, and what NCCL's configuration files set beside them.
        settings_from: the file of each setting that is not from the environment.
        shm_total_bytes, shm_free_bytes: of /dev/shm, None where there is none.
        mtu: bytes per packet of each network interface, loopback left out.
        limits: soft limits that NCCL meets, e.g. `memlock` in bytes (-1 unlimited).
        libnccl: the file that this process will load, with its version and a fingerprint of its content.
        jit: the driver must compile libnccl for this GPU at its first use, which takes minutes.
        addresses: what NCCL and gloo would take on this host (see `network.addresses`).
        notes: what is worth a line in the report and explains no failure.
        not_run: checks that could not be made, with their reason. They are never taken as passed.
    """

    rank: int
    host: str = ""
    node: str = ""
    address: str = ""
    pid: int = 0
    local_rank: int = 0
    device_index: int | None = None
    gpu_ids: tuple[str, ...] = ()
    gpu: Gpu | None = None
    gpu_count: int | None = None
    driver_version: str = ""
    driver_cuda: tuple[int, int] | None = None
    torch_version: str = ""
    python_version: str = ""
    settings: Mapping[str, str] = field(default_factory=dict)
    settings_from: Mapping[str, str] = field(default_factory=dict)
    shm_total_bytes: int | None = None
    shm_free_bytes: int | None = None
    limits: Mapping[str, int] = field(default_factory=dict)
    mtu: Mapping[str, int] = field(default_factory=dict)
    libnccl: Mapping[str, str] = field(default_factory=dict)
    jit: bool = False
    addresses: AddressChoice | None = None
    findings: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()
    not_run: Mapping[str, str] = field(default_factory=dict)

    @property
    def identity(self) -> tuple[str, tuple[str, ...], tuple[tuple[str, str], ...]]:
        """Equal for two attempts on the same hardware with the same settings."""
        settings = tuple(sorted((k, v) for k, v in self.settings.items() if not k.startswith("CUDA_VISIBLE")))
        return self.node, self.gpu_ids, settings


def collect(rank: int, **known: object) -> RankFacts:
    """Facts of this process. `known` are fields that only the launcher can tell (node, address, device_index, gpu_ids)."""
    not_run: dict[str, str] = {}
    total, free = _measure("/dev/shm", _shm, not_run) or (None, None)
    in_files = nccl_conf.settings(os.environ)
    facts = {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "torch_version": _measure("torch", lambda: importlib.metadata.version("torch"), not_run) or "",
        "python_version": ".".join(map(str, sys.version_info[:3])),
        "settings": {**{name: value for name, (value, _) in in_files.items()}, **settings(os.environ)},
        "settings_from": {name: path for name, (_, path) in in_files.items()},
        "shm_total_bytes": total,
        "shm_free_bytes": free,
        "mtu": _mtu(),
        "limits": {
            "memlock": resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
            "nofile": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        },
    }
    if isinstance(index := known.get("device_index"), int):
        from ray_nccl_guard import gpu_facts  # only where there is a GPU: it reads libraries and asks NVML

        gpu = gpu_facts.collect(rank, index, os.environ)
        not_run |= gpu.pop("not_run")
        facts |= gpu
    return RankFacts(rank=rank, not_run=not_run, **{**facts, **known})  # type: ignore[arg-type]


def settings(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of `environ` that decide how NCCL, gloo and CUDA behave."""
    return {name: value for name, value in sorted(environ.items()) if name.startswith(SETTING_PREFIXES)}


def merged(of_ranks: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """The settings of all ranks as one; where they differ, one of the values."""
    return {name: value for of_rank in of_ranks for name, value in of_rank.items()}


def _mtu() -> dict[str, int]:
    """The MTU of every interface but the loopback; virtual ends of containers' links come and go and are left out."""
    found = {}
    for name in sorted(os.listdir("/sys/class/net")) if os.path.isdir("/sys/class/net") else ():
        if name != "lo" and not name.startswith(("veth", "cali", "lxc")):
            try:
                with open(f"/sys/class/net/{name}/mtu") as file:
                    found[name] = int(file.read())
            except (OSError, ValueError):
                continue  # it went away, or is no interface (bonding_masters)
    return found


def _shm() -> tuple[int, int]:
    stat = os.statvfs("/dev/shm")
    return stat.f_blocks * stat.f_frsize, stat.f_bavail * stat.f_frsize


def _measure(name: str, measure: Callable[[], _T], not_run: dict[str, str]) -> _T | None:
    try:
        return measure()
    except (OSError, importlib.metadata.PackageNotFoundError) as error:
        not_run[name] = f"{type(error).__name__}: {error}"
        return None


def findings(facts: Sequence[RankFacts], *, backend: str, asked_gpus: float) -> tuple[Finding, ...]:
    """What the facts say before any collective. Only what no probe can pass decides; the rest explains a failure."""
    if "nccl" not in backend:
        return ()
    found = [finding for rank in facts for finding in rank.findings]
    found += _no_gpu(facts)
    found += _shared_gpu(facts, asked_gpus)
    found += _small_shm(facts)
    return tuple(found)


def _no_gpu(facts: Sequence[RankFacts]) -> list[Finding]:
    blind = tuple(f.rank for f in facts if f.device_index is None)
    if not blind:
        return []
    where = "no rank" if len(blind) == len(facts) else f"{len(facts) - len(blind)} of {len(facts)} ranks"
    text = f"{where} {'has' if len(blind) == len(facts) else 'have'} a GPU assigned"
    return [Finding(failure=FailureClass.NO_GPU_VISIBLE.value, text=text, decides=True, culprit_ranks=blind)]


def _shared_gpu(facts: Sequence[RankFacts], asked_gpus: float) -> list[Finding]:
    on: dict[tuple[str, str], list[RankFacts]] = {}
    for fact in facts:
        if fact.device_index is not None:
            card = fact.gpu.uuid if fact.gpu else (fact.gpu_ids[0] if fact.gpu_ids else str(fact.device_index))
            on.setdefault((fact.node, card), []).append(fact)
    shared = {place: ranks for place, ranks in on.items() if len(ranks) > 1}
    allowed = all(f.settings.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1" for ranks in shared.values() for f in ranks)
    if not shared or allowed:
        return []
    (_, card), ranks = next(iter(shared.items()))
    names = " and ".join(str(f.rank) for f in ranks)
    asked = f" ({asked_gpus:g} GPU a worker was asked for)" if 0 < asked_gpus < 1 else ""
    return [
        Finding(
            failure=FailureClass.DUPLICATE_GPU.value,
            text=f"ranks {names} share GPU {card} on host {ranks[0].host}{asked}",
            decides=True,
            culprit_ranks=tuple(f.rank for ranks in shared.values() for f in ranks),
        )
    ]


def _small_shm(facts: Sequence[RankFacts]) -> list[Finding]:
    small = [f for f in facts if f.shm_free_bytes is not None and f.shm_free_bytes < SMALL_SHM_BYTES]
    if not small:
        return []
    least = min(small, key=lambda f: f.shm_free_bytes or 0)
    return [
        Finding(
            failure=FailureClass.SHM_TOO_SMALL.value,
            text=f"/dev/shm on host {least.host} has {(least.shm_free_bytes or 0) >> 20} MiB free "
            f"of {(least.shm_total_bytes or 0) >> 20} MiB",
            culprit_ranks=tuple(f.rank for f in small),
            relief={"NCCL_SHM_DISABLE": "1"},
        )
    ]
