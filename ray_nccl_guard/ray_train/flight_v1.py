"""Ray Train V1 ends the workers of a failed run without `on_shutdown`: what it calls is the worker group's own `shutdown`."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

log = logging.getLogger("ray.train.nccl_guard")


class Watch(Protocol):
    """Who wants to be told (`flight_collect.FlightWatch`)."""

    def end(self, status: Any) -> None:
        """The worker group is about to be shut down."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStatus:
    """As V2 polls it: `error` is None for a worker of which V1 has heard none."""

    error: BaseException | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """What V1 knows when it ends a group, in the form of V2's poll status. It hears of one error only, the first."""

    errors: dict[int, BaseException]
    worker_statuses: dict[int, WorkerStatus]


class WorkerError(Exception):
    """The error of one worker; its text has the worker's traceback."""

    def __init__(self, text: str, base: BaseException) -> None:
        super().__init__(text)
        self._base_exc = base


def attach(group: Any, watch: Watch) -> None:
    """Let `watch` look before the workers of `group` end."""
    shut_down = group.shutdown

    def shutdown(*args: Any, **kwargs: Any) -> Any:
        try:
            watch.end(status_now(len(group)))
        except Exception:  # the border, as in the backend
            log.warning("nccl_guard: the hang could not be looked into", exc_info=True)
        return shut_down(*args, **kwargs)

    group.shutdown = shutdown


def status_now(world_size: int) -> Status | None:
    """The error that Ray handles at this moment, while it shuts the group down; None if it handles none."""
    error = sys.exc_info()[1]
    if error is None:
        return None
    rank, seen = None, None
    for one in _chain(error):  # Ray's StartTracebackWithWorkerRank, and behind it its RayTaskError
        rank = getattr(one, "worker_rank", rank)
        base = getattr(one, "cause", None)
        if seen is None and isinstance(base, BaseException):
            seen = WorkerError(str(one), base)
    if rank is None or seen is None:  # a worker has died: the ranks that are asked will tell which
        return Status(errors={-1: error}, worker_statuses={r: WorkerStatus() for r in range(world_size)})
    statuses = {r: WorkerStatus(error=seen if r == rank else None) for r in range(world_size)}
    return Status(errors={rank: seen}, worker_statuses=statuses)


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        yield one
        one = one.__cause__ or one.__context__
