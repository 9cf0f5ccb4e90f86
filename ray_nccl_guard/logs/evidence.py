"""Log files as evidence: the lines that a rule could claim, put to the rank that wrote them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ray_nccl_guard.diagnosis.scan import MAX_LINE, Hit, Scanner
from ray_nccl_guard.errors import UsageError
from ray_nccl_guard.evidence import Evidence, Origin, RankEvidence
from ray_nccl_guard.logs import writers
from ray_nccl_guard.logs.reader import STDIN, batches
from ray_nccl_guard.probe.spec import LogLine, Outcome

# Of one rule and one writer the first lines say it; a job that prints a warning a million times says it in three.
KEEP = 3
# Writers beyond this share one record: memory stays bounded whatever a log claims.
MAX_WRITERS = 20_000
_KEEP_TEXT = 2_000


@dataclass(slots=True)
class _Writer:
    """One process's kept lines."""

    rank: int | None = None
    host: str = ""
    lines: list[LogLine] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class _Reading:
    """What is known so far of all writers."""

    scanner: Scanner
    max_writers: int
    writers: dict[tuple[str, str], _Writer] = field(default_factory=dict)
    ranks: dict[str, int] = field(default_factory=dict)
    worlds: dict[str, int] = field(default_factory=dict)
    world: int = 0
    lines: int = 0

    def file(self, path: str, *, trust_name: bool) -> None:
        own = None if path == STDIN else writers.rank_of_file(os.path.basename(path), trust_name=trust_name)
        source = "stdin" if path == STDIN else path
        if own is not None and len(self.writers) < self.max_writers:
            # A log without a complaint is a record too: among ranks that complain, the silent one is the suspect.
            self.writers.setdefault(("", f"rank {own}"), _Writer(rank=own))
        for first, lines in batches(path):
            self.lines += len(lines)
            for index in self.scanner.suspects(lines):
                for part in _parts(lines[index]):
                    self._line(source, first + index, part, own)

    def _line(self, source: str, number: int, raw: str, own: int | None) -> None:
        text, rank = writers.unpack(raw)
        for process, announced in writers.announced(text):
            self.ranks[process] = announced
        hits = self.scanner.hits(text)
        if not hits:
            return
        process = writers.process_in(text)
        rank = writers.rank_in(text) if rank is None else rank
        if rank is not None and process:
            self.ranks.setdefault(process, rank)
        self._communicator(process, hits)
        key = ("", f"rank {rank}") if rank is not None else (source, process)
        if key not in self.writers and len(self.writers) >= self.max_writers:
            key = (source, "")
        writer = self.writers.setdefault(key, _Writer(rank=rank if rank is not None else own))
        writer.host = writer.host or writers.host_in(text)
        kept = False
        for hit in hits:
            count = writer.counts.get(hit.rule.id, 0)
            writer.counts[hit.rule.id] = count + 1
            if count < KEEP and not kept:
                writer.lines.append(LogLine(source=source, number=number, text=text[:_KEEP_TEXT]))
                kept = True

    def _communicator(self, process: str, hits: Iterable[Hit]) -> None:
        """World size and rank as NCCL and the store print them; sub-groups have smaller ones, so the largest counts."""
        for hit in hits:
            world = _number(hit.fields.get("world", "") or hit.fields.get("world2", ""))
            if not world:
                continue
            self.world = max(self.world, world)
            rank = hit.fields.get("rank", "")
            if process and rank and world >= self.worlds.get(process, 0):
                self.worlds[process] = world
                self.ranks[process] = _number(rank)


def read_logs(
    paths: Sequence[str], scanner: Scanner, *, trust_names: bool = False, max_writers: int = MAX_WRITERS
) -> Evidence:
    """Evidence from log files; a file named twice is read once.

    Raises `UsageError` for a missing file, a directory, an unreadable file, or none at all.
    """
    if not paths:
        raise UsageError("There is no log to read.")
    reading = _Reading(scanner, max_writers)
    for path in dict.fromkeys(path if path == STDIN else os.path.realpath(path) for path in paths):
        reading.file(path, trust_name=trust_names)
    return _evidence(reading)


def _number(text: str) -> int:
    """0 for what is no number, or none of a world that exists."""
    return int(text) if text.isdigit() and len(text) <= 6 else 0


def _parts(line: str) -> list[str]:
    """Progress bars overwrite one line: each state is a line of its own."""
    if "\r" not in line:
        return [line[:MAX_LINE]]
    return [part[:MAX_LINE] for part in line.split("\r") if part.strip()]


def _evidence(reading: _Reading) -> Evidence:
    known: dict[int, list[_Writer]] = {}
    unknown: list[_Writer] = []
    for (_, process), writer in reading.writers.items():
        rank = writer.rank if writer.rank is not None else reading.ranks.get(process)
        if rank is None:
            unknown.append(writer)
        else:
            known.setdefault(rank, []).append(writer)
    records = [_record(rank, writers_) for rank, writers_ in sorted(known.items())]
    records += [_record(None, [writer]) for writer in unknown]
    world = max([reading.world, *(rank + 1 for rank in known)], default=0)
    return Evidence(origin=Origin.LOG, backend="", world_size=world, ranks=tuple(records))


def _record(rank: int | None, group: Sequence[_Writer]) -> RankEvidence:
    lines = sorted((line for writer in group for line in writer.lines), key=lambda line: (line.source, line.number))
    host = next((writer.host for writer in group if writer.host), "")
    return RankEvidence(rank=rank, outcome=Outcome.NOT_RUN, lines=tuple(lines), host=host)
