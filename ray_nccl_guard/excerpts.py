"""Excerpts: the lines around those that a verdict quotes. A line alone often says what, and its neighbours say where."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ray_nccl_guard.probe.spec import LogLine, ProbeResult
from ray_nccl_guard.verdict import Quote, Role

# Three lines hold NCCL's own report of one error; six quotes are more than the message shows.
_AROUND, _MOST, _LENGTH = 3, 6, 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Excerpt:
    """Neighbouring lines of one source of one rank; `quoted` are the numbers of those that the verdict rests on."""

    rank: int
    source: str
    lines: tuple[LogLine, ...]
    quoted: tuple[int, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "rank": self.rank,
            "source": self.source,
            "quoted": list(self.quoted),
            "lines": [[line.number, line.text] for line in self.lines],
        }


def around(quotes: Sequence[Quote], results: Sequence[ProbeResult]) -> tuple[Excerpt, ...]:
    """An excerpt for each rank and source that is quoted, causes before echoes; none where the lines are not kept."""
    said = {(r.rank, line.source, line.number): line for r in results for line in r.lines}
    places: dict[tuple[int, str], list[int]] = {}
    for quote in sorted(quotes, key=lambda q: q.role is Role.CASCADE):
        if quote.rank is not None and (quote.rank, quote.source, quote.line) in said:
            places.setdefault((quote.rank, quote.source), []).append(quote.line)
    found = []
    for (rank, source), quoted in list(places.items())[:_MOST]:
        wanted = sorted({n for line in quoted for n in range(line - _AROUND, line + _AROUND + 1)})
        lines = [said[rank, source, n] for n in wanted if (rank, source, n) in said]
        cut = tuple(LogLine(source=source, number=line.number, text=line.text[:_LENGTH]) for line in lines)
        found.append(Excerpt(rank=rank, source=source, lines=cut, quoted=tuple(sorted(set(quoted)))))
    return tuple(found)
