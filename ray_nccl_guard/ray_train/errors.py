"""The two exceptions that leave `on_start`: one that Ray answers with fresh workers, one that ends the run. Both carry the report."""

from __future__ import annotations

from typing import Any

from ray_nccl_guard.errors import GuardError

try:
    from ray.train.v2._internal.exceptions import WorkerGroupStartupFailedError as _StartupFailed
except ImportError:  # Ray before V2: nothing there retries, and the class is never raised

    class _StartupFailed(Exception):  # type: ignore[no-redef]
        pass


class NcclInitRefused(GuardError):
    """The guard refuses to start training.

    Attributes:
        report: the run's report as plain JSON values (see `Report.to_json`), so that the exception needs nothing but
            this class to be unpickled.
    """

    def __init__(self, message: str, report: dict[str, Any], *, help: tuple[str, ...] = ()) -> None:
        super().__init__(message, help=help)
        self.report = report


class GuardRestart(GuardError, _StartupFailed):
    """These workers are spent; Ray's failure policy answers with fresh ones, and the guard with the next rung.

    Only `WorkerGroupStartupFailedError` and its subclasses are retried from `on_start` (Ray Train V2,
    failure_handling/default.py). If the user's `controller_failure_limit` forbids it, this is what surfaces.
    """

    def __init__(self, message: str, report: dict[str, Any], *, help: tuple[str, ...] = ()) -> None:
        super().__init__(message, help=help)
        self.report = report


class WorkersLost(GuardError):
    """A worker died in `on_start` on Train V1, where Ray's own error must not get out.

    V1 answers a RayActorError with `raise None`, and the user sees "exceptions must derive from BaseException" (ray 2.60).
    """
