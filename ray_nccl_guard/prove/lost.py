"""The result of a rank whose worker gave none: it died, it is silent, or it was not waited for."""

from __future__ import annotations

from ray_nccl_guard.probe.spec import Outcome, ProbeResult
from ray_nccl_guard.probe.workers import Answer


def lost_result(answer: Answer) -> ProbeResult:
    """The result of a rank whose worker answered nothing."""
    if answer.died is not None:
        kind = "preempted" if answer.preempted else "the worker process died"
        return ProbeResult(rank=answer.rank, outcome=Outcome.DIED, error=f"{kind}: {answer.died}"[:2000])
    return ProbeResult(
        rank=answer.rank,
        outcome=Outcome.MISSING,
        error="the worker gave no answer: it is stopped, or something in it keeps the interpreter",
    )


def without_answer(answer: Answer, *, cut_short: bool) -> ProbeResult:
    """The result of a rank that had given none when the wait ended: lost, or only cut short because another had failed."""
    if not (answer.silent and cut_short):
        return lost_result(answer)
    # It waits for the one that failed, longer than anybody waits for it: its silence says nothing.
    return ProbeResult(rank=answer.rank, outcome=Outcome.WAITING, error="not waited for, because another rank had failed")
