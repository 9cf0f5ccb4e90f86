"""What locating a fault answers: the kind of culprit, its ranks, a sentence, and what it cost."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

Group = tuple[int, ...]


class Trial(Enum):
    """How one small world went. `NOT_RUN` is neither a pass nor a failure."""

    PASSED = "passed"
    FAILED = "failed"
    NOT_RUN = "not_run"


RunRound = Callable[[Sequence[Group]], Sequence[Trial]]
"""Runs disjoint groups of ranks at the same time, each a world of its own in disposable children; answers in order."""


class Kind(Enum):
    """What the fault clings to."""

    RANK = "rank"
    """Every world with this rank fails: its GPU, or what is nearest to it."""
    NODE = "node"
    LINK = "link"
    """Two ranks, or two nodes, fail together and work with everybody else."""
    THRESHOLD = "threshold"
    """Worlds fail from a size on, whoever is in them."""
    INTERMITTENT = "intermittent"
    """It fails now and passes then; the ranks are those that failed with different partners."""
    NONE = "none"
    """The fault did not come back."""
    UNDECIDED = "undecided"
    """The budget ended first, or the answers contradict each other; the ranks are those still suspect."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Located:
    """Where the fault is.

    Attributes:
        ranks: the culprits (`LINK`: the two ends), empty for `THRESHOLD` and `NONE`.
        nodes: their nodes, where the fault is a whole node's or lies between two nodes.
        smallest: for `THRESHOLD`, the smallest world that failed; the largest that passed is `largest_ok`.
        sentence: what was found, without the advice.
        rounds: rounds run, one after another; `probes`: small worlds run in all of them.
    """

    kind: Kind
    ranks: tuple[int, ...] = ()
    nodes: tuple[str, ...] = ()
    smallest: int = 0
    largest_ok: int = 0
    sentence: str = ""
    rounds: int = 0
    probes: int = 0

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": self.kind.value,
            "ranks": list(self.ranks),
            "nodes": list(self.nodes),
            "smallest": self.smallest,
            "largest_ok": self.largest_ok,
            "sentence": self.sentence,
            "rounds": self.rounds,
            "probes": self.probes,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Located:
        ranks, nodes = tuple(data["ranks"]), tuple(data["nodes"])
        return cls(**{**data, "kind": Kind(data["kind"]), "ranks": ranks, "nodes": nodes})
