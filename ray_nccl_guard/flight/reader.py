"""Reads one Flight Recorder dump, pickle or JSON, of any torch from 2.4 on, without torch and without trusting it."""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ray_nccl_guard.flight.columns import Columns
from ray_nccl_guard.flight.dump import Dump, GroupKey, Progress, Vocabulary
from ray_nccl_guard.flight.template import Raw, RecordTemplates
from ray_nccl_guard.flight.unpickle import Limits, UnreadableDump, check_containers, loads_plain

__all__ = ["Limits", "UnreadableDump", "read_dump"]

# torch writes major versions 2 only since 2.3: `ranks` of a group as text, `process_group` as a pair.
_KNOWN_MAJOR = 2
_RANK_IN_NAME = re.compile(r"rank[_.-]?([0-9]{1,7})(?![0-9])", re.IGNORECASE)
_NUMBER_AT_END = re.compile(r"(?<![0-9])([0-9]{1,7})$")
_MAX_JSON_DIGITS = 25  # of one number: a 64-bit one has twenty
# More than any job has had (some 100,000 GPUs). A table has a line for every rank up to the largest that is named.
_MAX_RANKS = 1 << 17
_MAX_MEMBERS = 1 << 20  # of all groups of one dump; a rank is in a dozen groups, few of them large


def read_dump(
    source: str | os.PathLike[str] | bytes,
    limits: Limits | None = None,
    *,
    vocabulary: Vocabulary | None = None,
    name: str = "",
) -> Dump:
    """Read one dump.

    Args:
        source: a path, or the bytes that `_dump_fr_trace()` gave.
        limits: what the file may cost; a default for the recorder's own sizes if None.
        vocabulary: shared among dumps that are to be compared.
        name: what to call the source, and where to look for the rank, if `source` is bytes.

    Raises:
        UnreadableDump: one sentence on why the file is not a dump, or not one that can be read.
    """
    limits = limits or Limits()
    data = source if isinstance(source, bytes) else _read_file(Path(source), limits)
    name = name or ("" if isinstance(source, bytes) else os.fspath(source))
    if len(data) > limits.max_bytes:
        raise UnreadableDump(f"it has more than {limits.max_bytes:,} bytes")
    if not data:
        raise UnreadableDump("it is empty")
    memo: dict[int, Any] = {}
    value = _decode(data, limits, memo)
    if not isinstance(value, dict) or not isinstance(value.get("entries"), list):
        raise UnreadableDump("it holds no list of records (`entries`), so it is not a Flight Recorder dump")
    return _build(value, memo, vocabulary or Vocabulary(), name, limits)


def rank_of_name(name: str) -> int | None:
    """The rank that a file name tells: behind the word `rank` anywhere, else the number at the end of its stem."""
    base = os.path.basename(name)
    marked = _RANK_IN_NAME.search(base)
    if marked:
        return _rank(marked[1])
    stem = re.sub(r"\.(json|pickle|pkl|bin|trace|dump|fr)$", "", base, flags=re.IGNORECASE)
    last = _NUMBER_AT_END.search(stem)
    return _rank(last[1]) if last else None


def _read_file(path: Path, limits: Limits) -> bytes:
    try:
        # Not blocking, and asked before any read: a named pipe in the folder would wait for a writer for ever.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise UnreadableDump(f"it cannot be opened: {error.strerror}") from error
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise UnreadableDump("it is not a regular file")
        return file.read(limits.max_bytes + 1)


def _decode(data: bytes, limits: Limits, memo: dict[int, Any]) -> Any:
    if data[:1] == b"\x80":
        return loads_plain(data, limits, RecordTemplates(), memo)
    if data.lstrip()[:1] in (b"{", b"["):
        check_containers(data, (b"{", b"["), limits)
        try:
            return json.loads(data, parse_int=_small_int)
        except RecursionError:
            raise UnreadableDump("its JSON is nested too deep") from None
        except ValueError as error:
            raise UnreadableDump(f"its JSON is damaged: {error}") from None
    raise UnreadableDump("it is neither a pickle (protocol 2 or later) nor JSON, so it is not a Flight Recorder dump")


def _small_int(digits: str) -> int:
    if len(digits) > _MAX_JSON_DIGITS:
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)


