"""Readable evidence in one line: ok(0), failed(1, Step.COMM_INIT, "text"), waiting(2)."""

from __future__ import annotations

from typing import Any

from ray_nccl_guard.evidence import Evidence, Origin, align
from ray_nccl_guard.facts import Finding, RankFacts
from ray_nccl_guard.probe.spec import LogLine, Outcome, ProbeResult, Step


def ok(rank: int, **fields: Any) -> ProbeResult:
    return ProbeResult(rank=rank, outcome=Outcome.OK, step=Step.TEARDOWN, proved=("all_reduce", "broadcast"), **fields)


def failed(rank: int, step: Step, *log: str, error: str = "", **fields: Any) -> ProbeResult:
    return ProbeResult(
        rank=rank, outcome=Outcome.FAILED, step=step, error=error or (log[-1] if log else "RuntimeError: x"), lines=lines(*log),
        **fields,
    )  # fmt: skip


def died(rank: int, step: Step, signal: int = 6, *log: str, **fields: Any) -> ProbeResult:
    return ProbeResult(rank=rank, outcome=Outcome.DIED, step=step, signal=signal, lines=lines(*log), **fields)


def timed_out(rank: int, step: Step, *log: str, **fields: Any) -> ProbeResult:
    return ProbeResult(rank=rank, outcome=Outcome.TIMED_OUT, step=step, killed_by_guard=True, lines=lines(*log), **fields)


def waiting(rank: int, step: Step = Step.COMM_INIT, **fields: Any) -> ProbeResult:
    return ProbeResult(rank=rank, outcome=Outcome.WAITING, step=step, killed_by_guard=True, **fields)


def lines(*texts: str, source: str = "nccl") -> tuple[LogLine, ...]:
    return tuple(LogLine(source=source, number=number, text=text) for number, text in enumerate(texts, 1))


def world(*results: ProbeResult, size: int | None = None, backend: str = "nccl", **fields: Any) -> Evidence:
    return align(results, world_size=size or len(results), backend=backend, **{"origin": Origin.PROBE, **fields})


def finding(failure: str, text: str = "a fact", **fields: Any) -> Finding:
    return Finding(failure=failure, text=text, **fields)


def gpu_rank(rank: int, host: str = "gpu-01", **fields: Any) -> RankFacts:
    return RankFacts(
        **{
            "rank": rank,
            "host": host,
            "node": host,
            "device_index": rank,
            "gpu_ids": (str(rank),),
            "local_rank": rank,
            **fields,
        }
    )
