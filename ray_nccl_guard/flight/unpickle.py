"""A reader of pickles that can build nothing but dicts, lists, pairs, strings and numbers: no code, no classes.

Flight Recorder dumps are pickles, and a dump folder is written by whoever can write there (DESIGN D11). The standard
unpickler calls what the file names; a subclass that refuses that can still be made to allocate gigabytes by a ten-byte
file (an index of LONG_BINPUT, a length of BINBYTES8), to recurse through the C stack by a tuple as a dict key, or to
compare colliding numbers for minutes. So this is a stack machine of its own, over the opcodes that torch's C++ pickler
and `pickle.dumps` write for plain values. Each of those costs memory in proportion to the file, whose size is limited.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ray_nccl_guard.errors import GuardError

MIB = 1 << 20


class UnreadableDump(GuardError):
    """A file that is no Flight Recorder dump, or is damaged, hostile or too large: the text says which."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a dump may cost.

    Attributes:
        max_bytes: size of the file. torch 2.15 writes 176 bytes a gloo record with four frames of stack (measured), so
            this holds 190,000 records where the recorder keeps 2,000 unless told otherwise.
        max_containers: dicts, lists and tuples in one file. A record has eight and shares its frames.
        max_depth: nesting. A record's sizes are the deepest value, at five.
        max_string_bytes: one string.
        max_records: records in one file.
        max_files: files in one call of `load`.
    """

    max_bytes: int = 32 * MIB
    max_containers: int = 2_000_000
    max_depth: int = 32
    max_string_bytes: int = MIB
    max_records: int = 1_000_000
    max_files: int = 65_536

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            if getattr(self, name) < 1:
                raise ValueError(f"Limits.{name} must be at least 1, not {getattr(self, name)!r}")


# (data, position of a dict that is about to be built inside the list of records, memo) -> (value, position behind it), or
# None where the shortcut does not apply. See `template`.
Shortcut = Callable[[bytes, int, dict[int, Any]], "tuple[Any, int] | None"]

_RECORDS_DEPTH = 2  # open marks inside `{"entries": [...]}`: one of the outer dict, one of the list

_REFUSED = {
    ord(op): name
    for op, name in {
        "c": "GLOBAL", "\x93": "STACK_GLOBAL", "R": "REDUCE", "b": "BUILD", "i": "INST", "o": "OBJ", "\x81": "NEWOBJ",
        "\x92": "NEWOBJ_EX", "P": "PERSID", "Q": "BINPERSID", "\x82": "EXT1", "\x83": "EXT2", "\x84": "EXT4",
    }.items()
}  # fmt: skip
_CONTAINER_OPCODES = (b"]", b"}", b")", b"t", b"\x85", b"\x86", b"\x87")
_FLOAT = struct.Struct(">d")


def loads_plain(data: bytes, limits: Limits, shortcut: Shortcut | None = None, memo: dict[int, Any] | None = None) -> Any:
    """Build the plain value that `data` holds.

    Raises:
        UnreadableDump: anything else than plain values, a limit passed, or a damaged stream.
    """
    check_containers(data, _CONTAINER_OPCODES, limits)
    try:
        return _run(data, limits, shortcut, {} if memo is None else memo)
    except IndexError:
        raise UnreadableDump("it ends in the middle of a value, or its pickle is damaged") from None
    except KeyError as error:
        raise UnreadableDump(f"its pickle refers to value {error}, which it never stored") from None


def check_containers(data: bytes, marks: tuple[bytes, ...], limits: Limits) -> None:
    """Refuse a file that could build more containers than `limits` allow, where each begins with one of `marks`."""
    # A byte may as well be part of a string or a number: this counts too many, never too few, at the speed of memchr.
    if sum(data.count(mark) for mark in marks) > limits.max_containers:
        raise UnreadableDump(f"it may hold more than {limits.max_containers:,} containers, which no Flight Recorder writes")


def _run(data: bytes, limits: Limits, shortcut: Shortcut | None, memo: dict[int, Any]) -> Any:
    """The machine itself. One long loop: a call for each opcode would double the time that the first records of each of a
    thousand files take."""
    stack: list[Any] = []
    marks: list[list[Any]] = []
    pos, end, max_depth = 0, len(data), limits.max_depth
    while True:
        op = data[pos]
        if op == 0x68:  # h BINGET
            stack.append(memo[data[pos + 1]])
            pos += 2
        elif op == 0x4B:  # K BININT1
            stack.append(data[pos + 1])
            pos += 2
        elif op == 0x28:  # ( MARK
            marks.append(stack)
            if len(marks) > max_depth:
                raise UnreadableDump(f"its values are nested deeper than {max_depth}")
            stack = []
            pos += 1
        elif op == 0x7D:  # } EMPTY_DICT
            if shortcut is not None and len(marks) == _RECORDS_DEPTH:
                found = shortcut(data, pos, memo)
                if found is not None:
                    stack.append(found[0])
                    pos = found[1]
                    continue
            stack.append({})
            pos += 1
        elif op == 0x5D:  # ] EMPTY_LIST
            stack.append([])
            pos += 1
        elif op == 0x65:  # e APPENDS
            items = stack
            stack = marks.pop()
            if type(stack[-1]) is not list:
                raise UnreadableDump("its pickle appends to something that is not a list")
            stack[-1] += items
            pos += 1
        elif op == 0x75:  # u SETITEMS
            items = stack
            stack = marks.pop()
            _set_items(stack[-1], items)
            pos += 1
        elif op == 0x58:  # X BINUNICODE
            pos = _push_string(data, pos + 5, int.from_bytes(data[pos + 1 : pos + 5], "little"), stack, limits)
        elif op == 0x71:  # q BINPUT
            _remember(memo, data[pos + 1], stack[-1])
            pos += 2
        elif op == 0x4E:  # N NONE
            stack.append(None)
            pos += 1
        elif op == 0x4A:  # J BININT
            stack.append(int.from_bytes(data[pos + 1 : pos + 5], "little", signed=True))
            pos += 5
        elif op == 0x4D:  # M BININT2
            stack.append(data[pos + 1] | data[pos + 2] << 8)
            pos += 3
        elif op == 0x8A:  # LONG1; c10's integers have 64 bits, so a ninth byte is a sign at most
            size = data[pos + 1]
            if size > 9:
                raise UnreadableDump(f"it holds a whole number of {size} bytes; a dump's have eight")
            pos += 2 + size
            stack.append(int.from_bytes(data[pos - size : pos], "little", signed=True))
        elif op == 0x86:  # TUPLE2
            second = stack.pop()
            stack[-1] = (_leaf(stack[-1]), _leaf(second))
            pos += 1
        elif op == 0x88 or op == 0x89:  # NEWTRUE NEWFALSE
            stack.append(op == 0x88)
            pos += 1
        elif op == 0x6A:  # j LONG_BINGET
            stack.append(memo[int.from_bytes(data[pos + 1 : pos + 5], "little")])
            pos += 5
        elif op == 0x72:  # r LONG_BINPUT
            _remember(memo, int.from_bytes(data[pos + 1 : pos + 5], "little"), stack[-1])
            pos += 5
        elif op == 0x47:  # G BINFLOAT
            if pos + 9 > end:
                raise IndexError
            stack.append(_FLOAT.unpack_from(data, pos + 1)[0])
            pos += 9
        elif op == 0x61:  # a APPEND
            value = stack.pop()
            if type(stack[-1]) is not list:
                raise UnreadableDump("its pickle appends to something that is not a list")
            stack[-1].append(value)
            pos += 1
        elif op == 0x73:  # s SETITEM
            items = [stack.pop(-2), stack.pop()]
            _set_items(stack[-1], items)
            pos += 1
        elif op == 0x94:  # MEMOIZE
            _remember(memo, len(memo), stack[-1])
            pos += 1
        elif op == 0x8C:  # SHORT_BINUNICODE
            pos = _push_string(data, pos + 2, data[pos + 1], stack, limits)
        elif op == 0x80:  # PROTO
            if data[pos + 1] > 5:
                raise UnreadableDump(f"its pickle protocol {data[pos + 1]} is not known")
            pos += 2
        elif op == 0x95:  # FRAME: only a hint for readers that buffer
            pos += 9
        elif op == 0x2E:  # . STOP
            if len(stack) != 1 or marks:
                raise UnreadableDump("its pickle ends with values left over")
            return stack.pop()
        else:
            raise UnreadableDump(_why_refused(op, pos))


def _remember(memo: dict[int, Any], index: int, value: Any) -> None:
    # No writer uses an index twice. The shortcut compares references instead of values, which only holds if none moves.
    if index in memo:
        raise UnreadableDump(f"its pickle stores two values under index {index}")
    memo[index] = value


def _set_items(target: Any, items: list[Any]) -> None:
    keys = items[::2]
    if type(target) is not dict or len(items) % 2:
        raise UnreadableDump("its pickle sets keys of something that is not a dict")
    if any(type(key) is not str for key in keys):
        raise UnreadableDump("it holds a dict whose keys are not strings")
    target.update(zip(keys, items[1::2], strict=True))


def _leaf(value: Any) -> Any:
    if isinstance(value, tuple):
        raise UnreadableDump("it nests tuples, which no Flight Recorder writes")
    return value


def _push_string(data: bytes, start: int, size: int, stack: list[Any], limits: Limits) -> int:
    if size > limits.max_string_bytes:
        raise UnreadableDump(f"it holds a string of {size:,} bytes; the limit is {limits.max_string_bytes:,}")
    if start + size > len(data):
        raise IndexError
    # User code chooses group names and file names: a stray byte in one must not cost the whole dump.
    stack.append(data[start : start + size].decode("utf-8", "backslashreplace"))
    return start + size


def _why_refused(op: int, pos: int) -> str:
    name = _REFUSED.get(op)
    if name:
        return f"its pickle asks to run code ({name} at byte {pos}); a Flight Recorder dump never does"
    return f"byte {pos} (0x{op:02x}) is not part of a Flight Recorder dump"