def _build(value: dict[str, Any], memo: Mapping[int, Any], vocabulary: Vocabulary, name: str, limits: Limits) -> Dump:
    entries = value["entries"]
    if len(entries) > limits.max_records:
        raise UnreadableDump(f"it holds more than {limits.max_records:,} records")
    version = value.get("version")
    version = version if isinstance(version, str) else ""
    if version and version.partition(".")[0] != str(_KNOWN_MAJOR):
        raise UnreadableDump(f"its schema version {version[:20]!r} is not known; {_KNOWN_MAJOR}.x is")
    memberships, largest = _memberships(value.get("pg_config"), vocabulary)
    library = value.get("comm_lib_version") or value.get("nccl_version") or ""
    dump = Dump(
        source=name,
        version=version,
        library=library if isinstance(library, str) else "",
        host=value["host"] if isinstance(value.get("host"), str) else "",
        memberships=memberships,
        progress=_progress(value.get("pg_status")),
        dropped=_first_record(entries),
        largest_rank=largest,
    )
    columns = Columns(dump, vocabulary, memo)
    try:
        for entry in entries:
            if type(entry) is Raw:
                columns.add_raw(entry)
            else:
                columns.add_plain(entry)
    except KeyError as error:
        raise UnreadableDump(f"a record refers to value {error}, which the file never stored") from None
    columns.finish()
    _place(dump, value, name)
    return dump


def _place(dump: Dump, value: Mapping[str, Any], name: str) -> None:
    """Find the rank: the content knows better than the name, where it tells."""
    told, named, inside = value.get("rank"), rank_of_name(name), _rank_inside(dump)
    if isinstance(told, int) and _rank(told) is not None:
        dump.rank = _rank(told)
        return
    dump.rank = named if inside is None else inside
    if inside is not None and named is not None and inside != named:
        dump.notes = (f"{dump.source}: its name says rank {named}, its groups can only be those of rank {inside}",)


def _rank_inside(dump: Dump) -> int | None:
    """The one rank that is in every group of the file, or that its own point-to-point calls name."""
    members = [set(ranks) for ranks in dump.memberships.values() if ranks]
    common = set.intersection(*members) if len(members) > 1 else set()
    if len(common) == 1:
        return common.pop()
    for transfer in dump.transfers:
        ranks = dump.memberships.get(transfer.group, ())
        if transfer.me < len(ranks):
            return ranks[transfer.me]
    return None


def _memberships(config: Any, vocabulary: Vocabulary) -> tuple[dict[GroupKey, tuple[int, ...]], int]:
    """Groups of `pg_config`, and the largest rank in it.

    gloo's has one entry without a name, overwritten by every new group: that says nothing of groups, but its ranks exist.
    """
    found: dict[GroupKey, tuple[int, ...]] = {}
    members, largest = 0, -1
    for name, group in config.items() if isinstance(config, dict) else ():
        if not isinstance(group, dict):
            continue
        text = group.get("ranks")
        ranks = vocabulary.members.get(text) if isinstance(text, str) else None
        if ranks is None:
            ranks = _ranks(text)
            if isinstance(text, str):
                vocabulary.members[text] = ranks
        members += len(ranks)
        if members > _MAX_MEMBERS:
            raise UnreadableDump(f"its groups have more than {_MAX_MEMBERS:,} members together")
        if not ranks:
            continue
        largest = max(largest, max(ranks))
        if name:
            desc = group.get("desc")
            found[GroupKey(name, desc if isinstance(desc, str) else "")] = ranks
    return found, largest


def _ranks(text: Any) -> tuple[int, ...]:
    """Ranks as torch writes them, `[0, 1]` as text, or a list of numbers."""
    numbers = text if isinstance(text, list) else re.findall(r"[0-9]{1,7}", text) if isinstance(text, str) else []
    ranks = (_rank(number) for number in numbers[:_MAX_RANKS] if isinstance(number, (str, int)))
    return tuple(rank for rank in ranks if rank is not None)


def _rank(number: str | int) -> int | None:
    """A rank that can be, None of any other number or text."""
    if isinstance(number, str):
        if not re.fullmatch(r"[0-9]{1,7}", number):
            return None
        number = int(number)
    return number if 0 <= number < _MAX_RANKS else None


def _progress(status: Any) -> dict[str, Progress]:
    found = {}
    for number, counters in status.items() if isinstance(status, dict) else ():
        if isinstance(counters, dict):
            names = ("last_enqueued_collective", "last_started_collective", "last_completed_collective")
            found[number] = Progress(*(_counter(counters.get(key)) for key in names))
    return found


def _counter(value: Any) -> int:
    """-1 unless it is a number, or the text of one: JSON dumps write counters as text (torch 2.13 and 2.15)."""
    if isinstance(value, str) and re.fullmatch(r"-?[0-9]{1,18}", value):
        return int(value)
    return value if isinstance(value, int) else -1


def _first_record(entries: list[Any]) -> int:
    """How many records the ring had overwritten: records are numbered from 0."""
    first = entries[0] if entries else None
    number = first.get("record_id") if isinstance(first, dict) else None
    return number if isinstance(number, int) and number > 0 else 0
