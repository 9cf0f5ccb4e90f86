"""A verdict over dumps as a fragment of HTML: the tables with odd cells marked, for the page of a run's report."""

from __future__ import annotations

from html import escape

from ray_nccl_guard.flight.tables import user_frames
from ray_nccl_guard.flight.verdict import FlightVerdict, GroupRow, GroupTable

_MAX_ROWS = 2048  # rows of one table: a page with more does not scroll well, and the JSON has them all


def fragment(verdict: FlightVerdict, sheet: str = "") -> str:
    """A `<section>` with the classes `flight`, `odd` and `missing` to style; nothing in it comes from outside unescaped."""
    parts = [
        f'<section class="flight"><h2>Flight Recorder: {escape(verdict.kind.value)}, {escape(verdict.certainty.value)}</h2>',
        f"<p>{escape(verdict.summary)}</p>",
        *(_list(title, items) for title, items in _lists(verdict) if items),
        *(_table(group) for group in verdict.groups if any(row.odd or not row.has_dump for row in group.rows)),
    ]
    for stack in verdict.stacks:
        who = ", ".join(map(str, stack.ranks))
        frames = "\n".join(f"{frame.file}:{frame.line} in {frame.name}" for frame in user_frames(stack.frames))
        side = "culprit" if stack.culprit else "others"
        parts.append(f"<h3>{side}: ranks {who}, {escape(stack.op)}, call {stack.seq}</h3><pre>{escape(frames)}</pre>")
    if sheet:
        parts.append(f"<details><summary>Record sheet</summary><pre>{escape(sheet)}</pre></details>")
    return "\n".join([*parts, "</section>"])


def _lists(verdict: FlightVerdict) -> tuple[tuple[str, tuple[str, ...]], ...]:
    return ("because", verdict.because), ("against", verdict.against), ("left open", verdict.cannot_say)


def _list(title: str, items: tuple[str, ...]) -> str:
    return f"<h3>{title}</h3><ul>{''.join(f'<li>{escape(item)}</li>' for item in items)}</ul>"


def _table(group: GroupTable) -> str:
    rows = "".join(_row(row) for row in group.rows[:_MAX_ROWS])
    left = len(group.rows) - _MAX_ROWS
    more = f'<tr><td colspan="4">and {left} more ranks</td></tr>' if left > 0 else ""
    head = "<tr><th>rank</th><th>completed</th><th>requested</th><th>call</th></tr>"
    return f"<table><caption>{escape(group.name)} {escape(group.desc)}</caption>{head}{rows}{more}</table>"


def _row(row: GroupRow) -> str:
    if not row.has_dump:
        return f'<tr class="missing"><td>{row.rank}</td><td>?</td><td>?</td><td>no dump</td></tr>'
    mark = ' class="odd"' if row.odd else ""
    cells = (row.rank, _number(row.last_completed), _number(row.last_requested), f"{row.next_op} {row.state}")
    return f"<tr{mark}>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in cells) + "</tr>"


def _number(value: int | None) -> str:
    return "-" if value is None else str(value)
