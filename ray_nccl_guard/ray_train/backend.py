"""The seam: Ray Train calls `on_start`; here is the one border at which an error of the guard itself is caught."""

from __future__ import annotations

import logging
import os
import traceback
from typing import Any

from ray.exceptions import RayActorError
from ray.train.torch.config import _TorchBackend

from ray_nccl_guard.policy import Action
from ray_nccl_guard.probe.drill import text_of
from ray_nccl_guard.ray_train import publish
from ray_nccl_guard.ray_train.errors import GuardRestart, NcclInitRefused, WorkersLost
from ray_nccl_guard.ray_train.run import GuardedStart
from ray_nccl_guard.ray_train.run_state import RunState
from ray_nccl_guard.ray_train.settings import GUARDED, Mode, mode_from, stricter
from ray_nccl_guard.ray_train.workers import is_v2
from ray_nccl_guard.report import Report
from ray_nccl_guard.rung import Decision

log = logging.getLogger("ray.train.nccl_guard")


class GuardedBackend(_TorchBackend):
    """Ray's torch backend with the pre-flight before it.

    Subclassing `TorchConfig` and `_TorchBackend` is the seam that Ray's own TorchftConfig uses, unchanged from 2.43 to
    2.60. One instance lives in the controller for the whole run, so what must outlive a worker group is kept on it; the
    instance in the driver is shared by several `fit()` calls and stays empty.
    """

    def __init__(self) -> None:
        super().__init__()
        self._run: RunState | None = None

    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        start: GuardedStart | None = None
        formed = False
        try:
            start = self._begin(worker_group, backend_config)
            if start is not None:
                formed = start.run()
        except (NcclInitRefused, GuardRestart, WorkersLost):
            raise
        except Exception as error:  # the one border: the guard's own failure never stops a healthy job
            self._say_own_failure(start, backend_config)
            if start is not None and start.policy.on_guard_error == "raise":
                start.placement.release()  # Ray leaks the group of a failed on_start
                raise error
            if start is not None:
                start.abandon()
        if not formed:
            self._form_as_ray_does(start, worker_group, backend_config)

    def _begin(self, worker_group: Any, backend_config: Any) -> GuardedStart | None:
        """The guarded start, or None where there is nothing to guard."""
        settings = backend_config.guard
        mode = stricter(settings.mode, mode_from(os.environ))
        backend = backend_config.backend or _default_backend(worker_group)
        if mode is Mode.OFF or backend not in GUARDED:
            return None
        # V1 starts each attempt with a new backend, or with one that another trial has left behind in this process.
        if self._run is None or not is_v2(worker_group):
            self._run = RunState(settings=settings, backend=backend, mode=mode)
        return GuardedStart(worker_group, backend_config, self._run)

    def _form_as_ray_does(self, start: GuardedStart | None, worker_group: Any, backend_config: Any) -> None:
        try:
            super().on_start(worker_group, backend_config)
        except Exception as error:
            # Ray leaks the placement group of a failed on_start for as long as the driver lives; the error stays Ray's own.
            if start is not None:
                start.placement.release()
            if isinstance(error, RayActorError) and not is_v2(worker_group):
                raise WorkersLost(f"a worker died while the process group was formed: {error}") from error
            raise

    def on_shutdown(self, worker_group: Any, backend_config: Any) -> None:
        if self._run is not None:
            try:
                self._run.note_end(worker_group)
                publish.settle()
            except Exception:  # the same border: what we remember of the end must not keep Ray from ending it
                log.warning("nccl_guard: the end of the worker group could not be noted", exc_info=True)
        super().on_shutdown(worker_group, backend_config)

    def _say_own_failure(self, start: GuardedStart | None, backend_config: Any) -> None:
        """Report the guard's own failure. Reporting may fail for the same reason, so the last resort is the log alone."""
        trace = traceback.format_exc()
        try:
            if start is None:
                raise RuntimeError("it failed before the workers were asked")
            backend = start.run_state.backend
            report = Report(
                world_size=start.world_size,
                backend_wanted=backend,
                decision=Decision(
                    action=Action.PROCEED, backend=backend, because="the guard failed, and training goes on without it"
                ),
                policy=start.policy,
                facts=start.facts,
                attempts=tuple(start.run_state.attempts),
                guard_error=trace,
                drill=text_of(start.settings.drill),
            )
            publish.announce(publish.write(report, start.workers))
        except Exception as error:
            log.warning(
                "nccl_guard: the guard itself failed, and so did its report (%r); training goes on:\n%s", error, trace
            )


def _default_backend(worker_group: Any) -> str:
    """What Ray would take when the user named none (V1 leaves that to `on_start`)."""
    if hasattr(worker_group, "get_resources_per_worker"):
        gpus = worker_group.get_resources_per_worker().get("GPU", 0)
    else:
        gpus = getattr(worker_group, "num_gpus_per_worker", 0)  # Ray 2.48 and earlier
    return "nccl" if gpus else "gloo"
