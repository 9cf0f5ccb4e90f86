"""Turns the records of a dump into columns, whichever way they were read: raw by template, plain by unpickling or JSON."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from ray_nccl_guard.flight.dump import (
    Dump,
    Frame,
    GroupKey,
    Signature,
    State,
    Timeline,
    Transfer,
    Vocabulary,
)  # fmt: skip
from ray_nccl_guard.flight.template import WANTED, Raw, index_of, integer_of, value_of
from ray_nccl_guard.flight.unpickle import UnreadableDump

# `send 0->3`, `recv 3<-0`, `recv 3<-?` (any source), ranks of the group (torch's flight_recorder/components/types.py)
_TRANSFER = re.compile(r"(send|recv) ([0-9]{1,7})(?:->|<-)([0-9]{1,7}|\?)$")
_STATES = {"scheduled": State.SCHEDULED, "started": State.STARTED, "completed": State.COMPLETED}
_COALESCED = "coalesced"
_MAX_FRAMES, _MAX_TENSORS, _MAX_DIMS = 512, 4096, 32  # as in `template`; torch allows 25 dimensions
_KIND_KEYS = ("profiling_name", "input_sizes", "input_dtypes", "output_sizes", "output_dtypes")
_TRUE = b"\x88"
_INT64 = range(-(1 << 63), 1 << 63)


class _Kind(NamedTuple):
    """What is read off the name and the sizes of a record, once for all records that share them."""

    backend: str
    call: int
    op: str
    transfer: tuple[bool, int, int | None] | None  # sends, this rank in the group, its peer


class Columns:
    """Collects the records of one dump, oldest first, into `dump`.

    Values of a plain record are known by identity: a pickle may put one list a million times into its records, and what
    is converted once costs memory and time once.
    """

    def __init__(self, dump: Dump, vocabulary: Vocabulary, memo: Mapping[int, Any]) -> None:
        self._dump, self._vocabulary, self._memo = dump, vocabulary, memo
        self._raw_kinds: dict[tuple[bytes | None, ...], _Kind] = {}  # by raw name, sizes and types
        self._raw_groups: dict[bytes | None, GroupKey] = {}
        self._raw_stacks: dict[bytes | None, int] = {}
        self._raw_states: dict[tuple[bytes | None, bytes | None, str], State] = {}
        self._kinds: dict[tuple[int, ...], _Kind] = {}
        self._stacks: dict[int, int] = {}
        self._frames: dict[int, Frame] = {}
        self._shapes: dict[int, tuple[int, ...]] = {}
        self._transfers: dict[GroupKey, list[Transfer]] = {}  # of a coalesced block that is not closed yet
        self._blocks: dict[GroupKey, list[int]] = {}  # calls that share the last sequence number
        self._order = 0
        self._any_ended = False  # a record that completed, or of a backend that does not tell

    def add_raw(self, raw: Raw) -> None:
        """Take a record that a template matched."""
        frames, group, seq, state = raw[0], raw[3], raw[4], raw[11]
        key = raw[6:11]  # name, sizes and types, as `WANTED` orders them
        kind = self._raw_kinds.get(key)
        if kind is None or group not in self._raw_groups or frames not in self._raw_stacks:
            record = {name: value_of(part, self._memo, name) for name, part in zip(WANTED, raw, strict=True) if part}
            kind = self._raw_kinds[key] = self._kind(record)
            self._raw_groups[group] = self._group(record)
            self._raw_stacks[frames] = self._stack(record.get("frames"))
        ended = (state, raw[12], kind.backend)
        reached = self._raw_states.get(ended)
        if reached is None:
            word = self._memo[index_of(state)] if state else None
            reached = self._raw_states[ended] = self._state(word, raw[12] == _TRUE, kind.backend)
        self._put(self._raw_groups[group], kind, integer_of(seq), reached, raw[13] == _TRUE, self._raw_stacks[frames])

    def add_plain(self, record: Any) -> None:
        """Take a record that is a dict of plain values; its shape is not yet known to be right."""
        if not isinstance(record, dict):
            raise UnreadableDump("one of its records is not a dict")
        identity = tuple(id(record.get(key)) for key in _KIND_KEYS)
        kind = self._kinds.get(identity)
        if kind is None:
            kind = self._kinds[identity] = self._kind(record)
        frames = record.get("frames")
        stack = self._stacks.get(id(frames))
        if stack is None:
            stack = self._stacks[id(frames)] = self._stack(frames)
        reached = self._state(record.get("state"), record.get("retired") is True, kind.backend)
        self._put(self._group(record), kind, _seq(record), reached, record.get("is_p2p") is True, stack)

    def finish(self) -> None:
        """Close what is open and fill in what only the whole file tells."""
        dump = self._dump
        for transfers in self._transfers.values():
            dump.transfers.extend(transfers)
        for group in list(self._blocks):
            self._close_block(group)
        dump.records = self._order
        dump.backends = frozenset(kind.backend for kind in (*self._raw_kinds.values(), *self._kinds.values()))
        dump.only_active = self._order > 0 and not self._any_ended and dump.dropped > 0
        if dump.timelines:
            group, line = max(dump.timelines.items(), key=lambda item: item[1].orders[-1])
            dump.last = (group, line.row(len(line) - 1))

    def _state(self, word: Any, retired: bool, backend: str) -> State:
        state = _STATES.get(word, State.SCHEDULED) if isinstance(word, str) else State.SCHEDULED
        if state is not State.COMPLETED:
            if backend == "gloo":
                state = State.UNKNOWN  # `scheduled` for ever, and `retired` or not by a race (torch 2.13, measured)
            elif retired:
                state = State.COMPLETED  # the watchdog has let it go
        self._any_ended = self._any_ended or state in (State.COMPLETED, State.UNKNOWN)
        return state

    def _put(self, group: GroupKey, kind: _Kind, seq: int, state: State, p2p: bool, stack: int) -> None:
        order, self._order = self._order, self._order + 1
        if kind.transfer is not None:
            if state is State.SCHEDULED or state is State.STARTED:
                self._transfers.setdefault(group, []).append(Transfer(group, *kind.transfer, kind.call, state, stack, order))
        elif p2p:
            # A block's parts are never marked, its closing record is (ProcessGroupNCCL::endCoalescing).
            block = self._transfers.pop(group, [])
            if state is State.SCHEDULED or state is State.STARTED:
                self._dump.transfers.extend(block)
        else:
            self._append(group, kind, seq, state, stack, order)

    def _append(self, group: GroupKey, kind: _Kind, seq: int, state: State, stack: int, order: int) -> None:
        timeline = self._dump.timelines.get(group)
        if timeline is not None and seq < timeline.seqs[-1]:
            # The group was destroyed and made again under its name: torch counts names and calls from the start then.
            self._blocks.pop(group, None)
            timeline = None
        if timeline is None:
            timeline = self._dump.timelines[group] = Timeline()
        elif seq == timeline.seqs[-1]:
            # The parts of a coalesced block share a number; if a closing record follows, it alone is ever marked.
            self._blocks.setdefault(group, [timeline.calls[-1]]).append(kind.call)
            timeline.states[-1] = state if kind.op == _COALESCED else min(timeline.states[-1], state)
            timeline.orders[-1] = order
            return
        elif group in self._blocks:
            self._close_block(group)
        timeline.seqs.append(seq)
        timeline.calls.append(kind.call)
        timeline.states.append(state)
        timeline.stacks.append(stack)
        timeline.orders.append(order)

    def _close_block(self, group: GroupKey) -> None:
        parts = self._blocks.pop(group)[:_MAX_TENSORS]
        known = self._vocabulary.calls
        self._dump.timelines[group].calls[-1] = self._vocabulary.call_id(tuple(known[part][0] for part in parts))

    def _kind(self, record: Mapping[str, Any]) -> _Kind:
        name = record.get("profiling_name")
        if not isinstance(name, str) or not name:
            raise UnreadableDump("one of its records does not say which operation it is (`profiling_name`)")
        # From the right: the name of an operation has no colon, that of a user's backend may.
        backend, _, op = name.rpartition(":")
        signature = Signature(
            op,
            self._sizes(record.get("input_sizes")),
            _types(record.get("input_dtypes")),
            self._sizes(record.get("output_sizes")),
            _types(record.get("output_dtypes")),
        )
        match = _TRANSFER.match(op)
        transfer = (match[1] == "send", int(match[2]), None if match[3] == "?" else int(match[3])) if match else None
        return _Kind(backend, self._vocabulary.call_id((signature,)), op, transfer)

    def _group(self, record: Mapping[str, Any]) -> GroupKey:
        pair, number = record.get("process_group"), record.get("pg_id")
        group = GroupKey("?", "")  # schemas before 2.2 (torch 2.3) name no group
        if isinstance(pair, (tuple, list)) and len(pair) == 2 and all(isinstance(part, str) for part in pair):
            group = GroupKey(pair[0], pair[1])
        if isinstance(number, int):
            self._dump.group_numbers.setdefault(group, str(number))
        return group

    def _sizes(self, value: Any) -> tuple[tuple[int, ...], ...]:
        if isinstance(value, tuple):
            return value  # of a raw record, converted already
        shapes = value[:_MAX_TENSORS] if isinstance(value, list) else []
        return tuple(self._shape(shape) for shape in shapes if isinstance(shape, list))

    def _shape(self, shape: list[Any]) -> tuple[int, ...]:
        found = self._shapes.get(id(shape))
        if found is None:
            found = self._shapes[id(shape)] = tuple(size for size in shape[:_MAX_DIMS] if isinstance(size, int))
        return found

    def _stack(self, frames: Any) -> int:
        if not isinstance(frames, list) or not frames:
            return 0
        return self._vocabulary.stack_id(tuple(self._frame(frame) for frame in frames[:_MAX_FRAMES]))

    def _frame(self, frame: Any) -> Frame:
        found = self._frames.get(id(frame))  # torch stores a frame once per file, so its identity is a cheap key
        if found is None:
            values = frame if isinstance(frame, dict) else {}
            file, line, name = values.get("filename"), values.get("line"), values.get("name")
            found = self._frames[id(frame)] = Frame(
                file if isinstance(file, str) else "?",
                line if isinstance(line, int) else 0,
                name if isinstance(name, str) else "?",
            )
        return found


def _seq(record: Mapping[str, Any]) -> int:
    value = record.get("collective_seq_id")
    if not isinstance(value, int) or isinstance(value, bool) or value not in _INT64:
        raise UnreadableDump("one of its records has no whole number as `collective_seq_id`")
    return value


def _types(value: Any) -> tuple[str, ...]:
    return tuple(name for name in value[:_MAX_TENSORS] if isinstance(name, str)) if isinstance(value, list) else ()
