"""What one run's guard remembers from one worker group to the next."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ray_nccl_guard.ladder import Ladder
from ray_nccl_guard.ray_train import flight_v1
from ray_nccl_guard.ray_train.flight_collect import FlightWatch
from ray_nccl_guard.ray_train.settings import GuardSettings, Mode
from ray_nccl_guard.report import Attempt
from ray_nccl_guard.rung import Decision


@dataclass(slots=True)
class RunState:
    """What one run's guard remembers across worker groups. It lives in the controller, on the backend instance.

    Attributes:
        identity: nodes, GPUs and settings that the last check was made on; None before the first.
        decision: what that check decided.
        ended_well: the last worker group ended without an error of a worker.
        flight: watches the worker group that trains now; None before, and after it has ended.
        accept_s: seconds that torch's store took for each connection when it was last asked (`probe.store.Opened`).
        failures: consecutive starts that ended before `train_func`.
    """

    settings: GuardSettings
    backend: str
    mode: Mode
    ladder: Ladder | None = None
    identity: Any = None
    decision: Decision | None = None
    ended_well: bool = False
    flight: FlightWatch | None = None
    accept_s: float = 0.0
    failures: int = 0
    starts: int = 0
    attempts: list[Attempt] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def note_end(self, worker_group: Any) -> None:
        """Remember whether the group that ends now had an error. Not known counts as an error: the check is made again."""
        if hasattr(worker_group, "get_latest_poll_status"):
            status = worker_group.get_latest_poll_status()
        else:
            status = flight_v1.status_now(len(worker_group))
        self.ended_well = status is not None and not status.errors
        watch, self.flight = self.flight, None
        if watch is not None:
            watch.end(status)
