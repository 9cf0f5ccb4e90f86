"""One way to measure for all benchmarks: alternation, medians with their spread, the machine in the head, and no ratio from noise.

rounds = alternate({"guard": run_guard, "peer": run_peer}, rounds=7)
rows = [{"case": name, **summary(values)} for name, values in rounds.items()]
show(arguments, head("what this measures"), rows)
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("torch", "ray", "nvidia-nccl-cu13", "nvidia-nccl-cu12", "ray-nccl-guard")
Row = Mapping[str, Any]


def arguments(description: str | None) -> argparse.ArgumentParser:
    """A parser with what every benchmark takes."""
    parser = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a Markdown table")
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write the Markdown there")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="also draw the medians there (needs matplotlib)")
    return parser


def alternate(cases: Mapping[str, Callable[[], float]], *, rounds: int, warm_up: int = 1) -> dict[str, list[float]]:
    """Run the cases in turn, A B A B: what the machine does meanwhile then falls on all of them. Returns each one's values."""
    taken: dict[str, list[float]] = {name: [] for name in cases}
    for number in range(warm_up + rounds):
        for name, run in cases.items():
            value = run()
            if number >= warm_up:
                taken[name].append(value)
    return taken


def summary(values: Sequence[float]) -> dict[str, float]:
    """Median, and as its spread the width of the middle half: single outliers of a shared machine do not move either."""
    if len(values) < 2:
        return {"median": values[0], "spread": 0.0, "n": 1}
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": statistics.median(values), "spread": high - low, "n": len(values)}


def ratio(one: Sequence[float], other: Sequence[float]) -> float | None:
    """How many times the median of `other` that of `one` is; None if their difference does not stand out from the noise."""
    first, second = summary(one), summary(other)
    difference = abs(first["median"] - second["median"])
    if max(first["spread"], second["spread"]) >= difference or not second["median"]:
        return None
    return first["median"] / second["median"]


def head(what: str) -> dict[str, Any]:
    """Where, when and with what it was measured. The load average says whether the machine was quiet."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, timeout=10, check=False
    ).stdout.strip()
    return {
        "what": what,
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "machine": f"{platform.machine()}, {_processor()}, {len(os.sched_getaffinity(0))} cores, {_memory_gib():.0f} GiB",
        "load": round(os.getloadavg()[0], 1),
        "versions": {"python": platform.python_version(), **_versions()},
        "commit": commit,
        "command": "python " + shlex.join(_relative(word) for word in sys.argv),
    }


def _relative(word: str) -> str:
    path = Path(word)
    return str(path.resolve().relative_to(ROOT)) if path.exists() and path.resolve().is_relative_to(ROOT) else word


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or "unknown CPU"


def _memory_gib() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def markdown(top: Mapping[str, Any], rows: Sequence[Row], notes: Sequence[str] = ()) -> str:
    """The head, one table of all rows (the union of their keys, in order of appearance), and notes."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    versions = ", ".join(f"{name} {version}" for name, version in top["versions"].items())
    lines = [
        f"# {top['what']}",
        "",
        f"{top['date']}, {top['machine']}, load {top['load']} at the start; {versions}; commit {top['commit']}.",
        "",
        f"    {top['command']}",
        "",
        "| " + " | ".join(columns) + " |",
        "|" + " --- |" * len(columns),
        *("| " + " | ".join(_cell(row.get(column)) for column in columns) + " |" for row in rows),
    ]
    return "\n".join([*lines, *(["", *notes] if notes else [])]) + "\n"


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def show(given: argparse.Namespace, top: Mapping[str, Any], rows: Sequence[Row], notes: Sequence[str] = ()) -> None:
    """Print the result as the arguments ask, and write and draw it where they say."""
    text = markdown(top, rows, notes)
    print(json.dumps({"head": dict(top), "rows": [dict(row) for row in rows], "notes": list(notes)}) if given.json else text)
    if given.out:
        given.out.write_text(text, encoding="utf-8")
    if given.plot:
        _plot(given.plot, top, rows)


def _plot(path: Path, top: Mapping[str, Any], rows: Sequence[Row]) -> None:
    try:
        import matplotlib
    except ImportError:
        print(f"note: {path} was not drawn: matplotlib is not installed", file=sys.stderr)
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    labels = [str(next(iter(row.values()))) for row in rows]
    figure, axes = pyplot.subplots(figsize=(8, 0.4 * len(rows) + 1.5), layout="constrained")
    axes.barh(labels, [row["median"] for row in rows], xerr=[row.get("spread", 0) / 2 for row in rows])
    axes.invert_yaxis()
    axes.set_title(f"{top['what']}\n{top['machine']}, {top['date']}", fontsize=9)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
