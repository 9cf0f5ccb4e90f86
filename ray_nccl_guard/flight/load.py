"""From paths to the dumps of one job: finds the files, reads each, tells whose it is, and says what it left out and why."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from ray_nccl_guard.errors import UsageError
from ray_nccl_guard.flight.dump import Dump, GroupKey, Vocabulary
from ray_nccl_guard.flight.reader import read_dump
from ray_nccl_guard.flight.unpickle import Limits, UnreadableDump


class Skipped(NamedTuple):
    """A file that was not used, and why, as a sentence that continues its name."""

    source: str
    reason: str
    repeats: bool = False  # it is a dump, of a rank that another file gave already


@dataclass(frozen=True, slots=True, kw_only=True)
class Dumps:
    """The dumps of one job.

    Attributes:
        by_rank: one dump a rank, in rank order.
        world_size: as told by the caller, else one more than the largest rank that any dump names.
        vocabulary: what the numbers of calls and stacks in the dumps mean.
        members: global ranks of groups as the caller knows them; a gloo dump does not tell.
        skipped: files that were not used.
    """

    by_rank: Mapping[int, Dump]
    world_size: int
    vocabulary: Vocabulary
    members: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    skipped: tuple[Skipped, ...] = ()

    @property
    def missing(self) -> tuple[int, ...]:
        """Ranks of the world without a dump. That acquits and convicts nobody."""
        return tuple(rank for rank in range(self.world_size) if rank not in self.by_rank)


def load(
    paths: Sequence[str | os.PathLike[str]] | Mapping[str, bytes],
    *,
    world_size: int | None = None,
    members: Mapping[str, Sequence[int]] | None = None,
    limits: Limits | None = None,
) -> Dumps:
    """Read the dumps of one job.

    Args:
        paths: files, and folders to search; or the bytes of dumps by a name that ends in the rank.
        world_size: how many ranks the job had, if known: a rank beyond the last file is only missed then.
        members: global ranks of process groups by name, where the caller knows them.
        limits: what each file may cost.

    Raises:
        UsageError: a path that does not exist, or more files than `limits` allow.
    """
    limits = limits or Limits()
    vocabulary = Vocabulary()
    by_rank: dict[int, Dump] = {}
    skipped: list[Skipped] = []
    for name, source in _sources(paths, limits):
        try:
            dump = read_dump(source, limits, vocabulary=vocabulary, name=name)
        except UnreadableDump as error:
            skipped.append(Skipped(name, str(error)))
            continue
        _take(dump, by_rank, skipped, world_size)
    told = [dump.largest_rank for dump in by_rank.values()] + list(by_rank)
    told += [rank for ranks in (members or {}).values() for rank in ranks]
    return Dumps(
        by_rank=dict(sorted(by_rank.items())),
        world_size=world_size if world_size is not None else max(told, default=-1) + 1,
        vocabulary=vocabulary,
        members={name: tuple(ranks) for name, ranks in (members or {}).items()},
        skipped=tuple(skipped),
    )


def _sources(
    paths: Sequence[str | os.PathLike[str]] | Mapping[str, bytes], limits: Limits
) -> Iterator[tuple[str, Path | bytes]]:
    if isinstance(paths, Mapping):
        yield from paths.items()
        return
    for count, path in enumerate(_files(Path(path) for path in paths), start=1):
        if count > limits.max_files:
            raise UsageError(f"there are more than {limits.max_files:,} files below the given paths")
        yield os.fspath(path), path


def _files(paths: Iterable[Path]) -> Iterator[Path]:
    for path in paths:
        if path.is_dir():
            for folder, folders, names in os.walk(path):
                folders.sort()
                # A pickle has the stacks that JSON of the same rank lacks, so it is met first.
                yield from (Path(folder, name) for name in sorted(names, key=lambda name: (name.endswith(".json"), name)))
        elif path.exists():
            yield path
        else:
            raise UsageError(f"{path} does not exist", help=("give the files, or the folder that holds them",))


def _take(dump: Dump, by_rank: dict[int, Dump], skipped: list[Skipped], world_size: int | None) -> None:
    if dump.rank is None:
        skipped.append(Skipped(dump.source, "neither its name nor its content tells the rank"))
    elif world_size is not None and dump.rank >= world_size:
        skipped.append(Skipped(dump.source, f"it is of rank {dump.rank}, and the job has {world_size} ranks"))
    elif dump.rank in by_rank:
        kept = by_rank[dump.rank].source
        skipped.append(Skipped(dump.source, f"it is of rank {dump.rank}, which was already read from {kept}", repeats=True))
    else:
        by_rank[dump.rank] = dump


def members_of(dumps: Dumps, key: GroupKey) -> tuple[int, ...] | None:
    """Global ranks of a group in group order; None if nobody says (gloo below the default group)."""
    told = dumps.members.get(key.name)
    if told:
        return told
    for dump in dumps.by_rank.values():
        if key in dump.memberships:
            return dump.memberships[key]
    if key.desc == "default_pg":
        return tuple(range(dumps.world_size))
    return None
