"""What one line of reasoning over the dumps came to, before it is put into words for the whole job."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from ray_nccl_guard.flight.dump import GroupKey
from ray_nccl_guard.flight.mismatch import Kind
from ray_nccl_guard.flight.words import ranks
from ray_nccl_guard.verdict import Certainty


@dataclass(slots=True, kw_only=True)
class Finding:
    """One answer: the kind, whom it names, and what it rests on.

    Attributes:
        seq, key: the call that decides, where there is one.
        waiting: ranks that are stuck in that call.
    """

    kind: Kind
    culprits: tuple[int, ...]
    certainty: Certainty
    summary: str = ""
    because: list[str] = field(default_factory=list)
    against: list[str] = field(default_factory=list)
    next: str = ""
    key: GroupKey | None = None
    seq: int | None = None
    waiting: tuple[int, ...] = ()


def compare_stacks(numbers: Iterable[int]) -> str:
    """The next experiment where the program itself is suspected."""
    return f"compare the stacks; py-spy dump on {ranks(numbers)}, if still alive, shows the present place"
