"""What `GuardedTorchConfig` carries from the driver to the controller and the workers, by value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from ray_nccl_guard.policy import Policy
from ray_nccl_guard.probe.drill import Fault
from ray_nccl_guard.probe.spec import ProbeSpec

if TYPE_CHECKING:  # every worker gets these settings, and pays for what this file imports
    from ray_nccl_guard.rulebook import Rule

MODE_VARIABLE = "RAY_NCCL_GUARD"

# Backends that the guard knows how to prove. Others (hccl, tpu_dist, mpi, ...) are Ray's alone.
GUARDED = ("nccl", "nccl2", "nccl-legacy", "cpu:gloo,cuda:nccl", "gloo")


class Mode(Enum):
    """`RAY_NCCL_GUARD`: wins over everything that the code says."""

    ON = "on"
    OBSERVE = "observe"
    OFF = "off"


def mode_from(environ: Mapping[str, str]) -> Mode:
    """The mode that an environment asks for; what is not set is `ON`.

    Raises:
        ValueError: the value is none of on, observe, off.
    """
    value = environ.get(MODE_VARIABLE, "").strip().lower() or Mode.ON.value
    if value in ("0", "false"):
        return Mode.OFF
    if value in ("1", "true"):
        return Mode.ON
    try:
        return Mode(value)
    except ValueError:
        raise ValueError(f"{MODE_VARIABLE} is one of off, observe, on, not {value!r}") from None


def stricter(one: Mode, other: Mode) -> Mode:
    """The mode of two that does less: off in either wins, then observe."""
    order = (Mode.ON, Mode.OBSERVE, Mode.OFF)
    return max(one, other, key=order.index)


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardSettings:
    """The guard's part of a `GuardedTorchConfig`, resolved in the driver: a running cluster does not see its environment."""

    policy: Policy
    probe: ProbeSpec | None
    collectives: tuple[str, ...]
    eager_init: bool
    asked_backend: str | None
    mode: Mode
    rules: tuple[Rule, ...] | None = None
    drill: tuple[Fault, ...] = ()
