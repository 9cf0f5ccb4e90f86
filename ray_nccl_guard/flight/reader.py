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
_RANK_IN_NAME = re.compile(r"rank[_.-]?(\d{1,7})(?!\d)", re.IGNORECASE)
_NUMBER_AT_END = re.compile(r"(\d{1,7})$")
_MAX_JSON_DIGITS = 25  # of one number: a 64-bit one has twenty


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
        return int(marked[1])
    stem = re.sub(r"\.(json|pickle|pkl|bin|trace|dump|fr)$", "", base, flags=re.IGNORECASE)
    last = _NUMBER_AT_END.search(stem)
    return int(last[1]) if last else None


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
    memberships = _memberships(value.get("pg_config"))
    library = value.get("comm_lib_version") or value.get("nccl_version") or ""
    dump = Dump(
        source=name,
        version=version,
        library=library if isinstance(library, str) else "",
        host=value["host"] if isinstance(value.get("host"), str) else "",
        memberships=memberships,
        progress=_progress(value.get("pg_status")),
        dropped=_first_record(entries),
        largest_rank=_largest_rank(value.get("pg_config")),
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
    if isinstance(told, int) and 0 <= told < 10_000_000:
        dump.rank = told
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


def _memberships(config: Any) -> dict[GroupKey, tuple[int, ...]]:
    """Groups of `pg_config`. gloo's has one entry without a name, overwritten by every new group: not used."""
    found: dict[GroupKey, tuple[int, ...]] = {}
    for name, group in config.items() if isinstance(config, dict) else ():
        if not isinstance(group, dict) or not name:
            continue
        desc = group.get("desc")
        ranks = _ranks(group.get("ranks"))
        if ranks:
            found[GroupKey(name, desc if isinstance(desc, str) else "")] = ranks
    return found


def _largest_rank(config: Any) -> int:
    """The nameless entry of gloo counts here: whichever group it describes, its ranks exist."""
    groups = config.values() if isinstance(config, dict) else ()
    return max((max(_ranks(group.get("ranks")), default=-1) for group in groups if isinstance(group, dict)), default=-1)


def _ranks(text: Any) -> tuple[int, ...]:
    numbers = text if isinstance(text, list) else re.findall(r"\d{1,7}", text) if isinstance(text, str) else []
    return tuple(int(number) for number in numbers if isinstance(number, (str, int)))


def _progress(status: Any) -> dict[str, Progress]:
    found = {}
    for number, counters in status.items() if isinstance(status, dict) else ():
        if isinstance(counters, dict):
            names = ("last_enqueued_collective", "last_started_collective", "last_completed_collective")
            found[number] = Progress(*(_counter(counters.get(key)) for key in names))
    return found


def _counter(value: Any) -> int:
    """-1 unless it is a number, or the text of one: JSON dumps write counters as text (torch 2.13 and 2.15)."""
    if isinstance(value, str) and re.fullmatch(r"-?\d{1,18}", value):
        return int(value)
    return value if isinstance(value, int) else -1


def _first_record(entries: list[Any]) -> int:
    """How many records the ring had overwritten: records are numbered from 0."""
    first = entries[0] if entries else None
    number = first.get("record_id") if isinstance(first, dict) else None
    return number if isinstance(number, int) and number > 0 else 0
