"""Rules as data: one TOML file per signature beside a captured log of the same name; loaded and validated here."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from ray_nccl_guard.classes import FailureClass
from ray_nccl_guard.diagnosis.patterns import Pattern, PatternError
from ray_nccl_guard.errors import UsageError

SHIPPED_DIR = Path(__file__).parent / "rules"
RULES_VARIABLE = "RAY_NCCL_GUARD_RULES"


class Certainty(Enum):
    """How far the evidence carries: `established` by it, `likely`, or `open` between the candidates."""

    ESTABLISHED = "established"
    LIKELY = "likely"
    OPEN = "open"

    @property
    def strength(self) -> int:
        return {"established": 2, "likely": 1, "open": 0}[self.value]


class RuleRole(Enum):
    """What a line of this kind is worth.

    `CAUSE` names what failed; `SYMPTOM` says that something failed, not what (a timeout); `CASCADE` echoes another rank's
    failure; `HINT` proves nothing alone but speaks for a class when something failed; `BOILERPLATE` carries nothing and is
    here so that it is known to carry nothing.
    """

    CAUSE = "cause"
    SYMPTOM = "symptom"
    CASCADE = "cascade"
    HINT = "hint"
    BOILERPLATE = "boilerplate"


class Blames(Enum):
    """Whom a matching line points at: the rank that printed it, the rank it names, or nobody.

    `RELAY` is a rank that passes on another's complaint and has none of its own: it waited for nothing, which is suspect.
    """

    SELF = "self"
    RELAY = "relay"
    NAMED = "named"
    NOBODY = "nobody"


@dataclass(frozen=True, kw_only=True, eq=False)
class Rule:
    """One signature.

    Attributes:
        id: the file's stem.
        failure: the class it speaks for (`UNKNOWN` for boilerplate).
        weight: 0..1, how strongly; within a role the heavier rule wins.
        certainty: the most that this signature can carry alone.
        also: further classes this line would be explained by, with weights.
        requires: rules of which one must have matched somewhere, or this one is void.
        unless: rules that void this one if they matched anywhere.
        shares: rules that may claim this rule's log too.
        gloo: overrides the class's `gloo_can_help`; None leaves it.
        alarms: boilerplate that at least says that something failed, so that hints may speak.
        progress: how far into making a communicator a rank is that printed this, 0 if it does not say.
        informs: a cause that NCCL prints as mere information (`NCCL INFO`), which is otherwise no cause.
        relief: the smallest setting known to sidestep the failure.
        speaks_for: `infrastructure` or `program`: a remark that says where to look, and nothing of the class.
    """

    id: str
    failure: FailureClass
    role: RuleRole
    weight: float
    certainty: Certainty
    summary: str
    patterns: tuple[Pattern, ...]
    near_misses: tuple[str, ...] = ()
    also: Mapping[FailureClass, float] = field(default_factory=dict)
    requires: tuple[str, ...] = ()
    unless: tuple[str, ...] = ()
    shares: tuple[str, ...] = ()
    blames: Blames = Blames.NOBODY
    gloo: bool | None = None
    progress: int = 0
    alarms: bool = False
    informs: bool = False
    caution: str = ""
    help: tuple[str, ...] = ()
    next: str = ""
    relief: Mapping[str, str] = field(default_factory=dict)
    speaks_for: str = ""
    references: tuple[str, ...] = ()
    source: Path | None = None

    @cached_property
    def log(self) -> str:
        """The captured log beside the rule, empty if there is none."""
        path = self.source.with_suffix(".log") if self.source else None
        return path.read_text(encoding="utf-8") if path and path.is_file() else ""

    def search(self, line: str) -> re.Match[str] | None:
        """The first pattern's match. NCCL's informational lines name no cause: what it could not find there, it did without."""
        if self.role is RuleRole.CAUSE and not self.informs and "NCCL INFO" in line and "NCCL WARN" not in line:
            return None
        return next(filter(None, (pattern.search(line) for pattern in self.patterns)), None)

    def matches(self, line: str) -> bool:
        return self.search(line) is not None


# The two sides of the first question about a failure.
SIDES = ("infrastructure", "program")
_DEFAULT_WEIGHT = {
    RuleRole.CAUSE: 0.9, RuleRole.SYMPTOM: 0.5, RuleRole.CASCADE: 0.3, RuleRole.HINT: 0.1, RuleRole.BOILERPLATE: 0.0,
}  # fmt: skip
_KEYS = {
    "failure", "role", "weight", "certainty", "summary", "patterns", "near_misses", "also", "requires", "unless", "shares",
    "blames", "gloo", "progress", "alarms", "informs", "caution", "help", "next", "relief", "speaks_for",
    "references",
}  # fmt: skip


@lru_cache(maxsize=1)
def shipped_rules() -> tuple[Rule, ...]:
    """The rules that come with the package, loaded once."""
    return _read_folder(SHIPPED_DIR)


def load_rules(*folders: str | Path) -> tuple[Rule, ...]:
    """The shipped rules and those of the folders (rule packs), shipped first.

    Raises `UsageError` for a folder that is none, a malformed rule, and an id that is defined twice.
    """
    rules = {rule.id: rule for rule in shipped_rules()}
    for folder in map(Path, folders):
        for rule in _read_folder(folder):
            if rule.id in rules:
                raise UsageError(f"The rule {rule.id} is defined twice: in {rules[rule.id].source} and in {rule.source}.")
            rules[rule.id] = rule
    return tuple(rules.values())


def packs_from_env(environ: Mapping[str, str]) -> tuple[Path, ...]:
    """The rule packs that `RAY_NCCL_GUARD_RULES` names, separated as in PATH."""
    return tuple(Path(folder) for folder in environ.get(RULES_VARIABLE, "").split(os.pathsep) if folder)


def _read_folder(folder: Path) -> tuple[Rule, ...]:
    if not folder.is_dir():
        raise UsageError(f"The rule pack {folder} is not a directory.")
    return tuple(read_rule(path) for path in sorted(folder.glob("*.toml")))


def read_rule(path: Path) -> Rule:
    """One rule file. Raises `UsageError` naming the file and what is wrong in it."""
    try:
        import tomllib
    except ModuleNotFoundError:  # Python 3.10
        import tomli as tomllib  # type: ignore[no-redef]
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
        return _rule(path, data)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, PatternError, ValueError, KeyError, TypeError) as error:
        reason = f"the key {error} is missing" if isinstance(error, KeyError) else str(error)
        raise UsageError(f"The rule file {path} is not valid: {reason}") from error


def _rule(path: Path, data: Mapping[str, Any]) -> Rule:
    unknown = sorted(set(data) - _KEYS)
    if unknown:
        raise ValueError(f"unknown keys {', '.join(unknown)}")
    role = RuleRole(data["role"])
    failure = FailureClass(data.get("failure", "unknown"))
    if failure is FailureClass.UNKNOWN and role in (RuleRole.CAUSE, RuleRole.SYMPTOM):
        raise ValueError(f"a {role.value} names a failure class")
    weight = float(data.get("weight", _DEFAULT_WEIGHT[role]))
    if not 0 <= weight <= 1:
        raise ValueError(f"weight is {weight}, not in 0..1")
    if not _strings(data, "patterns"):
        raise ValueError("patterns is empty")
    if data.get("speaks_for", "") not in ("", *SIDES):
        raise ValueError(f"speaks_for is {data['speaks_for']!r}, not one of {', '.join(SIDES)}")
    return Rule(
        id=path.stem,
        failure=failure,
        role=role,
        weight=weight,
        certainty=Certainty(data.get("certainty", "likely" if role is RuleRole.CAUSE else "open")),
        summary=str(data["summary"]),
        patterns=tuple(Pattern(text) for text in _strings(data, "patterns")),
        near_misses=_strings(data, "near_misses"),
        also={FailureClass(name): float(share) for name, share in data.get("also", {}).items()},
        requires=_strings(data, "requires"),
        unless=_strings(data, "unless"),
        shares=_strings(data, "shares"),
        blames=Blames(data.get("blames", "nobody")),
        gloo=data.get("gloo"),
        progress=int(data.get("progress", 0)),
        alarms=bool(data.get("alarms", False)),
        informs=bool(data.get("informs", False)),
        caution=str(data.get("caution", "")),
        help=_strings(data, "help"),
        next=str(data.get("next", "")),
        relief={str(key): str(value) for key, value in data.get("relief", {}).items()},
        speaks_for=str(data.get("speaks_for", "")),
        references=_strings(data, "references"),
        source=path,
    )


def _strings(data: Mapping[str, Any], key: str) -> tuple[str, ...]:
    values = data.get(key, ())
    if isinstance(values, str) or not all(isinstance(value, str) for value in values):
        raise ValueError(f"{key} must be a list of strings")
    return tuple(values)
