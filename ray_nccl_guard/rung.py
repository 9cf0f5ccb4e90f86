"""What the ladder is made of: a way to train, what the job asked for, and what is decided in the end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ray_nccl_guard.policy import Action

GLOO = "gloo"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """One way to train: a backend, and the settings it needs on every rank.

    Attributes:
        why: why this rung is tried, half a sentence.
        retry: the same rung again, in a new probe.
        trial: it only asks whether a setting of a rung that passed is needed.
        price: it is not what the job asked for, so what it costs is measured.
    """

    backend: str
    env: Mapping[str, str] = field(default_factory=dict)
    why: str = ""
    retry: bool = False
    trial: bool = False
    price: bool = False

    @property
    def name(self) -> str:
        return " ".join([self.backend, *(f"{k}={v}" for k, v in self.env.items())])


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What happens now. `backend` is None if nothing may train; `because` is the reason, for the message."""

    action: Action
    backend: str | None
    relief: Mapping[str, str] = field(default_factory=dict)
    because: str = ""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What the job asked for, as far as the ladder needs it.

    Attributes:
        backend: the backend that the user named, or Ray's default.
        asked_gpus: GPUs a worker asked for; below 1 sharing a GPU was intended.
        user_settings: variables that the user has set on any rank: never overridden silently.
        settings_from: the file of each that is from one of NCCL's configuration files.
        collectives: the operations that the job declares.
        on_gpu: it trains on GPUs: some operations gloo has for CPU tensors only.
        has_legacy: this torch offers `nccl-legacy` beside a new `nccl` (2.15 and later).
    """

    backend: str
    world_size: int
    asked_gpus: float = 0.0
    user_settings: Mapping[str, str] = field(default_factory=dict)
    settings_from: Mapping[str, str] = field(default_factory=dict)
    collectives: tuple[str, ...] = ()
    on_gpu: bool = False
    has_legacy: bool = False


def has_legacy(torch_version: str) -> bool:
    """Whether this torch has `nccl-legacy` beside a new `nccl`: from 2.15 on (facts: torch release notes, 2.14 opt-in)."""
    parts: list[Any] = torch_version.split("+")[0].split(".")[:2]
    return [int(p) for p in parts if p.isdigit()] >= [2, 15]
