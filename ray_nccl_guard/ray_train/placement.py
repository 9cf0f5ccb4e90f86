"""Giving a spent worker group back: without this Ray leaks the placement group of a failed `on_start` and retries for ever."""

from __future__ import annotations

import logging
from typing import Any

import ray
from ray.util.placement_group import remove_placement_group

from ray_nccl_guard.ray_train.workers import Workers, is_v2

log = logging.getLogger("ray.train.nccl_guard")

# One task that touches nothing; a worker that needs longer is not answering.
_ASK_S = 15.0


class Placement:
    """The placement group of a worker group. Only Train V2 owns one that may be removed: V1's belongs to the Tune trial."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self._group: Any = None
        self.can_restart = is_v2(workers.group)

    def look_up(self) -> None:
        """Ask while the workers still answer. The public call works in every release; the handle's place in Ray moved."""
        if not self.can_restart:
            return
        answer = self._workers.ask_one(0, ray.util.get_current_placement_group, deadline_s=_ASK_S)
        self._group = answer.value if answer.ok else self._from_state()

    def _from_state(self) -> Any:
        state = self._workers.group.get_worker_group_state()
        handle = getattr(state, "placement_group_handle", None)
        return getattr(handle, "placement_group", None) or getattr(state, "placement_group", None)

    def release(self) -> None:
        """Remove the group: kills its workers, a stuck one too, and frees their resources at once (ray 2.60, measured)."""
        if self._group is not None:
            remove_placement_group(self._group)
            self._group = None
        elif self.can_restart:
            log.warning("nccl_guard: the placement group of the spent workers is not known; their resources stay taken")
