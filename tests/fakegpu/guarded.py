"""A whole pre-flight without Ray, run by the rank server under the double: real workers, probe, verdict, ladder, and what is left."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from ray_nccl_guard import facts
from ray_nccl_guard.guard import Preflight
from ray_nccl_guard.ladder import Ladder
from ray_nccl_guard.policy import Policy
from ray_nccl_guard.probe import serve
from ray_nccl_guard.probe.leader import Leader
from ray_nccl_guard.probe.local import LocalRanks
from ray_nccl_guard.probe.operations import expand
from ray_nccl_guard.probe.serve import Place
from ray_nccl_guard.probe.spec import ProbeSpec, Start
from ray_nccl_guard.probe.workers import values
from ray_nccl_guard.prove.prover import Prover
from ray_nccl_guard.prove.worlds import Worlds
from ray_nccl_guard.report import Report
from ray_nccl_guard.rung import Wanted, has_legacy
from tests.process.ranks import children_of

_JOIN_S = 60.0


def preflight(
    _rank: int,
    _world: int,
    *,
    ranks: int,
    backend: str,
    spec: Mapping[str, Any],
    devices: Sequence[int | None] | None = None,
    asked_gpus: float = 1.0,
    policy: str | Mapping[str, Any] = "default",
    touched: str = "",
) -> dict[str, Any]:
    """The report of a pre-flight of `ranks` workers on this machine as JSON values, and what it left behind.

    `devices` are the workers' device indices (default: one GPU each). `touched` is what the workers did before the probe:
    `cuda` (as a module that asks torch.cuda.is_available() at import) or `openmp` (torch's thread pool was used).
    """
    import torch.distributed as dist

    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):  # the rank server's own; a worker has none before the guard
        os.environ.pop(name, None)
    os.chdir(os.environ["FAKE_CUDA_STATE"])  # every process from here on is known by its working directory
    _touch(touched)
    on = list(range(ranks)) if devices is None else list(devices)
    places = [
        Place(rank=r, world_size=ranks, local_rank=r, store_host="127.0.0.1", store_port=0, device_index=on[r])
        for r in range(ranks)
    ]
    with LocalRanks(places) as workers:
        store = dist.TCPStore("127.0.0.1", 0, None, True, timeout=timedelta(seconds=30), wait_for_workers=False)
        workers.connect(store.port)
        leader = Leader(dist.PrefixStore("probe", store), ranks, workers.why_dead)
        assert not leader.absent(_JOIN_S), [workers.why_dead(rank) for rank in range(ranks)]
        described = tuple(values(leader.ask(serve.describe, deadline_s=_JOIN_S)))
        open_before = _descriptors()
        started_s = time.monotonic()
        sizes = {"sizes_bytes": tuple(spec["sizes_bytes"])} if "sizes_bytes" in spec else {}  # JSON has no tuples
        probe = ProbeSpec(**{**spec, **sizes, "start": Start(spec.get("start", "auto"))})
        prover = Prover(leader, described, expand(None), probe, store=("127.0.0.1", store.port))
        report = _run(prover, backend, asked_gpus, Policy.from_name(policy) if isinstance(policy, str) else Policy(**policy))
        seconds, ended_at_s = time.monotonic() - started_s, time.time()
        opened = {f"{pid} holds {what}" for pid, held in _descriptors().items() for what in held - open_before[pid]}
        leader.end(0)
    return {
        "report": report.to_json(),
        "details": [r.detail for r in report.attempts[0].results],
        "said": [*prover.notes, *(s.detail for a in report.attempts for r in a.results for s in r.steps if s.detail)],
        "seconds": seconds,
        "ended_at_s": ended_at_s,
        "left": [*sorted(opened), *_memory_left(described), *(f"process {pid}" for pid in children_of(os.getpid()))],
    }


def _run(prover: Prover, backend: str, asked_gpus: float, policy: Policy) -> Report:
    wanted = Wanted(
        backend=backend,
        world_size=len(prover.facts),
        asked_gpus=asked_gpus,
        user_settings=facts.merged(fact.settings for fact in prover.facts),
        settings_from=facts.merged(fact.settings_from for fact in prover.facts),
        has_legacy=has_legacy(prover.facts[0].torch_version),
    )
    one = Preflight(
        facts=tuple(prover.facts),
        ladder=Ladder(wanted, policy),
        findings=facts.findings(prover.facts, backend=backend, asked_gpus=asked_gpus),
    )
    return one.run(prover.prove, lambda rung, hangs: Worlds(prover, rung, hangs))


def _touch(what: str) -> None:
    import torch

    if what == "cuda":
        torch.cuda.is_available()
    if what == "openmp":
        torch.set_num_threads(4)
        torch.ones(1 << 22).sum()


def _descriptors() -> dict[int, set[str]]:
    """What each worker holds open, by what it is; sockets and pipes by their number in the kernel."""
    held: dict[int, set[str]] = {}
    for pid in children_of(os.getpid()):
        held[pid] = set()
        for name in os.listdir(f"/proc/{pid}/fd"):
            try:
                held[pid].add(os.readlink(f"/proc/{pid}/fd/{name}"))
            except FileNotFoundError:
                continue  # it was closed while we looked
    return held


def _memory_left(described: Sequence[facts.RankFacts]) -> list[str]:
    """GPUs of which some process still holds memory."""
    import pynvml

    found = []
    for uuid in sorted({fact.gpu.uuid for fact in described if fact.gpu}):
        pynvml.nvmlInit()
        if used := pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByUUID(uuid)).used:
            found.append(f"{used} bytes of {uuid}")
    return found
