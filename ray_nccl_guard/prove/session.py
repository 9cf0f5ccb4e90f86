"""Ranks that a probe may ask, wherever they come from, and the error of ranks that did not come together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ray_nccl_guard.classes import FailureClass
from ray_nccl_guard.errors import GuardError
from ray_nccl_guard.facts import RankFacts
from ray_nccl_guard.probe.workers import WorkerGroup

Say = Callable[[str], None]
"""Told what is going on, for whoever watches."""


@dataclass(slots=True, kw_only=True)
class Session:
    """Ranks that are ready to be asked.

    Attributes:
        store: a store that serves anyway; None where rank 0's worker is to serve one.
        asked_gpus: GPUs that each rank was meant to have; below 1 sharing was intended.
        exit_code: what the ranks end with; set it before leaving. 20 until then: what did not end well is no pass.
    """

    workers: WorkerGroup
    facts: tuple[RankFacts, ...]
    store: tuple[str, int] | None = None
    asked_gpus: float = 1.0
    exit_code: int = 20
    notes: list[str] = field(default_factory=list)


class CannotProbe(GuardError):
    """The ranks did not come together, so that no backend was tried. It is a verdict about them, not wrong usage."""

    def __init__(self, message: str, *, failure: FailureClass, world_size: int, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.failure, self.world_size, self.ranks = failure, world_size, ranks
