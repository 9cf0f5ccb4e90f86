"""Who wrote a line: the marks that launchers, torch, Ray, mpirun, Kubernetes and NCCL put in front of it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

# Marks that carry a global rank. `[default3]:` of torchrun is a local rank and is none of them.
_RANKS = (
    re.compile(r"^\s*\[rank[= ]?(?P<rank>\d+)\]"),
    re.compile(r"\[[^\]]{0,60}\b[Rr]ank[ =:]?(?P<rank>\d+)\]"),
    re.compile(r"^\[\d+,(?P<rank>\d+)\]<std(?:out|err|diag)>"),
    re.compile(r"\[TC\]\[rank=(?P<rank>\d+)\]"),
    re.compile(r"^\s*(?:rank|RANK)[ _]?(?P<rank>\d+)\s?[:|]"),
    re.compile(r"\bworld_rank[=:]\s?(?P<rank>\d+)"),
)
# Marks of a process whose rank may be told elsewhere.
_RAY = re.compile(r"\((?P<name>[A-Za-z_][\w.-]*) pid=(?P<pid>\d+)(?:, ip=(?P<ip>[\w.:-]+))?\)")
_NCCL = re.compile(r"(?P<host>[\w.-]+):(?P<pid>\d+):\d+ \[\d+\] ")
_POD = re.compile(r"^\[?(?P<pod>[a-z0-9][\w.-]*-\d+)\]?(?: \||:| \[) ?")
# Ray Train announces `- (node_id=.., ip=.., pid=..) world_rank=3`.
_ANNOUNCED = re.compile(r"ip=(?P<ip>[\w.:-]+), pid=(?P<pid>\d+)\) world_rank=(?P<rank>\d+)")
_JSON_RANK = ("world_rank", "rank", "global_rank")
_JSON_TEXT = ("message", "msg", "log", "text")
_FILE_RANK = re.compile(r"rank[-_=.]?(?P<rank>\d+)(?![0-9A-Za-z])", re.IGNORECASE)
_LAST_NUMBER = re.compile(r"(\d+)(?!.*\d)")
# Numbers above this in such a mark are no rank of a job that exists.
MAX_RANK = 1_000_000


def rank_in(line: str) -> int | None:
    """The global rank a line says it is from, None if it does not."""
    if "ank" not in line and "<std" not in line and "RANK" not in line:
        return None
    for pattern in _RANKS:
        match = pattern.search(line)
        if match:
            rank = int(match["rank"][:9])
            return rank if rank <= MAX_RANK else None
    return None


def process_in(line: str) -> str:
    """A name for the process that wrote the line, the same in all of its lines; empty if the line has no mark."""
    match = _RAY.search(line)
    if match:
        return f"{match['ip'] or ''}/{match['pid']}"
    match = _NCCL.search(line)
    if match:
        return f"{match['host']}:{match['pid']}"
    match = _POD.match(line)
    return match["pod"] if match else ""


def host_in(line: str) -> str:
    """The host (or its address) that the line says it is from, empty if it does not."""
    match = _NCCL.search(line)
    if match:
        return match["host"]
    match = _RAY.search(line)
    return (match["ip"] or "") if match else ""


def announced(line: str) -> Iterator[tuple[str, int]]:
    """Processes whose rank the line tells: Ray Train's list of started workers."""
    for match in _ANNOUNCED.finditer(line):
        yield f"{match['ip']}/{match['pid']}", int(match["rank"][:9])
        # Ray leaves the address out of the prefix for workers on the driver's own node.
        yield f"/{match['pid']}", int(match["rank"][:9])


def unpack(line: str) -> tuple[str, int | None]:
    """The text of a structured (JSON) log line and the rank it carries; any other line as it is."""
    stripped = line.lstrip()
    if not stripped.startswith("{"):
        return line, None
    try:
        record = json.loads(stripped)
    except (ValueError, RecursionError):
        return line, None
    if not isinstance(record, dict):
        return line, None
    text = next((record[key] for key in _JSON_TEXT if isinstance(record.get(key), str)), line)
    for key in ("exc_text", "exc_info", "stack_trace"):
        if isinstance(record.get(key), str):
            text = f"{text} {record[key]}"
    rank = next((record[key] for key in _JSON_RANK if isinstance(record.get(key), int)), None)
    return " ".join(text.splitlines()), rank if rank is not None and 0 <= rank <= MAX_RANK else None


def rank_of_file(name: str, *, trust_name: bool) -> int | None:
    """The rank in a file's name: after the word `rank`, or (if the caller says names are ranks) its last number."""
    match = _FILE_RANK.search(name)
    if match:
        return int(match["rank"][:9])
    match = _LAST_NUMBER.search(name) if trust_name else None
    return int(match[1][:9]) if match else None
