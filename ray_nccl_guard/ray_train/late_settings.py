"""Warns once about settings made inside `train_func`: with an eager group they come too late, and nothing else says so."""

from __future__ import annotations

import logging
import os
from typing import Any

from ray.train.torch.config import TorchConfigContextManager

log = logging.getLogger("ray.train.nccl_guard")

# What NCCL and CUDA read once, before the first call (NCCL caches its parameters in statics, src/include/param.h).
_PREFIXES = ("NCCL_", "TORCH_NCCL_", "CUDA_", "PYTORCH_CUDA_ALLOC_CONF")


def _settings() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(_PREFIXES)}


class SettingsWatch(TorchConfigContextManager):
    """Ray's own context of `train_func`, with the settings compared at entry and exit (also when `train_func` raises)."""

    def __enter__(self) -> None:
        self._before = _settings()
        super().__enter__()

    def __exit__(self, kind: Any, value: Any, traceback: Any) -> bool:
        after = _settings()
        changed = sorted(n for n in {*self._before, *after} if self._before.get(n) != after.get(n))
        if changed:
            names = ", ".join(f"{n}={after[n]}" if n in after else f"{n} (unset)" for n in changed)
            variables = ", ".join(f'"{n}": "{after[n]}"' for n in changed if n in after)
            log.warning(
                "nccl_guard: train_func changed %s, which had no effect: the communicator was formed before it started. "
                'Set it for the whole job: ray.init(runtime_env={"env_vars": {%s}})',
                names,
                variables,
            )
        return bool(super().__exit__(kind, value, traceback))
