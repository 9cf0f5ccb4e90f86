"""The tables of a verdict: rank by rank how far each got in every group, stacks side by side, versions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from ray_nccl_guard.flight.align import Alignment, Cell, Group
from ray_nccl_guard.flight.dump import Call, Frame, GroupKey
from ray_nccl_guard.flight.load import Dumps
from ray_nccl_guard.flight.verdict import CallStack, GroupRow, GroupTable
from ray_nccl_guard.flight.words import describe

_MAX_STACKS = 4  # of either side: one is usual, and a reader compares two


def tables(alignment: Alignment, culprits: Iterable[int], decisive: GroupKey | None) -> tuple[GroupTable, ...]:
    """One table a group; the default group first, then as torch numbered them. `decisive` is the group of the verdict."""
    suspects = frozenset(culprits)
    keys = sorted(alignment.groups, key=lambda key: (key.desc != "default_pg", len(key.name), key))
    return tuple(_table(alignment.groups[key], alignment, suspects, key == decisive) for key in keys)


def _table(group: Group, alignment: Alignment, suspects: frozenset[int], decisive: bool) -> GroupTable:
    places = Counter((cell.last_requested, cell.last_completed) for cell in group.cells.values())
    usual = places.most_common(1)[0][0] if places else None
    rows = []
    for rank in sorted(group.members):
        cell = group.cells.get(rank)
        if cell is None:
            rows.append(GroupRow(rank=rank, has_dump=False))
            continue
        call = _next(cell, group.key, alignment)
        differs = (cell.last_requested, cell.last_completed) != usual
        if suspects:
            # Where the verdict names ranks, only they are marked, and only where it shows.
            differs = rank in suspects and (decisive or len(places) > 1)
        rows.append(
            GroupRow(
                rank=rank,
                last_completed=cell.last_completed,
                last_requested=cell.last_requested,
                next_op=alignment.calls(call)[0].op if call else "",
                next_seq=call.seq if call else None,
                state=call.state.name.lower() if call else "",
                call=describe(alignment.calls(call)) if call else "",
                odd=differs,
            )
        )
    return GroupTable(name=group.key.name, desc=group.key.desc, members_known=group.members_known, rows=tuple(rows))


def _next(cell: Cell, key: GroupKey, alignment: Alignment) -> Call | None:
    """What the rank is stuck in, else its last call."""
    if cell.stuck is not None:
        return cell.stuck
    line = alignment.timeline(cell.rank, key)
    return line.row(len(line) - 1) if line else None


def stacks_beside(
    alignment: Alignment, culprits: Iterable[int], key: GroupKey | None, seq: int | None, waiting: Iterable[int]
) -> tuple[CallStack, ...]:
    """The culprits' last calls (or the deciding one, if they made it) beside the calls that the others are in."""
    if key is None:
        return ()
    return (*_stacks(alignment, culprits, key, seq, culprit=True), *_stacks(alignment, waiting, key, seq, culprit=False))


def _stacks(alignment: Alignment, ranks: Iterable[int], key: GroupKey, seq: int | None, *, culprit: bool) -> list[CallStack]:
    found: dict[tuple[GroupKey, int, int, int], list[int]] = {}
    for rank in ranks:
        call = _call_of(alignment, rank, key, seq)
        if call is not None:
            found.setdefault((call[0], call[1].seq, call[1].call, call[1].stack), []).append(rank)
    words = alignment.dumps.vocabulary
    return [
        CallStack(
            ranks=tuple(sorted(sharing)), culprit=culprit, group=str(group), seq=number, op=words.calls[call][0].op,
            frames=words.stacks[stack],
        )
        for (group, number, call, stack), sharing in list(found.items())[:_MAX_STACKS]
        if words.stacks[stack]
    ]  # fmt: skip


def _call_of(alignment: Alignment, rank: int, key: GroupKey, seq: int | None) -> tuple[GroupKey, Call] | None:
    line = alignment.timeline(rank, key)
    call = line.at(seq) if line is not None and seq is not None else None
    if call is not None:
        return key, call
    dump = alignment.dumps.by_rank.get(rank)
    return dump.last if dump else None


def user_frames(frames: Iterable[Frame]) -> list[Frame]:
    """The frames of the program itself: torch's own say only that a collective was called, Ray's that it runs the program."""
    own = [frame for frame in frames if "/torch/" not in frame.file and not _is_torch(frame) and not _is_below(frame)]
    return own or list(frames)


def _is_torch(frame: Frame) -> bool:
    return frame.file.endswith(("distributed_c10d.py", "c10d_logger.py"))


def _is_below(frame: Frame) -> bool:
    return "/site-packages/ray/" in frame.file or frame.file.endswith("/threading.py")


def versions(dumps: Dumps) -> tuple[str, ...]:
    """What the dumps say of schema, library and backends, and where ranks differ in it."""
    said = []
    for name, values in (
        ("schema", Counter(dump.version or "unknown" for dump in dumps.by_rank.values())),
        ("library", Counter(dump.library or "not recorded" for dump in dumps.by_rank.values())),
        ("backend", Counter(backend for dump in dumps.by_rank.values() for backend in dump.backends)),
    ):
        said += [f"{name} {value} ({count} ranks)" for value, count in sorted(values.items())]
    return tuple(said)
