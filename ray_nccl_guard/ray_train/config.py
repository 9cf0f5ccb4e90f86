"""`GuardedTorchConfig`: a `TorchConfig` whose process group is proved before training starts."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ray.train.torch import TorchConfig

from ray_nccl_guard.policy import Policy
from ray_nccl_guard.probe.drill import text_of
from ray_nccl_guard.probe.spec import ProbeSpec
from ray_nccl_guard.ray_train.late_settings import SettingsWatch
from ray_nccl_guard.ray_train.settings import Mode

if TYPE_CHECKING:  # Ray sends the config to every worker, which pays for what this file imports
    from ray_nccl_guard.rulebook import Rule


@dataclass
class GuardedTorchConfig(TorchConfig):
    """A drop-in for Ray Train's `TorchConfig`: every argument of it keeps its meaning.

    Before `train_func`, on the very workers that will train, a disposable process per worker forms the communicator and
    runs a tiny warm-up under short deadlines. What fails is named, and by policy the same `fit()` goes on or is refused.

    Args:
        policy: what to do about each failure class: a `Policy` (complete as it is), a mapping of some of its keys, the name
            of a preset (`default`, `fallback`, `strict`, `observe`), or a TOML file. What it leaves unsaid,
            `RAY_NCCL_GUARD_POLICY` in the driver's environment says, then the default table (see docs/policy.md).
        probe: deadlines (seconds) and sizes (bytes) of the probe; None to rely on the deadline around the training
            group only.
        collectives: what the job needs: presets (`ddp`, `syncbn`, `fsdp`, `tp`, `pp`) and operation names, mixed freely.
            None is ddp + syncbn. A backend is chosen only if it has proved all of them on every rank.
        eager_init: form the training communicator at once, bound to the worker's device, and warm it up. False makes the
            training group exactly as plain TorchConfig does (torch 2.15 and later still gets its device), for jobs that
            split groups from a bound one.
        rules: more rules for naming failures: folders (rule packs) or single `Rule` values. Unset, the folders that
            `RAY_NCCL_GUARD_RULES` names are read. They are loaded here, in the driver, and carried by value.
        drill: faults to rehearse on a healthy cluster (docs/drills.md), e.g. `"init:hang@rank1"`: the probe acts them out
            without touching NCCL, and all that follows is real and marked as a drill.

    Raises:
        ValueError: an argument is not what it may be, or `RAY_NCCL_GUARD` is none of off, observe, on.
        UsageError: a policy file or a rule pack cannot be read or is not valid.
    """

    policy: Policy | Mapping[str, Any] | str | None = field(default=None, kw_only=True)
    probe: ProbeSpec | None = field(default=ProbeSpec(), kw_only=True)
    collectives: str | Iterable[str] | None = field(default=None, kw_only=True)
    eager_init: bool = field(default=True, kw_only=True)
    rules: Sequence[Rule | str | Path] | str | None = field(default=None, kw_only=True)
    drill: str | Sequence[str] | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if self.probe is not None and not isinstance(self.probe, ProbeSpec):
            raise ValueError(f"GuardedTorchConfig.probe is a ProbeSpec or None, not {self.probe!r}")
        if not isinstance(self.eager_init, bool):
            raise ValueError(f"GuardedTorchConfig.eager_init is True or False, not {self.eager_init!r}")
        if self.policy is not None and not isinstance(self.policy, Policy | Mapping | str | os.PathLike):
            raise ValueError(f"GuardedTorchConfig.policy is a Policy, some keys of one, or a name, not {self.policy!r}")
        from ray_nccl_guard.ray_train.resolve import settings_from  # rules and policy files: the driver's business alone

        # TorchTrainer overwrites `backend` in place (Ray Train V2), and the environment of this driver does not reach the
        # controller of a running cluster: both are recorded here and carried by value.
        self.guard = settings_from(
            os.environ,
            policy=self.policy,
            probe=self.probe,
            collectives=self.collectives,
            eager_init=self.eager_init,
            asked_backend=self.backend,
            rules=self.rules,
            drill=self.drill,
        )

    @property
    def backend_cls(self) -> Any:
        from ray_nccl_guard.ray_train.backend import GuardedBackend

        return GuardedBackend

    @property
    def train_func_context(self) -> Any:
        # Where the group is formed as Ray does it, a setting of train_func may still have its effect.
        eager = self.eager_init and self.guard.mode is Mode.ON and not self.guard.policy.report_only
        return SettingsWatch if eager else super().train_func_context

    def to_dict(self) -> dict[str, Any]:
        """The settings as plain values, for Ray's run state export."""
        return {
            "backend": self.backend,
            "init_method": self.init_method,
            "timeout_s": self.timeout_s,
            "nccl_guard_mode": self.guard.mode.value,
            "nccl_guard_policy": self.guard.policy.name,
            "nccl_guard_collectives": ",".join(self.guard.collectives),
            "nccl_guard_eager_init": self.eager_init,
            "nccl_guard_drill": text_of(self.guard.drill),
        }


def plain(**options: Any) -> TorchConfig:
    """Ray's own config with those of `options` that it knows."""
    return TorchConfig(**{name: value for name, value in options.items() if name in TorchConfig.__dataclass_fields__})
