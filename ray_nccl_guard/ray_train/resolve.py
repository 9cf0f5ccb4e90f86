"""The settings of one trainer, resolved in the driver from what the code says and what its environment says."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from ray_nccl_guard import carried_rules
from ray_nccl_guard.errors import UsageError
from ray_nccl_guard.policy import Policy
from ray_nccl_guard.policy_file import resolve as policy_from
from ray_nccl_guard.probe.drill import parse
from ray_nccl_guard.probe.operations import expand
from ray_nccl_guard.probe.spec import ProbeSpec
from ray_nccl_guard.ray_train.settings import GuardSettings, mode_from
from ray_nccl_guard.rulebook import Rule, load_rules, packs_from_env

__all__ = ["policy_from", "rules_from", "settings_from"]

DEADLINE_VARIABLE = "RAY_NCCL_GUARD_DEADLINE"
COLLECTIVES_VARIABLE = "RAY_NCCL_GUARD_COLLECTIVES"

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
