"""From what was gathered to one verdict: each recorder's dumps are diagnosed, and told together with how the ranks ended."""

from __future__ import annotations

import textwrap
import zlib
from collections.abc import ItemsView, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ray_nccl_guard import flight
from ray_nccl_guard.classes import FailureClass
from ray_nccl_guard.flight import FlightVerdict, Kind, render
from ray_nccl_guard.flight.words import ranks as named
from ray_nccl_guard.ray_train.flight_ends import End, How
from ray_nccl_guard.ray_train.flight_pull import Gathered

_FILE = "file"  # a dump that torch wrote by itself; whose recorder it was is not in its name
_MOST_PLACES = 16  # as many as a table of `flight.render` has lines
_TEXT_LIMIT = 1 << 30  # of one dump when unpacked; the reader has a lower limit of its own


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """The verdict on a worker group that ended badly, or on one that was asked while it ran.

    Attributes:
        recorder: whose dumps decided: `gloo`, `nccl2` or `nccl`; empty if there was none.
        recorders: those that held any call; the others' dumps are empty and not kept.
        ends: how each rank ended.
        recorded: how many calls each rank has made, to see whether a run moves.
    """

    verdict: FlightVerdict
    recorder: str
    recorders: tuple[str, ...]
    ends: Mapping[int, End]
    gathered: Gathered
    recorded: Mapping[int, int]

    @property
    def failure(self) -> FailureClass:
        """A rank that raised for a reason of its own leaves the others waiting: that is the program, not the network."""
        own = {rank for rank, end in self.ends.items() if end.own}
        if own and set(self.verdict.culprit_ranks) <= own:
            return FailureClass.USER_CODE_NOT_INFRA
        return self.verdict.failure

    def kept(self) -> dict[str, dict[str, bytes]]:
        """The compressed dumps that are worth a file, by recorder."""
        return {name: packed for name, packed in dumps_by_recorder(self.gathered).items() if name in self.recorders}

    def to_json(self) -> dict[str, Any]:
        """The key `flight` of a run's report: what `flight --json` says, and how the ranks ended."""
        return self.verdict.to_json() | {
            "failure": self.failure.value,
            "recorder": self.recorder,
            "ranks_ended": [
                {"rank": rank, "how": end.how.value, "what": end.what, "own": end.own, "place": end.place}
                for rank, end in sorted(self.ends.items())
            ],
            "not_had": [*self.gathered.notes, *_notes(self.gathered)],
            "collect_s": round(self.gathered.seconds, 2),
        }

    def text(self) -> str:
        """The message: the verdict, then where every rank is."""
        return f"{render.text(self.verdict).rstrip()}\n\n{self.places()}"

    def places(self) -> str:
        """Where every rank is; those at the same place share a line."""
        lines = ["  where the ranks are"]
        same: dict[tuple[How, str, str], list[int]] = {}
        for rank, end in sorted(self.ends.items()):
            same.setdefault((end.how, end.what, end.place), []).append(rank)
        for (how, what, place), sharing in list(same.items())[:_MOST_PLACES]:
            words = " ".join(filter(None, (how.value, what and f"({what})", place and f"at {place}")))
            lines += textwrap.wrap(
                render.clean(f"{named(sharing)}: {words}"),
                100,
                initial_indent="    ",
                subsequent_indent="      ",
                break_long_words=False,
                break_on_hyphens=False,
            )
        if len(same) > _MOST_PLACES:
            lines.append(f"    and {len(same) - _MOST_PLACES} more places (the report has every rank)")
        return "\n".join(lines) + "\n"


class Unpacked(Mapping[str, bytes]):
    """Compressed dumps by name, each unpacked only while it is read: a large job's do not fit into memory together."""

    def __init__(self, packed: Mapping[str, bytes]) -> None:
        self._packed = packed

    def __getitem__(self, name: str) -> bytes:
        return zlib.decompressobj().decompress(self._packed[name], _TEXT_LIMIT)

    def __iter__(self) -> Iterator[str]:
        return iter(self._packed)

    def __len__(self) -> int:
        return len(self._packed)

    def items(self) -> ItemsView[str, bytes]:
        return ItemsView(self)


