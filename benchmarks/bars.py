"""Draws a benchmark's rows as bars, one panel for each table and unit; without matplotlib it says so and goes on."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]


def pyplot_for(path: Path) -> Any:
    """matplotlib's pyplot for drawing into files; None, and a note about `path`, where it is not installed."""
    try:
        import matplotlib
    except ImportError:
        print(f"note: {path} was not drawn: matplotlib is not installed", file=sys.stderr)
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def draw(path: Path, top: Mapping[str, Any], rows: Sequence[Row], value: str = "median") -> None:
    """A panel of bars for each table and unit; a logarithmic axis where the longest bar would hide the others."""
    pyplot = pyplot_for(path)
    if pyplot is None:
        return
    panels: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if isinstance(row.get(value), (int, float)):
            panels.setdefault((row.get("table", ""), row.get("unit", "")), []).append(row)
    if not panels:
        print(f"note: {path} was not drawn: no row has a {value}", file=sys.stderr)
        return
    counts = [len(part) for part in panels.values()]
    figure, grid = pyplot.subplots(
        len(panels), squeeze=False, figsize=(9, 0.32 * sum(counts) + 0.9 * len(panels) + 0.6),
        height_ratios=[count + 1 for count in counts], layout="constrained",
    )  # fmt: skip
    for axes, ((title, unit), part) in zip(grid[:, 0], panels.items(), strict=True):
        bars = [float(row[value]) for row in part]
        labels = [" ".join(str(v) for k, v in row.items() if k in ("case", "ranks") or k == _first(part)) for row in part]
        axes.barh(range(len(part)), bars, xerr=[row.get("spread", 0) / 2 for row in part])
        axes.set_yticks(range(len(part)), labels, fontsize=7)
        axes.margins(y=0.02)
        axes.invert_yaxis()
        if max(bars) > 50 * min(bars) > 0:
            axes.set_xscale("log")
        axes.set_title(title, fontsize=8)
        axes.set_xlabel(unit or value, fontsize=8)
    figure.suptitle(f"{top['what']}\n{top['machine']}, {top['date']}", fontsize=9)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _first(rows: Sequence[Row]) -> str:
    """The column that tells the rows apart: the first that is not `table`."""
    return next(key for key in rows[0] if key != "table")
