"""One way to measure for all benchmarks: alternation, medians with their spread, the machine in the head, and no ratio from noise.

rounds = alternate({"guard": run_guard, "peer": run_peer}, rounds=7)
rows = [{"case": name, **summary(values)} for name, values in rounds.items()]
show(arguments, head("what this measures"), rows, notes, found=["the guard is ..."])

A row may say which `table` it belongs to and its `unit`; `found` are the sentences that benchmarks/README.md repeats.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.metadata
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TypeVar

from benchmarks import bars
from benchmarks.bars import Row

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("torch", "ray", "nvidia-nccl-cu13", "nvidia-nccl-cu12", "ray-nccl-guard")
NOT_A_MEASUREMENT = "NOT A MEASUREMENT (fake GPUs)"
T = TypeVar("T")
_BEGAN_S = time.monotonic()


def arguments(description: str | None) -> argparse.ArgumentParser:
    """A parser with what every benchmark takes."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a Markdown table")
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write the Markdown there")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="also draw the medians there (needs matplotlib)")
    return parser


def progress(text: str) -> None:
    """A line on stderr for whoever waits: seconds since this process began, and what has been measured."""
    print(f"{time.monotonic() - _BEGAN_S:6.0f} s  {text}", file=sys.stderr, flush=True)


def alternate(cases: Mapping[str, Callable[[], T]], *, rounds: int, warm_up: int = 1) -> dict[str, list[T]]:
    """Run the cases in turn, A B A B: what the machine does meanwhile then falls on all of them. Returns each one's values."""
    taken: dict[str, list[T]] = {name: [] for name in cases}
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
    """How many times the median of `other` that of `one` is; None if their difference does not stand out from the noise,
    of which one value each says nothing."""
    if len(one) < 2 or len(other) < 2:
        return None
    first, second = summary(one), summary(other)
    difference = abs(first["median"] - second["median"])
    if max(first["spread"], second["spread"]) >= difference or not second["median"]:
        return None
    return first["median"] / second["median"]


def times(ratio: float | None) -> str:
    """The words for a ratio that may have been refused."""
    return "not told from the noise" if ratio is None else f"{ratio:.3g} x"


@dataclass(frozen=True, slots=True, kw_only=True)
class Used:
    """What a process of its own took, start of the interpreter included; `peak_mib` is its own resident peak (VmHWM, which
    unlike ru_maxrss does not begin at its parent's). `code` is its exit code, None if it was ended at the deadline."""

    wall_s: float
    cpu_s: float
    peak_mib: float
    output: str
    code: int | None


# Runs argv[2] as a program with the arguments behind it, and leaves its peak in the file argv[1] however it exits.
_MEASURED = """
import atexit, sys
def leave(path=sys.argv[1]):
    peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
    open(path, "w").write(peak.split()[1])
atexit.register(leave)
code, sys.argv[:] = sys.argv[2], ["-c", *sys.argv[3:]]
exec(compile(code, "<measured>", "exec"), {"__name__": "__main__"})
"""


def measured(code: str, *arguments: str, deadline_s: float = 600.0) -> Used:
    """Run `python -c code arguments` from the repository's root and say what it took."""
    with tempfile.NamedTemporaryFile("r") as peak, tempfile.TemporaryFile("w+") as output:
        command = [sys.executable, "-c", _MEASURED, peak.name, code, *arguments]
        started_s = time.monotonic()
        child = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, cwd=ROOT)
        ended = threading.Event()
        limit = threading.Timer(deadline_s, lambda: (ended.set(), child.kill()))
        limit.start()
        try:
            _, status, usage = os.wait4(child.pid, 0)
            child.returncode = os.waitstatus_to_exitcode(status)
        finally:
            limit.cancel()
        output.seek(0)
        return Used(
            wall_s=time.monotonic() - started_s,
            cpu_s=usage.ru_utime + usage.ru_stime,
            peak_mib=int(peak.read() or 0) / 1024,
            output=output.read(),
            code=None if ended.is_set() else child.returncode,
        )


def head(what: str) -> dict[str, Any]:
    """Where, when and with what it was measured. The load average says whether the machine was quiet."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, timeout=10, check=False
    ).stdout.strip()
    fake = fake_gpus()
    return {
        "what": f"{NOT_A_MEASUREMENT}: {what}" if fake else what,
        "measurement": not fake,
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "machine": f"{platform.machine()}, {_processor()}, {len(os.sched_getaffinity(0))} cores, {_memory_gib():.0f} GiB",
        "load": round(os.getloadavg()[0], 1),
        "versions": {"python": platform.python_version(), **_versions()},
        "commit": commit,
        "command": "python " + shlex.join(_relative(word) for word in _measuring(sys.argv)),
    }


def _measuring(words: Sequence[str]) -> list[str]:
    """The command without what only says where its result goes."""
    kept: list[str] = []
    before = ""
    for word in words:
        if word not in ("--json", "--out", "--plot") and before not in ("--out", "--plot"):
            kept.append(word)
        before = word
    return kept


def fake_gpus() -> bool:
    """Whether the CUDA of this process is the test suite's double: it has a function that no driver has."""
    try:
        return hasattr(ctypes.CDLL("libcuda.so.1"), "fakegpu_set_faults")
    except OSError:  # no driver at all
        return False


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


def markdown(top: Mapping[str, Any], rows: Sequence[Row], notes: Sequence[str] = (), found: Sequence[str] = ()) -> str:
    """The head, what was found, a table for each `table` that rows name, and notes."""
    versions = ", ".join(f"{name} {version}" for name, version in top["versions"].items())
    lines = [
        f"# {top['what']}",
        "",
        f"{top['date']}, {top['machine']}, load {top['load']} at the start; {versions}; commit {top['commit']}.",
        "",
        f"    {top['command']}",
    ]
    if found:
        lines += ["", *(f"- {sentence}" for sentence in found)]
    for title in dict.fromkeys(row.get("table", "") for row in rows):
        lines += ["", *([f"## {title}", ""] if title else [])]
        lines += _table([{k: v for k, v in row.items() if k != "table"} for row in rows if row.get("table", "") == title])
    return "\n".join([*lines, *(["", *notes] if notes else [])]) + "\n"


def _table(rows: Sequence[Row]) -> list[str]:
    """One Markdown table with the union of the rows' keys, in order of appearance."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    return [
        "| " + " | ".join(columns) + " |",
        "|" + " --- |" * len(columns),
        *("| " + " | ".join(_cell(row.get(column)) for column in columns) + " |" for row in rows),
    ]


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return (f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}") if isinstance(value, float) else str(value)


def show(
    given: argparse.Namespace,
    top: Mapping[str, Any],
    rows: Sequence[Row],
    notes: Sequence[str] = (),
    *,
    found: Sequence[str] = (),
    value: str = "median",
    draw: Callable[[Path, Mapping[str, Any], Sequence[Row], str], None] = bars.draw,
) -> None:
    """Print the result as the arguments ask, and write and draw it where they say; bars are as long as the column `value`.

    `draw` is for a benchmark whose result is not a bar for each row.
    """
    text = markdown(top, rows, notes, found)
    whole = {"head": dict(top), "found": list(found), "rows": [dict(row) for row in rows], "notes": list(notes)}
    print(json.dumps(whole) if given.json else text)
    if given.out:
        given.out.write_text(text, encoding="utf-8")
    if given.plot:
        draw(given.plot, top, rows, value)
