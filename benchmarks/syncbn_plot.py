"""Draws the result of `syncbn.py`: what each step is made of, and the bandwidth of single collectives by size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import bars
from benchmarks.bars import Row
from benchmarks.syncbn_report import PARTS

COLOURS = {"compute": "#4c78a8", "gradients": "#f2a541", "statistics": "#d1495b"}


def draw(path: Path, top: Mapping[str, Any], rows: Sequence[Row], value: str = "median") -> None:
    """One panel for each table of rows."""
    pyplot = bars.pyplot_for(path)
    if pyplot is None:
        return
    tables: dict[str, list[Row]] = {}
    for row in rows:
        tables.setdefault(row["table"], []).append(row)
    heights = [1 + 0.28 * len(part) if "arm" in part[0] else 3.2 for part in tables.values()]
    figure, grid = pyplot.subplots(
        len(tables), squeeze=False, figsize=(9, sum(heights) + 0.8), height_ratios=heights, layout="constrained"
    )
    for axes, (title, part) in zip(grid[:, 0], tables.items(), strict=True):
        axes.set_title(title, fontsize=8)
        (_steps if "arm" in part[0] else _collectives)(axes, part, value)
        axes.tick_params(labelsize=7)
        axes.legend(fontsize=7)
    figure.suptitle(f"{top['what']}\n{top['machine']}, {top['date']}", fontsize=9)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _steps(axes: Any, rows: Sequence[Row], value: str) -> None:
    left = [0.0] * len(rows)
    for part in PARTS:
        lengths = [row[part] for row in rows]
        axes.barh(range(len(rows)), lengths, left=left, label=part, color=COLOURS[part])
        left = [begin + length for begin, length in zip(left, lengths, strict=True)]
    axes.errorbar(
        [row[value] for row in rows], range(len(rows)), xerr=[row["spread"] / 2 for row in rows], fmt="k|", label="step"
    )
    axes.set_yticks(range(len(rows)), [f"{row['arm']}, batch {row['batch']}" for row in rows])
    axes.invert_yaxis()
    axes.set_xlabel("ms", fontsize=8)


def _collectives(axes: Any, rows: Sequence[Row], value: str) -> None:
    columns = [key for key in rows[0] if key.endswith(" ms")]
    for operation in dict.fromkeys(row["operation"] for row in rows):
        alike = [row for row in rows if row["operation"] == operation]
        for column in columns:
            label = f"{operation}, {column.removesuffix(' ms')}"
            axes.plot([row["bytes"] for row in alike], [row[column] for row in alike], "o-", markersize=3, label=label)
    axes.set_xscale("log", base=2)
    sizes = list(dict.fromkeys(row["bytes"] for row in rows))[::2]
    axes.set_xticks(sizes, [_named(size) for size in sizes])
    axes.set_yscale("log")
    axes.set_xlabel("result on each rank", fontsize=8)
    axes.set_ylabel("ms", fontsize=8)


def _named(size: int) -> str:
    power = (size.bit_length() - 1) // 10
    return f"{size >> 10 * power} {('B', 'KiB', 'MiB', 'GiB')[power]}"
