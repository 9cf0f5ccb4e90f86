"""Infrastructure or program: what people write beside a log says where to look first. It never moves a class."""

from __future__ import annotations

from collections.abc import Sequence

from ray_nccl_guard.diagnosis.weigh import Sighting


def remarks(sightings: Sequence[Sighting]) -> tuple[str, ...]:
    """One sentence for each kind of remark, the first of its kind, with its place."""
    first: dict[str, Sighting] = {}
    for s in sightings:
        if s.rule.speaks_for:
            first.setdefault(s.rule.id, s)
    return tuple(
        f"{s.rule.summary} ({s.source}:{s.number}): that speaks for the {s.rule.speaks_for}" for s in first.values()
    )
