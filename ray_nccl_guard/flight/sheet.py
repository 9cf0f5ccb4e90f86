"""The record sheet of a hang: every field of it has a line, and what is not known says so. Meant to be filed with the run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ray_nccl_guard.flight.render import wrapped
from ray_nccl_guard.flight.verdict import FlightVerdict, GroupRow, GroupTable
from ray_nccl_guard.flight.words import ranks

_LABEL = 18


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """What a run knows of itself and its dumps do not. The ends of ranks are errors that came before the hang or ended it.

    Attributes:
        identifiers: the run, its worker group, its hosts.
        devices: of each rank, one line.
        earlier: errors of earlier attempts, and how ranks ended.
    """

    identifiers: tuple[str, ...] = ()
    versions: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    earlier: tuple[str, ...] = ()


def sheet(verdict: FlightVerdict, about: About | None = None) -> str:
    """The sheet. Without `about`, from dumps alone, the run's own fields say where to look."""
    if about is None:
        about = About(
            identifiers=("not recorded in Flight Recorder dumps: the folder or the run's name tells",),
            devices=("not recorded in Flight Recorder dumps: see `ranks` in the run's nccl_guard/report.json",),
            earlier=("not recorded in Flight Recorder dumps: read the logs (ray-nccl-guard classify)",),
        )
    fields: dict[str, Sequence[str]] = {
        "run": about.identifiers or ("not known",),
        "ranks": [f"{verdict.ranks}"],
        "versions": (*about.versions, *verdict.versions) or ("not recorded",),
        "devices": about.devices or ("not known",),
        "expected ranks": [_expected(group) for group in verdict.groups] or ["no group on record"],
        "progress": [line for group in verdict.groups for line in _progress(group)] or ["no call on record"],
        "missing records": [ranks(verdict.missing_dumps) if verdict.missing_dumps else "none"],
        "earlier errors": about.earlier or ("none seen",),
        "hypothesis": [f"{verdict.kind.value}: {verdict.summary}"],
        "culprits": [ranks(verdict.culprit_ranks) if verdict.culprit_ranks else "none named"],
        "certainty": [verdict.certainty.value],
        "evidence": verdict.because or ("no rank differs from another",),
        "against it": verdict.against or ("nothing found",),
        "cannot say": verdict.cannot_say or ("nothing beyond the above",),
        "next": [verdict.next or "nothing to do"],
    }
    lines: list[str] = []
    for name, values in fields.items():
        for value in values:
            lines += wrapped(value, f"{name:<{_LABEL}}")
            name = ""
    return "\n".join(lines) + "\n"


def _expected(group: GroupTable) -> str:
    seen = "" if group.members_known else ", as far as seen"
    return f"{_name(group)}: {ranks(row.rank for row in group.rows)}{seen}"


def _progress(group: GroupTable) -> Iterator[str]:
    """How far each rank got; those at one place share a line."""
    places: dict[str, list[int]] = {}
    for row in group.rows:
        places.setdefault(_place(row), []).append(row.rank)
    for place, sharing in places.items():
        yield f"{_name(group)}, {ranks(sharing)}: {place}"


def _place(row: GroupRow) -> str:
    if not row.has_dump:
        return "no record"
    completed = "completion not recorded" if row.last_completed is None else f"completed {row.last_completed}"
    requested = "nothing requested" if row.last_requested is None else f"requested {row.last_requested}"
    state = f" ({row.state})" if row.state not in ("", "unknown") else ""
    at = f", at {row.call}{state}" if row.call else ""
    return f"{completed}, {requested}{at}" + (", odd" if row.odd else "")


def _name(group: GroupTable) -> str:
    return f"group {group.name} ({group.desc})" if group.desc not in ("", "undefined") else f"group {group.name}"
