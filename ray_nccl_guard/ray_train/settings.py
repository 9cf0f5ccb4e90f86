"""What `GuardedTorchConfig` carries from the driver to the controller and the workers, by value."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path

from ray_nccl_guard import carried_rules
from ray_nccl_guard.errors import UsageError
from ray_nccl_guard.policy import Policy
from ray_nccl_guard.policy_file import resolve as policy_from
from ray_nccl_guard.probe.drill import Fault, parse
from ray_nccl_guard.probe.operations import expand
from ray_nccl_guard.probe.spec import ProbeSpec
from ray_nccl_guard.rulebook import Rule, load_rules, packs_from_env

__all__ = ["GUARDED", "GuardSettings", "Mode", "mode_from", "policy_from", "settings_from", "stricter"]

MODE_VARIABLE = "RAY_NCCL_GUARD"
DEADLINE_VARIABLE = "RAY_NCCL_GUARD_DEADLINE"
COLLECTIVES_VARIABLE = "RAY_NCCL_GUARD_COLLECTIVES"

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


_DEFAULT_PROBE = ProbeSpec()


def settings_from(
    environ: Mapping[str, str],
    *,
    policy: Policy | Mapping[str, object] | str | None = None,
    probe: ProbeSpec | None = _DEFAULT_PROBE,
    collectives: str | Iterable[str] | None = None,
    eager_init: bool = True,
    asked_backend: str | None = None,
    rules: str | Path | Iterable[Rule | str | Path] | None = None,
    drill: str | Iterable[str] | None = None,
) -> GuardSettings:
    """The settings of one trainer: what the code says, and for what it leaves unsaid what the environment says.

    Raises:
        ValueError: a value of the code or of a `RAY_NCCL_GUARD...` variable cannot be.
        UsageError: a policy file or a rule pack cannot be read or is not valid.
    """
    if probe == _DEFAULT_PROBE:  # the code did not say
        probe = replace(probe, comm_init_s=_deadline_s(environ) or probe.comm_init_s)
    if drill and probe is None:
        raise ValueError("a drill is acted out in the probe, and probe=None leaves it out")
    if collectives is None:
        collectives = [name for name in environ.get(COLLECTIVES_VARIABLE, "").replace(",", " ").split() if name] or None
    return GuardSettings(
        policy=policy_from(policy, environ),
        probe=probe,
        collectives=expand(collectives),
        eager_init=eager_init,
        asked_backend=asked_backend,
        mode=mode_from(environ),
        rules=rules_from(rules, environ),
        drill=parse(drill) if drill else (),
    )


def _deadline_s(environ: Mapping[str, str]) -> float | None:
    value = environ.get(DEADLINE_VARIABLE, "").strip()
    try:
        return float(value) if value else None
    except ValueError:
        raise ValueError(f"{DEADLINE_VARIABLE} is a number of seconds, not {value!r}") from None


def rules_from(
    given: str | Path | Iterable[Rule | str | Path] | None, environ: Mapping[str, str]
) -> tuple[Rule, ...] | None:
    """The whole rule book by value: the shipped rules, then rule packs (folders) and single rules; None for the shipped ones alone.

    Raises:
        UsageError: a folder is none, a rule is malformed, or an id is defined twice.
    """
    wanted: list[Rule | str | Path] = [given] if isinstance(given, str | Path) else list(given or ())
    if given is None and environ.get(carried_rules.VARIABLE):
        return carried_rules.unpack(environ[carried_rules.VARIABLE])
    if given is None:
        wanted += packs_from_env(environ)
    if not wanted:
        return None
    rules = list(load_rules(*(item for item in wanted if isinstance(item, str | Path))))
    for rule in (item for item in wanted if not isinstance(item, str | Path)):
        if any(rule.id == known.id for known in rules):
            if rule not in rules:
                raise UsageError(f"The rule {rule.id} is defined twice.")
            continue
        rules.append(rule)
    return tuple(rules)
