"""Reads a record of a Flight Recorder dump by one regular expression, built from the record before it.

torch writes every record of a file with the same keys in the same order, and strings only once: after the first records a
dump is a repetition of one byte pattern with small holes. Matching that pattern takes a quarter of the time that the
stack machine of `unpickle` needs (benchmarks/flight.py), and a record that does not fit goes through that machine.

The opcodes form a prefix code (the first byte tells the length), so a match has only one reading.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ray_nccl_guard.flight.unpickle import UnreadableDump

# Patterns of the values, over bytes with DOTALL. `h`/`j` recall a stored value by index.
_REF = rb"h.|j.{4}"
_INT = rb"K.|M..|J.{4}|\x8a\x08.{8}"
_INT_LIST = rb"\]\((?:" + _INT + rb"){0,32}e"
_ANY = rb"(?:" + _REF + rb"|" + _INT + rb"|N|[\x88\x89]|G.{8})"
# Repeats are bounded because the matcher keeps some hundred bytes for each: 4,096 tensors are a coalesced call of a large
# model, 32 dimensions more than torch's 25, 512 frames deeper than any stack of a training loop. What exceeds them takes
# the other way.
_SIZES = rb"(\]\((?:" + _INT_LIST + rb"){0,4096}e)"
_TYPES = rb"(\]\((?:" + _REF + rb"){0,4096}e)"

# What a record is read for, in the order of `Raw`. A key that a template lacks is None in it.
WANTED: dict[str, bytes] = {
    "frames": rb"\]\(((?:" + _REF + rb"){0,512})e",
    "record_id": rb"(" + _INT + rb")",
    "pg_id": rb"(" + _INT + rb")",
    "process_group": rb"((?:" + _REF + rb"){2})\x86",
    "collective_seq_id": rb"(" + _INT + rb")",
    "p2p_seq_id": rb"(" + _INT + rb")",
    "profiling_name": rb"(" + _REF + rb")",
    "input_sizes": _SIZES,
    "input_dtypes": _TYPES,
    "output_sizes": _SIZES,
    "output_dtypes": _TYPES,
    "state": rb"(" + _REF + rb")",
    "retired": rb"([\x88\x89])",
    "is_p2p": rb"([\x88\x89])",
}
_ARGUMENT_BYTES = {
    ord("h"): 1, ord("q"): 1, ord("K"): 1, ord("M"): 2, ord("J"): 4, ord("j"): 4, ord("r"): 4, ord("G"): 8, ord("N"): 0,
    0x88: 0, 0x89: 0, 0x86: 0,
}  # fmt: skip
_MAX_TEMPLATES = 4  # a record with `duration_ms` and one without, and as much again
_MAX_ATTEMPTS = 8  # building one costs about as much as reading ten records by the machine


class Raw(tuple[bytes | None, ...]):
    """A record as it stands in the file: the bytes of the i-th key of `WANTED`, references unresolved."""

    __slots__ = ()


@dataclass(slots=True)
class RecordTemplates:
    """The templates of one file, learned as it is read; a `unpickle.Shortcut`."""

    _patterns: list[tuple[re.Pattern[bytes], tuple[int | None, ...]]] = field(default_factory=list)
    _attempts: int = 0
    _previous: int | None = None

    def __call__(self, data: bytes, pos: int, memo: dict[int, Any]) -> tuple[Raw, int] | None:
        for pattern, order in self._patterns:
            match = pattern.match(data, pos)
            if match is not None:
                groups = match.groups()
                self._previous = None
                return Raw(groups if order == _SAME_ORDER else _arrange(groups, order)), match.end()
        if self._previous is not None and self._attempts < _MAX_ATTEMPTS and len(self._patterns) < _MAX_TEMPLATES:
            self._attempts += 1
            learned = _learn(data[self._previous : pos], memo)
            if learned is not None and all(learned[0].pattern != known.pattern for known, _ in self._patterns):
                self._patterns.append(learned)
                self._previous = None
                return self(data, pos, memo)
        self._previous = pos
        return None


_SAME_ORDER = tuple(range(len(WANTED)))


def _arrange(groups: tuple[bytes, ...], order: tuple[int | None, ...]) -> tuple[bytes | None, ...]:
    return tuple(None if index is None else groups[index] for index in order)


def _learn(record: bytes, memo: dict[int, Any]) -> tuple[re.Pattern[bytes], tuple[int | None, ...]] | None:
    """The template of a record whose keys are all recalled, None of any other."""
    if record[:2] != b"}(" or record[-1:] != b"u":
        return None
    pos, end, pattern = 2, len(record) - 1, b"\\}\\("
    seen: dict[str, int] = {}
    while pos < end:
        key_bytes = _reference(record, pos)
        if key_bytes is None:
            return None
        index = int.from_bytes(key_bytes[1:], "little")
        key = memo.get(index)
        behind = _skip(record, pos + len(key_bytes), end)
        if not isinstance(key, str) or behind is None:
            return None
        pattern += re.escape(key_bytes)
        if key in WANTED:
            seen[key] = len(seen)
            pattern += WANTED[key]
        else:
            pattern += _ANY
        pos = behind
    if "profiling_name" not in seen or "collective_seq_id" not in seen:
        return None  # a description of a group stands as deep in the file as a record does
    return re.compile(pattern + b"u", re.DOTALL), tuple(seen.get(key) for key in WANTED)


def _reference(record: bytes, pos: int) -> bytes | None:
    size = {ord("h"): 2, ord("j"): 5}.get(record[pos])
    return None if size is None else record[pos : pos + size]


def _skip(record: bytes, pos: int, end: int) -> int | None:
    """The position behind the value at `pos`: a scalar, a pair of references, or lists of such."""
    if record[pos : pos + 2] == b"](":
        pos += 2
        while pos < end and record[pos] != ord("e"):
            behind = _skip(record, pos, end)
            if behind is None:
                return None
            pos = behind
        return pos + 1
    size = 1 + record[pos + 1] if record[pos] == 0x8A else _ARGUMENT_BYTES.get(record[pos])
    if size is None:
        return None
    pos += 1 + size
    second = _reference(record, pos) if pos < end else None
    if second is not None and record[pos + len(second) : pos + len(second) + 1] == b"\x86":
        return pos + len(second) + 1
    return pos


def index_of(reference: bytes) -> int:
    return int.from_bytes(reference[1:], "little")


def integer_of(part: bytes | None) -> int:
    if part is None:
        raise UnreadableDump("its records have no sequence number (`collective_seq_id`)")
    if part[0] == 0x4A:
        return int.from_bytes(part[1:], "little", signed=True)
    if part[0] == 0x8A:
        return int.from_bytes(part[2:], "little", signed=True)
    return int.from_bytes(part[1:], "little")


def value_of(part: bytes, memo: Mapping[int, Any], key: str) -> Any:
    """The plain value of one piece of a raw record."""
    if key in ("record_id", "pg_id", "collective_seq_id", "p2p_seq_id"):
        return integer_of(part)
    if key in ("retired", "is_p2p"):
        return part == b"\x88"
    if key in ("input_sizes", "output_sizes"):
        return _lists(part)
    references = [memo[index] for index in _references(part)]
    if key in ("frames", "input_dtypes", "output_dtypes", "process_group"):
        return references
    return references[0]


def _references(part: bytes) -> list[int]:
    found, pos = [], 0
    while pos < len(part):
        size = {0x68: 2, 0x6A: 5}.get(part[pos], 0)
        if size:
            found.append(index_of(part[pos : pos + size]))
        pos += size or 1  # the brackets of a list
    return found


def _lists(part: bytes) -> tuple[tuple[int, ...], ...]:
    """`](` lists of numbers `e`, as a template has matched them."""
    lists: list[tuple[int, ...]] = []
    pos, end = 2, len(part) - 1
    while pos < end:
        pos += 2
        numbers: list[int] = []
        while part[pos] != 0x65:
            size = {0x4B: 2, 0x4D: 3, 0x4A: 5}.get(part[pos], 10)
            numbers.append(integer_of(part[pos : pos + size]))
            pos += size
        lists.append(tuple(numbers))
        pos += 1
    return tuple(lists)
