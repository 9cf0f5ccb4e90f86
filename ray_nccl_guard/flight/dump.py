"""What one rank's recorder remembers: a timeline of calls per process group, in columns, because a job has millions."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple


class State(IntEnum):
    """How far a call got, as its own rank saw it. Ordered: a smaller one is less far.

    `UNKNOWN` is what gloo's recorder says of every call: it writes `scheduled` and `retired` at the start and never
    looks again (torch 2.13 and 2.15, measured), so its records prove that a call was asked for and nothing more.
    """

    UNKNOWN = -1
    SCHEDULED = 0
    STARTED = 1
    COMPLETED = 2


class Frame(NamedTuple):
    """One line of a Python stack, innermost first in a stack."""

    file: str
    line: int
    name: str


class Signature(NamedTuple):
    """What a call asks for. Sizes are the shapes of the tensors, in torch's order."""

    op: str
    input_sizes: tuple[tuple[int, ...], ...] = ()
    input_dtypes: tuple[str, ...] = ()
    output_sizes: tuple[tuple[int, ...], ...] = ()
    output_dtypes: tuple[str, ...] = ()


Calls = tuple[Signature, ...]  # one call, or the calls of a coalesced block, which share a sequence number
Stack = tuple[Frame, ...]


@dataclass(slots=True)
class Vocabulary:
    """The distinct calls and stacks of all dumps read together, by number: millions of records share a few hundred.

    `members` keeps the ranks of groups by the text that tells them: every dump repeats those of the whole world.
    """

    calls: list[Calls] = field(default_factory=list)
    stacks: list[Stack] = field(default_factory=lambda: [()])
    members: dict[str, tuple[int, ...]] = field(default_factory=dict)
    _call_ids: dict[Calls, int] = field(default_factory=dict)
    _stack_ids: dict[Stack, int] = field(default_factory=lambda: {(): 0})

    def call_id(self, calls: Calls) -> int:
        found = self._call_ids.setdefault(calls, len(self.calls))
        if found == len(self.calls):
            self.calls.append(calls)
        return found

    def stack_id(self, stack: Stack) -> int:
        found = self._stack_ids.setdefault(stack, len(self.stacks))
        if found == len(self.stacks):
            self.stacks.append(stack)
        return found


class GroupKey(NamedTuple):
    """A process group as torch names it: a name every member agrees on, and the program's description of it."""

    name: str
    desc: str

    def __str__(self) -> str:
        return self.name if self.desc in ("", "undefined") else f"{self.name} ({self.desc})"


class Call(NamedTuple):
    """One row of a timeline. `order` counts the rank's own records from the oldest that is left."""

    seq: int
    call: int
    state: State
    stack: int
    order: int


@dataclass(slots=True)
class Timeline:
    """The collectives that one rank asked of one group, by ascending sequence number."""

    seqs: array[int] = field(default_factory=lambda: array("q"))
    calls: array[int] = field(default_factory=lambda: array("i"))
    states: array[int] = field(default_factory=lambda: array("b"))
    stacks: array[int] = field(default_factory=lambda: array("i"))
    orders: array[int] = field(default_factory=lambda: array("i"))

    def __len__(self) -> int:
        return len(self.seqs)

    @property
    def last_requested(self) -> int | None:
        return self.seqs[-1] if self.seqs else None

    @property
    def last_completed(self) -> int | None:
        """The largest sequence number seen to complete; None if none was, or the backend does not tell."""
        for index in range(len(self.seqs) - 1, -1, -1):
            if self.states[index] == State.COMPLETED:
                return self.seqs[index]
        return None

    def row(self, index: int) -> Call:
        return Call(self.seqs[index], self.calls[index], State(self.states[index]), self.stacks[index], self.orders[index])

    def at(self, seq: int) -> Call | None:
        """The call with that sequence number, None if it is not (or no longer) on record."""
        index = bisect_left(self.seqs, seq)
        return self.row(index) if index < len(self.seqs) and self.seqs[index] == seq else None

    def after(self, seq: int) -> Iterator[Call]:
        for index in range(bisect_right(self.seqs, seq), len(self.seqs)):
            yield self.row(index)


class Transfer(NamedTuple):
    """A point-to-point call that is not seen to have completed. Ranks are the group's own; `peer` None is any source."""

    group: GroupKey
    sends: bool
    me: int
    peer: int | None
    call: int
    state: State
    stack: int
    order: int


class Progress(NamedTuple):
    """The recorder's own counters of one group, by torch's per-process number of it. -1: nothing yet."""

    requested: int
    started: int
    completed: int


@dataclass(slots=True, kw_only=True)
class Dump:
    """What one file says of one rank.

    Attributes:
        source: where it was read from.
        rank: the global rank, None if neither file name nor content tells.
        version: the schema version as written, e.g. `2.10`.
        library: the communication library's version, empty if not told.
        backends: the names before the colon of its calls, e.g. `nccl2`.
        memberships: global ranks of the groups that the file describes, in group order.
        timelines: the collectives by group.
        transfers: point-to-point calls not seen to complete.
        progress: the recorder's counters, by the number that `group_numbers` maps to a group.
        records: how many records were read, and `dropped` how many the ring had overwritten before.
        largest_rank: the largest rank that the file names, -1 if it names none; the world is at least one larger.
        only_active: the file was written without completed calls, so a call's absence may mean that it completed.
        last: group and call that came last on this rank.
    """

    source: str
    rank: int | None = None
    host: str = ""
    version: str = ""
    library: str = ""
    backends: frozenset[str] = frozenset()
    memberships: Mapping[GroupKey, tuple[int, ...]] = field(default_factory=dict)
    timelines: dict[GroupKey, Timeline] = field(default_factory=dict)
    transfers: list[Transfer] = field(default_factory=list)
    progress: Mapping[str, Progress] = field(default_factory=dict)
    group_numbers: dict[GroupKey, str] = field(default_factory=dict)
    records: int = 0
    dropped: int = 0
    largest_rank: int = -1
    only_active: bool = False
    last: tuple[GroupKey, Call] | None = None
    notes: tuple[str, ...] = ()
