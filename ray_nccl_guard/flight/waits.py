"""Follows who waits for whom, across groups, to the ranks that nobody's absence explains."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from ray_nccl_guard.flight.align import Alignment, Group, is_rooted
from ray_nccl_guard.flight.dump import Call, GroupKey, Transfer


class Why(Enum):
    """Why one rank waits for another."""

    NOT_ASKED = "has not asked for the call"
    QUEUED = "has asked, but is stuck in an earlier call"
    NO_DUMP = "left no dump"


@dataclass(slots=True)
class Waits:
    """The graph of waits, and its ends.

    Attributes:
        edges: for each stuck rank, whom its head waits for, and why.
        alone: ranks whose head completed on other ranks: their own device, stream or watchdog stands still.
        together: stuck ranks whose head every member has asked for and none completed.
    """

    edges: dict[int, dict[int, Why]] = field(default_factory=dict)
    alone: set[int] = field(default_factory=set)
    together: set[int] = field(default_factory=set)

    def ends(self) -> set[int]:
        """Ranks that are waited for, or stuck, and wait for nobody."""
        nodes = set(self.edges) | {rank for targets in self.edges.values() for rank in targets}
        return {rank for rank in nodes if not self.edges.get(rank)}

    def circle(self) -> set[int]:
        """The ranks that wait for each other, if the graph has no end: what is left when unwaited ranks are taken away."""
        left = {rank: set(targets) for rank, targets in self.edges.items() if targets}
        while True:
            waited = {rank for targets in left.values() for rank in targets}
            idle = [rank for rank in left if rank not in waited]
            if not idle:
                return set(left)
            for rank in idle:
                del left[rank]

    def reasons(self, rank: int) -> dict[int, Why]:
        """Who waits for `rank`, and why."""
        return {other: targets[rank] for other, targets in self.edges.items() if rank in targets}


def find_waits(alignment: Alignment) -> Waits:
    """Build the graph from every rank's head."""
    waits = Waits()
    by_pair = _transfers(alignment)
    known: dict[tuple[GroupKey, int], tuple[dict[int, Why], bool]] = {}
    for rank, head in alignment.heads.items():
        group = alignment.groups[head.group]
        if head.transfer is not None:
            waits.edges[rank] = _transfer_edges(rank, head.transfer, group, alignment, by_pair)
            if not waits.edges[rank]:
                waits.together.add(rank)
            continue
        assert head.call is not None
        place = head.group, head.call.seq
        if place not in known:
            # The same for every rank whose head this is: a thousand ranks wait in one call.
            known[place] = _collective_edges(head.call, group, alignment)
        edges, completed = known[place]
        if completed and not any(why is Why.NOT_ASKED for why in edges.values()):
            # Someone completed what cannot complete without everyone: this rank took part, and did not notice.
            waits.alone.add(rank)
            edges = {}
        elif not edges:
            waits.together.add(rank)
        waits.edges[rank] = edges
    return waits


def _collective_edges(call: Call, group: Group, alignment: Alignment) -> tuple[dict[int, Why], bool]:
    """Whom a rank waits for that is stuck in `call`, and whether the call has ended for someone."""
    edges: dict[int, Why] = {}
    completed, rooted = False, is_rooted(alignment.calls(call))
    for member in group.members:
        cell = group.cells.get(member)
        if cell is None:
            edges[member] = Why.NO_DUMP
        elif not cell.asked(call.seq):
            edges[member] = Why.NOT_ASKED
        elif cell.ended(call.seq):
            completed = completed or not rooted
        elif cell.tells:
            line, other = alignment.timeline(member, group.key), alignment.heads.get(member)
            own = line.at(call.seq) if line else None
            if own is not None and other is not None and other.order < own.order:
                edges[member] = Why.QUEUED
    if any(not cell.tells for cell in group.cells.values()):
        # gloo: what a silent rank has done is not known, and what is stuck was found by who has not asked.
        edges = {member: why for member, why in edges.items() if why is Why.NOT_ASKED}
    return edges, completed


def _transfers(alignment: Alignment) -> dict[tuple[object, int, int, bool], Transfer]:
    """The first unfinished transfer by group, rank, peer (both of the group) and direction."""
    found: dict[tuple[object, int, int, bool], Transfer] = {}
    for dump in alignment.dumps.by_rank.values():
        for transfer in dump.transfers:
            if transfer.peer is not None:
                found.setdefault((transfer.group, transfer.me, transfer.peer, transfer.sends), transfer)
    return found


def _transfer_edges(
    rank: int,
    transfer: Transfer,
    group: Group,
    alignment: Alignment,
    by_pair: Mapping[tuple[object, int, int, bool], Transfer],
) -> dict[int, Why]:
    if transfer.peer is None or transfer.peer >= len(group.members) or not group.members_known:
        return {}
    peer = group.members[transfer.peer]
    if peer == rank:
        return {}
    if peer not in alignment.dumps.by_rank:
        return {peer: Why.NO_DUMP}
    answer = by_pair.get((transfer.group, transfer.peer, transfer.me, not transfer.sends))
    if answer is None:
        return {peer: Why.NOT_ASKED}
    other = alignment.heads.get(peer)
    return {peer: Why.QUEUED} if other is not None and other.order < answer.order else {}


def reachable(edges: Mapping[int, Mapping[int, Why]], starts: Iterable[int]) -> set[int]:
    """Every rank that `starts` wait for, directly or through others, and `starts` themselves."""
    seen, todo = set(starts), list(starts)
    while todo:
        for target in edges.get(todo.pop(), ()):
            if target not in seen:
                seen.add(target)
                todo.append(target)
    return seen
