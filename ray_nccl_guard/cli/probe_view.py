"""What `probe` shows: progress while it runs, each rank's steps, and the tables of a sweep and of compared backends."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence

from ray_nccl_guard.classes import FailureClass
from ray_nccl_guard.locate.result import Trial
from ray_nccl_guard.network import grid
from ray_nccl_guard.probe.spec import KIB, MIB, Outcome, Step
from ray_nccl_guard.prove.worlds import SweepLine
from ray_nccl_guard.report import Attempt, Report

# As many rows as a screen holds; of more ranks, those that did not pass come first.
_MOST_ROWS = 32
_WORDS = {
    Outcome.FAILED: "FAILED", Outcome.DIED: "DIED", Outcome.TIMED_OUT: "TIMEOUT", Outcome.WAITING: "waiting",
    Outcome.MISSING: "MISSING", Outcome.NOT_RUN: "-",
}  # fmt: skip


class Progress:
    """One line at a time on stderr: replaced in place on a terminal where rich is installed, else one below the other."""

    def __init__(self) -> None:
        self._status: object = None
        self._last = ""

    @contextlib.contextmanager
    def shown(self) -> Iterator[Progress]:
        with contextlib.ExitStack() as stack:
            if sys.stderr.isatty():
                try:
                    from rich.console import Console

                    self._status = stack.enter_context(Console(stderr=True).status("probe"))
                except ImportError:  # `pip install --no-deps`: plain lines do
                    pass
            yield self
            self._status = None

    def say(self, text: str) -> None:
        if text == self._last:
            return
        self._last = text
        if self._status is not None:
            self._status.update(text)  # type: ignore[attr-defined]
        else:
            print(f"probe: {text}", file=sys.stderr, flush=True)


def rank_table(report: Report) -> str:
    """Ranks in rows, steps in columns: the seconds of what passed, a word for what did not. Empty if nothing was run."""
    attempt = report.chosen if report.verdict.failure is FailureClass.OK else report.failed
    if attempt is None or not any(r.steps for r in attempt.results):
        return ""
    hosts = {f.rank: f.host for f in report.facts}
    shown = sorted(attempt.results, key=lambda r: (r.outcome is Outcome.OK, r.rank))[:_MOST_ROWS]
    rows = [["rank", "host", "device", *(step.value for step in Step)]]
    for result in sorted(shown, key=lambda r: r.rank):
        took = {record.step: record for record in result.steps}
        cells = [_cell(took[step].outcome, took[step].seconds) if step in took else "-" for step in Step]
        rows.append([str(result.rank), hosts.get(result.rank, ""), result.device or "-", *cells])
    text = f"{attempt.rung.name}, seconds of each rank's steps:\n" + aligned(rows)
    left = len(attempt.results) - len(shown)
    return text + (
        f"\n({left} more ranks, all of them ok)" if left and _rest_ok(attempt) else f"\n({left} more)" if left else ""
    )


def _rest_ok(attempt: Attempt) -> bool:
    return sum(r.outcome is not Outcome.OK for r in attempt.results) <= _MOST_ROWS


def _cell(outcome: Outcome, seconds: float) -> str:
    return f"{seconds:.2f}" if outcome is Outcome.OK else f"{_WORDS[outcome]} {seconds:.1f}".removesuffix(" 0.0")


def matrix_text(report: Report) -> str:
    """Which host reached which, if any did not."""
    attempt = report.failed
    if attempt is None or attempt.matrix is None or not attempt.matrix.failed:
        return ""
    return "connections between the hosts, rows connect to columns:\n" + grid.text(attempt.matrix)


def sweep_table(lines: Sequence[SweepLine]) -> str:
    """Worlds in rows; seconds of the communicator, and per size the time of an all_reduce with its bus bandwidth."""
    sizes = sorted({size for line in lines for size in line.all_reduce_s})
    rows = [["world", "outcome", "comm_init", *(f"all_reduce {_size(size)}" for size in sizes)]]
    for line in lines:
        how = "ok" if line.trial is Trial.PASSED else f"FAILED in {line.failed_in.value if line.failed_in else '?'}"
        cells = [_speed(line, size) for size in sizes]
        rows.append([str(line.world_size), how, f"{line.comm_init_s:.2f} s" if line.comm_init_s else "-", *cells])
    return "sweep (a first all_reduce of each size; bus bandwidth = 2(n-1)/n bytes per second):\n" + aligned(rows)


def _speed(line: SweepLine, size: int) -> str:
    seconds = line.all_reduce_s.get(size)
    if seconds is None:
        return "-"
    n = line.world_size
    bus = 2 * (n - 1) / n * size / seconds / 1e9 if seconds else 0.0
    return f"{seconds * 1e3:.2f} ms" + (f" {bus:.2f} GB/s" if n > 1 and size >= MIB else "")


def _size(size: int) -> str:
    return f"{size // MIB} MiB" if size >= MIB else f"{size // KIB} KiB" if size >= KIB else f"{size} B"


def compared_table(reports: Sequence[Report]) -> str:
    """Backends in rows: what became of each, its seconds, and an all_reduce at the sizes that were measured."""
    sizes = sorted({size for report in reports for a in report.attempts[:1] for size in a.all_reduce_s})
    rows = [["backend", "verdict", "seconds", *(f"all_reduce {_size(size)}" for size in sizes)]]
    for report in reports:
        attempt = report.attempts[0]
        took = [f"{attempt.all_reduce_s[s] * 1e3:.2f} ms" if s in attempt.all_reduce_s else "-" for s in sizes]
        rows.append([report.backend_wanted, report.verdict.failure.value, f"{attempt.seconds:.2f}", *took])
    return "compared:\n" + aligned(rows)


def aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  " + "  ".join(f"{cell:<{w}}" for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows)
