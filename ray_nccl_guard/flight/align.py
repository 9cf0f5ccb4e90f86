"""Puts the ranks of each process group side by side: what each completed, what it asks for next, what it is stuck in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ray_nccl_guard.flight.dump import Call, Calls, Dump, GroupKey, State, Timeline, Transfer
from ray_nccl_guard.flight.load import Dumps, members_of

# One rank may finish its part before the others begin: the root of a broadcast has only to send. All other collectives
# end on no rank before every rank has entered.
_ROOTED = frozenset({"broadcast", "_broadcast_oop", "reduce", "_reduce_oop", "scatter", "gather"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One rank in one group.

    Attributes:
        last_completed: the last sequence number seen to complete, None if none was or the backend does not tell.
        last_requested: the last one asked for, None if there is no record.
        stuck: the first call that has not completed; those behind it have not either.
        tells: the recorder of this backend marks what completes (gloo's does not).
    """

    rank: int
    last_completed: int | None = None
    last_requested: int | None = None
    stuck: Call | None = None
    tells: bool = True

    def asked(self, seq: int) -> bool:
        return self.last_requested is not None and self.last_requested >= seq

    def ended(self, seq: int) -> bool:
        """Whether this rank saw that call complete."""
        return self.tells and self.asked(seq) and (self.stuck is None or seq < self.stuck.seq)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """One process group across the ranks.

    Attributes:
        members: global ranks in group order; where `members_known` is False, those that have calls on record.
        cells: the members with a dump.
    """

    key: GroupKey
    members: tuple[int, ...]
    members_known: bool
    cells: Mapping[int, Cell]


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """What a rank is stuck in first: a collective (`call`) or a point-to-point transfer. Later calls queue behind it."""

    group: GroupKey
    call: Call | None = None
    transfer: Transfer | None = None

    @property
    def order(self) -> int:
        return self.call.order if self.call else self.transfer.order if self.transfer else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Alignment:
    """All groups of a job, and each rank's head; a rank without one is stuck in nothing that its dump shows."""

    dumps: Dumps
    groups: Mapping[GroupKey, Group]
    heads: Mapping[int, Head] = field(default_factory=dict)

    def timeline(self, rank: int, key: GroupKey) -> Timeline | None:
        dump = self.dumps.by_rank.get(rank)
        return dump.timelines.get(key) if dump else None

    def calls(self, call: Call) -> Calls:
        return self.dumps.vocabulary.calls[call.call]


def align(dumps: Dumps) -> Alignment:
    """Line up `dumps` by group and sequence number."""
    keys = dict.fromkeys(key for dump in dumps.by_rank.values() for key in dump.timelines)
    keys.update(dict.fromkeys(transfer.group for dump in dumps.by_rank.values() for transfer in dump.transfers))
    groups = {key: _group(dumps, key) for key in keys}
    heads = {}
    for rank, dump in dumps.by_rank.items():
        head = _head(rank, dump, groups)
        if head is not None:
            heads[rank] = head
    return Alignment(dumps=dumps, groups=groups, heads=heads)


def is_rooted(calls: Calls) -> bool:
    return any(signature.op in _ROOTED for signature in calls)


def _group(dumps: Dumps, key: GroupKey) -> Group:
    timelines = {rank: dump.timelines[key] for rank, dump in dumps.by_rank.items() if key in dump.timelines}
    told = members_of(dumps, key)
    members = told if told is not None else tuple(sorted(timelines))
    requested = {rank: timelines[rank].last_requested or 0 for rank in timelines}
    for rank in members:
        # A ring that has wrapped may have lost calls of this group; a complete one without them proves there were none.
        if rank in dumps.by_rank and rank not in requested and not dumps.by_rank[rank].dropped:
            requested[rank] = 0
    lowest = sorted(requested.values())[:2]
    cells = {}
    for rank in members:
        if rank not in dumps.by_rank:
            continue
        if rank not in timelines:
            cells[rank] = Cell(rank=rank, tells=not _is_blind(next(iter(timelines.values()), None)))
            continue
        # What the slowest of the *others* has asked for.
        slowest = lowest[-1] if len(lowest) > 1 and requested[rank] == lowest[0] else lowest[0]
        cells[rank] = _cell(rank, dumps, timelines[rank], slowest)
    return Group(key=key, members=members, members_known=told is not None, cells=cells)


def _is_blind(timeline: Timeline | None) -> bool:
    return timeline is not None and timeline.states[-1] == State.UNKNOWN


def _cell(rank: int, dumps: Dumps, timeline: Timeline, slowest: int) -> Cell:
    if _is_blind(timeline):
        last = dumps.by_rank[rank].last
        stuck = next(
            (
                call
                for call in timeline.after(slowest)
                if not is_rooted(dumps.vocabulary.calls[call.call]) or (last is not None and last[1].order == call.order)
            ),
            None,
        )
        return Cell(rank=rank, last_requested=timeline.last_requested, stuck=stuck, tells=False)
    # From the end to the last that completed: one communicator works in order, and a record that nothing ever marks
    # (a split, a window) must not count as stuck for ever.
    first = len(timeline)
    while first > 0 and timeline.states[first - 1] != State.COMPLETED:
        first -= 1
    completed = timeline.seqs[first - 1] if first else None
    if first == 0 and timeline.seqs[0] > 1 and dumps.by_rank[rank].dropped:
        completed = timeline.seqs[0] - 1  # what a dump of active calls leaves out, or the ring overwrote, had completed
    return Cell(
        rank=rank,
        last_completed=completed,
        last_requested=timeline.last_requested,
        stuck=timeline.row(first) if first < len(timeline) else None,
    )


def _head(rank: int, dump: Dump, groups: Mapping[GroupKey, Group]) -> Head | None:
    cells = ((key, groups[key].cells.get(rank)) for key in dump.timelines)
    heads = [Head(group=key, call=cell.stuck) for key, cell in cells if cell is not None and cell.stuck is not None]
    if dump.transfers:
        first = min(dump.transfers, key=lambda transfer: transfer.order)
        heads.append(Head(group=first.group, transfer=first))
    return min(heads, key=lambda head: head.order, default=None)
