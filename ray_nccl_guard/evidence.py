"""Evidence: every rank's record side by side. Who failed, who only waited, who is missing; never ordered by two hosts' clocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from ray_nccl_guard.facts import Finding
from ray_nccl_guard.probe.spec import LogLine, Outcome, ProbeResult, Step

__all__ = ["Evidence", "Finding", "Origin", "RankEvidence", "align"]


class Origin(Enum):
    """Where the evidence comes from. The same text means different things: a watchdog timeout of the probe's own
    collective cannot be diverging user code, in a training log it often is (DESIGN D7)."""

    PROBE = "probe"
    TRAINING_GROUP = "training_group"
    LOG = "log"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEvidence:
    """One rank's record.

    Attributes:
        rank: None where a log does not say whose it is.
        outcome: how the rank ended; `MISSING` is a rank without a record, which acquits nobody.
        step: the step it ended in (None for logs).
        step_s: the seconds that it spent in that step; 0 where nobody took them.
        text: the exception text, empty if none.
        lines: what the rank printed, in its own order (for logs: every line that any rule matched).
        signal: the signal that ended it, if it was not ours.
        silent_s, process_state, kernel_lines: see `ProbeResult`.
        host: the host it ran on, empty if not known.
    """

    rank: int | None
    outcome: Outcome
    step: Step | None = None
    step_s: float = 0.0
    detail: str = ""
    text: str = ""
    lines: tuple[LogLine, ...] = ()
    signal: int | None = None
    exit_code: int | None = None
    silent_s: float = 0.0
    process_state: str = ""
    kernel_lines: tuple[str, ...] = ()
    stuck: bool = False
    host: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """All ranks' records of one attempt, in rank order, with what the facts say."""

    origin: Origin
    backend: str
    world_size: int
    ranks: tuple[RankEvidence, ...]
    findings: tuple[Finding, ...] = ()

    @property
    def ok(self) -> bool:
        return len(self.ranks) == self.world_size and all(r.outcome is Outcome.OK for r in self.ranks)

    def with_outcome(self, *outcomes: Outcome) -> tuple[RankEvidence, ...]:
        return tuple(r for r in self.ranks if r.outcome in outcomes)


def align(
    results: Sequence[ProbeResult],
    *,
    world_size: int,
    backend: str,
    origin: Origin = Origin.PROBE,
    findings: Sequence[Finding] = (),
    hosts: Mapping[int, str] | None = None,
) -> Evidence:
    """Put the ranks' results side by side; a rank without a result is `MISSING`, not absent."""
    by_rank = {result.rank: result for result in results}
    ranks = tuple(
        _record(by_rank.get(rank) or ProbeResult(rank=rank, outcome=Outcome.MISSING), (hosts or {}).get(rank, ""))
        for rank in range(world_size)
    )
    return Evidence(origin=origin, backend=backend, world_size=world_size, ranks=ranks, findings=tuple(findings))


def _record(result: ProbeResult, host: str) -> RankEvidence:
    return RankEvidence(
        rank=result.rank,
        outcome=result.outcome,
        step=result.step,
        step_s=next((s.seconds for s in reversed(result.steps) if s.step is result.step), 0.0),
        detail=result.detail,
        # A rank that was cut short said nothing: its error is the guard's own reason, not evidence.
        text="" if result.outcome in (Outcome.TIMED_OUT, Outcome.WAITING) else result.error,
        lines=result.lines,
        signal=None if result.killed_by_guard else result.signal,
        exit_code=result.exit_code,
        silent_s=result.silent_s,
        process_state=result.process_state,
        kernel_lines=result.kernel_lines,
        stuck=result.stuck,
        host=host,
    )
