"""Warns once about settings made inside `train_func`: with an eager group they come too late, and nothing else says so."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any

from ray.train.torch.config import TorchConfigContextManager

from ray_nccl_guard.ray_train.workers import Workers

log = logging.getLogger("ray.train.nccl_guard")

# What NCCL and CUDA read once, before the first call (NCCL caches its parameters in statics, src/include/param.h).
_PREFIXES = ("NCCL_", "TORCH_NCCL_", "CUDA_", "PYTORCH_CUDA_ALLOC_CONF")
_ASK_S = 10.0  # one small function in each worker
_MARK = "_nccl_guard_watched"


class SettingsWatch(TorchConfigContextManager):
    """Ray's own context of `train_func`, with the settings compared at entry and exit (also when `train_func` raises)."""

    def __enter__(self) -> None:
        self._before = _settings()
        super().__enter__()

    def __exit__(self, kind: Any, value: Any, traceback: Any) -> bool:
        _warn_of_changes(self._before)
        return bool(super().__exit__(kind, value, traceback))


def watch_workers(workers: Workers, config: Any) -> None:
    """The same in the workers of a config that is Ray's own: its context was chosen before `RAY_TRAIN_CALLBACKS` is read."""
    if config.train_func_context is not TorchConfigContextManager:
        return
    answers = workers.ask(watch, deadline_s=_ASK_S)
    missing = [answer for answer in answers if not answer.ok]
    if missing:
        log.warning("nccl_guard: late settings are not watched on %d workers: %s", len(missing), missing[0])


def watch() -> None:
    """Watch Ray's own context in this process. `SettingsWatch`, which inherits from it, is left to watch for itself."""
    plain = TorchConfigContextManager
    if hasattr(plain, _MARK):
        return
    enter, leave = plain.__enter__, plain.__exit__

    def entered(self: Any) -> Any:
        self._before = _settings()
        return enter(self)

    def left(self: Any, kind: Any, value: Any, traceback: Any) -> Any:
        if type(self) is plain:
            _warn_of_changes(self._before)
        return leave(self, kind, value, traceback)

    plain.__enter__, plain.__exit__ = entered, left
    setattr(plain, _MARK, True)


def _settings() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(_PREFIXES)}


def _warn_of_changes(before: Mapping[str, str]) -> None:
    after = _settings()
    changed = sorted(n for n in {*before, *after} if before.get(n) != after.get(n))
    if not changed:
        return
    names = ", ".join(f"{n}={after[n]}" if n in after else f"{n} (unset)" for n in changed)
    variables = ", ".join(f'"{n}": "{after[n]}"' for n in changed if n in after)
    log.warning(
        "nccl_guard: train_func changed %s, which had no effect: the communicator was formed before it started. "
        'Set it for the whole job: ray.init(runtime_env={"env_vars": {%s}})',
        names,
        variables,
    )
