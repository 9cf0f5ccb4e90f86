"""What Ray Train V2 tells its callbacks and not its backends: errors as they are polled, a hang that NCCL's RAS confirms, Ctrl-C."""

from __future__ import annotations

import logging
from typing import Any, Protocol

from ray.train.v2._internal.exceptions import UserExceptionWithTraceback, WorkerHealthCheckFailedError
from ray.train.v2._internal.execution.callback import WorkerGroupCallback

log = logging.getLogger("ray.train.nccl_guard")


class Watch(Protocol):
    """Who wants to be told (`flight_collect.FlightWatch`)."""

    def look(self, status: Any) -> str:
        """Ray has polled the workers; returns what is to be appended to their errors, empty if nothing is."""

    def interrupt(self) -> None:
        """Ctrl-C: Ray is about to end the workers."""


def attach(group: Any, watch: Watch) -> bool:
    """Let `watch` hear of a worker group; False if this Ray keeps its callbacks elsewhere.

    A backend has no public way to add a callback; Ray keeps them in a list of the group (2.44.1 to 2.60; it tells of Ctrl-C
    from 2.48 on). The list is
    replaced, not changed, since Ray is iterating over it, and ours comes first: callbacks of the user's own see the
    errors with what is appended.
    """
    callbacks = getattr(group, "_callbacks", None)
    if not isinstance(callbacks, list):
        return False
    group._callbacks = [FlightCallback(watch), *callbacks]
    return True


class FlightCallback(WorkerGroupCallback):
    """One worker group's. An error in here ends in a warning: Ray would take it for one of the run."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    def after_worker_group_poll_status(self, worker_group_status: Any) -> None:
        try:
            words = self._watch.look(worker_group_status)
            if words:
                append(worker_group_status, words)
        except Exception:  # the border, as in the backend
            log.warning("nccl_guard: the hang could not be looked into", exc_info=True)

    def before_worker_group_abort(self, worker_group_context: Any) -> None:
        try:
            self._watch.interrupt()
        except Exception:  # the same border
            log.warning("nccl_guard: the ranks could not be asked after Ctrl-C", exc_info=True)


def append(status: Any, words: str) -> None:
    """Put `words` behind the text of every worker's error, and as a note on the exception itself (Python 3.11 and later)."""
    for worker in status.worker_statuses.values():
        error = worker.error
        if isinstance(error, UserExceptionWithTraceback):
            base = error._base_exc
            if hasattr(base, "add_note"):
                base.add_note(words)
            worker.error = UserExceptionWithTraceback(base, f"{str(error).rstrip()}\n{words}")
        elif isinstance(error, WorkerHealthCheckFailedError):
            worker.error = WorkerHealthCheckFailedError(f"{error._message}\n{words}", error.health_check_failure)