def judge(gathered: Gathered, ends: Mapping[int, End], world_size: int) -> Collected:
    """Diagnose each recorder's dumps and keep the one that says most."""
    used: list[str] = []
    best: tuple[tuple[int, ...], str, FlightVerdict, dict[int, int]] | None = None
    for number, (recorder, packed) in enumerate(dumps_by_recorder(gathered).items()):
        loaded = flight.load(Unpacked(packed), world_size=world_size, members=_members(gathered))
        recorded = {rank: dump.records + dump.dropped for rank, dump in loaded.by_rank.items()}
        if not any(recorded.values()):
            continue
        used.append(recorder)
        verdict = flight.diagnose(loaded)
        strength = (verdict.kind is not Kind.NONE, verdict.certainty.strength, sum(recorded.values()), -number)
        if best is None or strength > best[0]:
            best = (strength, recorder, verdict, recorded)
    if best is None:
        verdict = flight.diagnose(flight.load({}, world_size=world_size))
        return Collected(verdict=verdict, recorder="", recorders=(), ends=ends, gathered=gathered, recorded={})
    _, recorder, verdict, recorded = best
    return Collected(
        verdict=_with_ends(verdict, ends),
        recorder=recorder,
        recorders=tuple(used),
        ends=ends,
        gathered=gathered,
        recorded=recorded,
    )


def moved(before: Collected, after: Collected) -> dict[int, int]:
    """How many calls each rank has asked for between the two, of the ranks that asked for any."""
    grown = {rank: count - before.recorded.get(rank, count) for rank, count in after.recorded.items()}
    return {rank: more for rank, more in grown.items() if more > 0}


def dumps_by_recorder(gathered: Gathered) -> dict[str, dict[str, bytes]]:
    """The compressed dumps, by recorder and by a name that ends in the rank.

    torch's own file of a rank that answers no more goes with the recorder that most ranks have used: it writes the default
    backend's.
    """
    found: dict[str, dict[str, bytes]] = {}
    for rank, pulled in sorted(gathered.answered.items()):
        for recorder, data in pulled.dumps.items():
            found.setdefault(recorder, {})[f"rank_{rank}"] = data
    sizes = {recorder: sum(map(len, packed.values())) for recorder, packed in found.items()}
    main = max(sizes, key=lambda name: sizes[name], default="nccl")
    for rank, left in sorted(gathered.left.items()):
        if _FILE in left.dumps:
            found.setdefault(main, {})[f"rank_{rank}"] = left.dumps[_FILE]
    return found


def _members(gathered: Gathered) -> dict[str, tuple[int, ...]]:
    return {name: ranks for pulled in gathered.answered.values() for name, ranks in pulled.groups.items()}


def _with_ends(verdict: FlightVerdict, ends: Mapping[int, End]) -> FlightVerdict:
    """The same verdict with what Ray knows of the culprits, and of ranks whose own exception came between."""
    own = {rank: end for rank, end in ends.items() if end.own}
    said = list(verdict.because)
    for rank in verdict.culprit_ranks:
        end = ends.get(rank)
        if end is None:
            continue
        words = {
            How.RAISED: f"raised {end.what}",
            How.DIED: f"has died: {end.what}",
            How.SILENT: f"does not answer {end.what}".rstrip(),
            How.RUNNING: "is still in train_func",
            How.ENDED: "has ended its train_func",
        }[end.how]
        said.append(f"rank {rank} {words}" + (f", at {end.place}" if end.place else ""))
    against = list(verdict.against)
    if own and verdict.kind is not Kind.NONE and not set(verdict.culprit_ranks) & set(own):
        rank, end = next(iter(own.items()))
        against.append(f"{named(own)} raised for a reason of its own, not in a collective ({end.what})")
    summary = verdict.summary
    if own and set(own) >= set(verdict.culprit_ranks):
        rank, end = next(iter(own.items()))
        summary = f"rank {rank} raised {end.what}; {summary}"
    return replace(verdict, summary=summary, because=tuple(said), against=tuple(against))


def _notes(gathered: Gathered) -> list[str]:
    of = {**gathered.answered, **gathered.left}
    return [f"rank {rank}: {note}" for rank, pulled in sorted(of.items()) for note in pulled.notes]
