"""Proves NCCL before training starts: `TorchTrainer(..., torch_config=GuardedTorchConfig())`.

Importing this package imports neither torch nor ray; names are loaded when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ray_nccl_guard._version import __version__

if TYPE_CHECKING:
    from ray_nccl_guard.arguments import add_argument, from_args
    from ray_nccl_guard.classes import FailureClass
    from ray_nccl_guard.current import current_report
    from ray_nccl_guard.policy import Action, Policy
    from ray_nccl_guard.price import StepCost, estimate_step_cost
    from ray_nccl_guard.probe.spec import ProbeSpec
    from ray_nccl_guard.ray_train.config import GuardedTorchConfig
    from ray_nccl_guard.ray_train.errors import NcclInitRefused

_HOMES = {
    "Action": "policy",
    "FailureClass": "classes",
    "GuardedTorchConfig": "ray_train.config",
    "NcclInitRefused": "ray_train.errors",
    "Policy": "policy",
    "ProbeSpec": "probe.spec",
    "StepCost": "price",
    "add_argument": "arguments",
    "current_report": "current",
    "estimate_step_cost": "price",
    "from_args": "arguments",
}

__all__ = [
    "Action",
    "FailureClass",
    "GuardedTorchConfig",
    "NcclInitRefused",
    "Policy",
    "ProbeSpec",
    "StepCost",
    "__version__",
    "add_argument",
    "current_report",
    "estimate_step_cost",
    "from_args",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
