"""Where a policy comes from: the code's argument, a TOML file, the environment, the default; each key says who said it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ray_nccl_guard.classes import FailureClass
from ray_nccl_guard.errors import UsageError
from ray_nccl_guard.policy import Action, Policy, nearest

POLICY_VARIABLE = "RAY_NCCL_GUARD_POLICY"

ARGUMENT, FILE, ENVIRONMENT = "argument", "file", "environment"

# What a file may say, with the type of each. `preset` is where it starts from.
KEYS: dict[str, tuple[type, ...]] = {
    "preset": (str,),
    "actions": (dict,),
    "gloo": (bool,),
    "relief": (bool,),
    "whatever_class": (bool,),
    "report_only": (bool,),
    "budget_s": (int, float),
    "locate_s": (int, float),
    "attempts": (int,),
    "world_warn": (int,),
    "world_ceiling": (int,),
    "on_guard_error": (str,),
}
_TYPE_NAMES = {str: "a string", dict: "a table", bool: "true or false", int: "a whole number", float: "a number"}
_DEFAULTS = Policy()


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """What one voice says.

    Attributes:
        source: argument, file or environment.
        values: keys of `KEYS`, checked.
        file: the file's path, for the report.
        sources: who said each key, where that is known better than `source` tells (a policy handed on by `carry`).
    """

    source: str
    values: Mapping[str, Any]
    file: str = ""
    sources: Mapping[str, str] = field(default_factory=dict)

    def source_of(self, key: str) -> str:
        return self.sources.get("name" if key == "preset" else key, self.source)


def resolve(given: Policy | Mapping[str, Any] | str | os.PathLike[str] | None, environ: Mapping[str, str]) -> Policy:
    """The policy that holds: the code's argument, then a file, then the environment, then the default table.

    `given` is what the code says: a `Policy`, which is complete and leaves nothing to the others; a mapping of some keys;
    a preset's name; or a file (a name with a slash in it, or that ends in .toml). `RAY_NCCL_GUARD_POLICY` is a preset's
    name or a file. Each key is taken from the first that says it. The same goes for the preset; what a preset sets
    (`strict`: no gloo, no relief) cannot be undone by a voice that comes after the one that named it.

    Raises:
        ValueError: an unknown preset, class or action in code or environment, with the nearest valid name; a number out of range.
        UsageError: a policy file that is not there or not valid, or a key that does not exist.
    """
    if isinstance(given, Policy):
        return given if given.sources else replace(given, sources=dict.fromkeys(("name", *_said(given)), ARGUMENT))
    return _merge(_layers(given, environ))


def read(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The keys of a policy file.

    Raises:
        UsageError: it is not there, is not TOML, has a key that does not exist or a value that cannot be.
    """
    try:
        import tomllib
    except ModuleNotFoundError:  # Python 3.10
        import tomli as tomllib  # type: ignore[no-redef]
    try:
        values = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        _check(values)
        _merge([Layer(source=FILE, values=values)])  # a value out of range is this file's fault, whoever else has a say
    except OSError as error:
        raise UsageError(f"The policy file {path} cannot be read: {error.strerror or error}") from error
    except (UnicodeDecodeError, ValueError) as error:
        raise UsageError(f"The policy file {path} is not valid: {error}", help=(f"keys: {', '.join(KEYS)}",)) from error
    return values


def carry(policy: Policy) -> str:
    """`policy` as a value of `RAY_NCCL_GUARD_POLICY` that needs no file: other nodes do not have the file."""
    plain = policy.to_json()
    said = {key: plain[key] for key in _said(policy)}
    preset = {"preset": _preset(policy).name} if "name" in policy.sources or not policy.sources else {}
    return json.dumps({**preset, **said, "sources": dict(policy.sources), "file": policy.file})


def _preset(policy: Policy) -> Policy:
    """The preset that `policy` began with; the default table if its name is its author's own."""
    try:
        return Policy.from_name(policy.name)
    except ValueError:
        return _DEFAULTS


def _said(policy: Policy) -> list[str]:
    """The keys in which `policy` differs from the preset it began with."""
    start = _preset(policy)
    return [key for key in KEYS if key != "preset" and getattr(policy, key) != getattr(start, key)]


def _layers(given: Mapping[str, Any] | str | os.PathLike[str] | None, environ: Mapping[str, str]) -> list[Layer]:
    """The voices, the strongest first."""
    layers = []
    if isinstance(given, Mapping):
        _check(given)
        layers.append(Layer(source=ARGUMENT, values=given))
    elif given is not None:
        layers.append(_named(os.fspath(given), ARGUMENT))
    value = environ.get(POLICY_VARIABLE, "").strip()
    if value.startswith("{"):
        layers.append(_carried(value))
    elif value:
        layers.append(_named(value, ENVIRONMENT))
    return sorted(layers, key=lambda layer: (ARGUMENT, FILE, ENVIRONMENT).index(layer.source))


def _named(name: str, source: str) -> Layer:
    if os.sep in name or name.endswith(".toml"):
        path = os.path.abspath(name)
        return Layer(source=FILE, values=read(path), file=path)
    Policy.from_name(name)
    return Layer(source=source, values={"preset": name})


def _carried(value: str) -> Layer:
    try:
        values = json.loads(value)
    except json.JSONDecodeError as error:
        raise ValueError(f"{POLICY_VARIABLE} begins with a brace and is not JSON: {error}") from error
    sources, file = values.pop("sources", {}), str(values.pop("file", ""))
    _check(values)
    return Layer(source=ENVIRONMENT, values=values, file=file, sources=sources)


def _check(values: Mapping[str, Any]) -> None:
    for key, value in values.items():
        if key not in KEYS:
            raise ValueError(f"{key!r} is not a key of a policy{nearest(key, KEYS) or ' (keys: ' + ', '.join(KEYS) + ')'}")
        right = isinstance(value, KEYS[key]) and (not isinstance(value, bool) or bool in KEYS[key])
        if not right:
            raise ValueError(f"{key} is {_TYPE_NAMES[KEYS[key][-1]]}, not {value!r}")


def _merge(layers: Sequence[Layer]) -> Policy:
    naming = next((layer for layer in layers if "preset" in layer.values), None)
    preset = Policy.from_name(naming.values["preset"]) if naming else _DEFAULTS
    # What the preset sets itself: as strong as the voice that named it.
    fixed = {key for key in KEYS if key != "preset" and getattr(preset, key) != getattr(_DEFAULTS, key)}
    values: dict[str, Any] = {}
    actions: dict[FailureClass | str, Action | str] = {}
    sources: dict[str, str] = {"name": naming.source_of("preset")} if naming else {}
    weaker = False
    for layer in layers:
        for key, value in layer.values.items():
            if key == "actions":
                for name, action in value.items():
                    if name not in actions:
                        actions[name] = action
                        sources[f"actions.{name}"] = layer.source_of(f"actions.{name}")
            elif key != "preset" and key not in values and not (weaker and key in fixed):
                values[key] = value
                sources[key] = layer.source_of(key)
        weaker = weaker or layer is naming
    file = next((layer.file for layer in layers if layer.file), "")
    return replace(preset, **values, actions=actions, sources=sources, file=file)
