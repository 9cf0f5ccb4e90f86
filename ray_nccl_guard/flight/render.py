"""A verdict over dumps as text: the message, a table per group with the odd cells marked, stacks side by side."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator

from ray_nccl_guard.flight.load import Skipped
from ray_nccl_guard.flight.tables import user_frames
from ray_nccl_guard.flight.verdict import CallStack, FlightVerdict, GroupRow, GroupTable, Kind
from ray_nccl_guard.flight.words import ranks

_WIDTH = 100  # columns, as in every message of the guard
_LABEL = 12
_MAX_ROWS = 16  # lines of one table: ranks in the same place share a line, so this holds sixteen different places
_MAX_FRAMES = 6
_MAX_NOTES = 8
_MAX_CALL = 40  # columns left of a hundred by ranks, numbers and the mark


def text(verdict: FlightVerdict, *, all_groups: bool = False) -> str:
    """The whole message. Groups in which nothing is odd are only counted, unless `all_groups`."""
    level = {Kind.NONE: "ok"}.get(verdict.kind, "error")
    lines = [*wrapped(f"{level}[{verdict.kind.value}]: {verdict.summary}", ""), ""]
    lines += _labelled("culprit", [ranks(verdict.culprit_ranks) if verdict.culprit_ranks else "not named by these dumps"])
    if verdict.kind is Kind.NONE:
        lines.pop()
    lines += _labelled("certainty", [verdict.certainty.value])
    lines += _labelled("because", verdict.because)
    lines += _labelled("against", verdict.against)
    read = verdict.ranks - len(verdict.missing_dumps)
    missing = f"; no dump from {ranks(verdict.missing_dumps)}" if verdict.missing_dumps else ""
    lines += _labelled("dumps", [f"{read} of {verdict.ranks} ranks{missing}", *verdict.versions])
    lines += _labelled("left open", verdict.cannot_say)
    lines += _groups(verdict.groups, all_groups=all_groups)
    lines += _stacks(verdict.stacks)
    lines += _notes(verdict.skipped)
    if verdict.next:
        lines += wrapped(verdict.next, "help: ")
    return "\n".join(lines) + "\n"


def clean(words: str) -> str:
    """Printable ASCII: group names and file names come from the dumps, and a terminal obeys what it is shown."""
    return "".join(char if " " <= char <= "~" else "?" for char in words)


def wrapped(words: str, label: str) -> list[str]:
    """A sentence in lines of a hundred columns, the first behind `label`."""
    return textwrap.wrap(
        clean(words), _WIDTH, initial_indent=label, subsequent_indent=" " * (len(label) or 2), break_on_hyphens=False
    )


def _labelled(label: str, sentences: Iterable[str]) -> list[str]:
    lines: list[str] = []
    for sentence in sentences:
        lines += wrapped(sentence, f"  {label:<{_LABEL}}")
        label = ""
    return lines


def _notes(skipped: tuple[Skipped, ...]) -> list[str]:
    unused = [file for file in skipped if not file.repeats]
    lines = [
        line for file in unused[:_MAX_NOTES] for line in wrapped(f"{file.source} was not used: {file.reason}", "note: ")
    ]
    if len(unused) > _MAX_NOTES:
        lines.append(f"note: {len(unused) - _MAX_NOTES} more files were not used (--json lists them)")
    if len(skipped) > len(unused):
        lines.append(f"note: {len(skipped) - len(unused)} files repeat a rank that was read already (--json lists them)")
    return lines


def _groups(groups: tuple[GroupTable, ...], *, all_groups: bool) -> list[str]:
    shown = [group for group in groups if all_groups or any(row.odd or not row.has_dump for row in group.rows)]
    lines: list[str] = []
    for group in shown:
        lines += ["", *_table(group)]
    if len(shown) < len(groups):
        lines += ["", f"  nothing odd in {len(groups) - len(shown)} more of {len(groups)} groups (--all-groups shows them)"]
    return [*lines, ""]


def _table(group: GroupTable) -> Iterator[str]:
    desc = f" ({clean(group.desc)})" if group.desc not in ("", "undefined") else ""
    members = f"{len(group.rows)} ranks" if group.members_known else f"{len(group.rows)} ranks seen, membership not recorded"
    yield f"  group {clean(group.name)}{desc}, {members}"
    yield f"    {'ranks':<24} {'completed':>10} {'requested':>10}   call"
    places: dict[tuple[bool, int | None, int | None, int | None, str, bool], list[int]] = {}
    for row in group.rows:
        place = (row.has_dump, row.last_completed, row.last_requested, row.next_seq, _call(row), row.odd)
        places.setdefault(place, []).append(row.rank)
    for (has_dump, completed, requested, _, call, odd), sharing in list(places.items())[:_MAX_ROWS]:
        mark = "   <--" if odd else ""
        if not has_dump:
            yield f"    {_fit(ranks(sharing)):<24} {'?':>10} {'?':>10}   no dump"
            continue
        yield f"    {_fit(ranks(sharing)):<24} {number(completed):>10} {number(requested):>10}   {call}{mark}".rstrip()
    if len(places) > _MAX_ROWS:
        yield f"    and {len(places) - _MAX_ROWS} more places (--json has every rank)"


def _call(row: GroupRow) -> str:
    if not row.call:
        return "no call on record"
    words = clean(row.call if row.state == "unknown" else f"{row.call}, {row.state}")
    return words if len(words) <= _MAX_CALL else words[: _MAX_CALL - 3] + "..."


def number(value: object) -> str:
    """A sequence number, `-` for one that is not known."""
    return "-" if value is None else str(value)


def _fit(words: str) -> str:
    words = words.removeprefix("ranks ").removeprefix("rank ")
    return words if len(words) <= 24 else words[:21] + "..."


def _stacks(stacks: tuple[CallStack, ...]) -> list[str]:
    lines: list[str] = []
    for stack in stacks:
        role = "the culprit's call" if stack.culprit else "where the others are"
        lines += wrapped(f"{role}: {ranks(stack.ranks)}, {stack.op}, call {stack.seq} of group {stack.group}", "  ")
        for frame in user_frames(stack.frames)[:_MAX_FRAMES]:
            lines.append(f"    {clean(frame.file)}:{frame.line} in {clean(frame.name)}")
    return [*lines, ""] if lines else []
