"""When small worlds are worth their time after a failed probe, and what the place they find means for the verdict."""

from __future__ import annotations

from dataclasses import replace

from ray_nccl_guard.locate.result import Kind, Located
from ray_nccl_guard.probe.spec import Step
from ray_nccl_guard.verdict import Verdict

# Below this no round of a hang ends: a communicator's start alone has 5 s (prove.worlds).
LEAST_S = 10.0
_NAMES_RANKS = (Kind.RANK, Kind.NODE, Kind.LINK, Kind.INTERMITTENT)


def can_help(verdict: Verdict, world_size: int) -> bool:
    """Whether smaller worlds can tell more: several ranks, and a failure of what they do together."""
    return world_size > 1 and verdict.step in (Step.COMM_INIT, Step.COLLECTIVE)


def names_nobody(verdict: Verdict, world_size: int) -> bool:
    """Whether the evidence alone points at no rank, or at all of them."""
    return len(verdict.culprit_ranks) in (0, world_size)


def with_place(verdict: Verdict, found: Located) -> Verdict:
    """The verdict with the ranks that the small worlds point at. What failed is the evidence's to say, not theirs."""
    if found.kind not in _NAMES_RANKS or not found.ranks:
        return verdict
    return replace(verdict, culprit_ranks=found.ranks)
