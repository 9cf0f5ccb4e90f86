"""`RAY_TRAIN_CALLBACKS=ray_nccl_guard.ray_train.hook.GuardHook`: guards scripts that nobody edits, wherever they call fit()."""

from __future__ import annotations

import logging

from ray.train.v2._internal.execution.callback import RayTrainCallback

log = logging.getLogger("ray.train.nccl_guard")

CALLBACK = f"{__name__}.GuardHook"


class GuardHook(RayTrainCallback):
    """Ray (2.48 and later, V2) makes one inside fit(), before it reads the config's `backend_cls`."""

    def __init__(self) -> None:
        # Ray aborts fit() on an error in here. The imports are inside so that one of them cannot do that either.
        try:
            from ray_nccl_guard.ray_train import unmodified

            unmodified.install()
        except Exception as error:  # a guard that cannot start leaves the script as it was, and says so
            log.warning("nccl_guard: this run is NOT guarded: %s: %s", type(error).__name__, error)
