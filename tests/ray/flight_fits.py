"""What a reader of a guarded fit() that went wrong has to find."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ray_nccl_guard import flight
from tests.ray import flight_loops as loops


def named(outcome: Any, output: str, folder: Path, kind: str, line: int | None = None, workers: int = 3) -> dict[str, Any]:
    """The culprit stands in the report, in the driver's output (once), in the error that fit() raised, and in the kept dumps."""
    assert outcome.error is not None
    found = outcome.report["flight"]
    assert (found["kind"], found["culprit_ranks"]) == (kind, [loops.CULPRIT]), found
    assert output.count(f"error[{kind}]") == 1, output
    if line is not None:
        assert f"flight_loops.py:{line}" in output
    words = str(outcome.error)
    assert f"nccl_guard: {kind}: " in words and "nccl_guard/report.json" in words, words
    again = flight.diagnose(flight.load([folder / found["recorder"]], world_size=workers))
    assert (again.kind.value, again.culprit_ranks) == (kind, (loops.CULPRIT,)), "the same from the kept files"
    page = (folder.parents[1] / "report.html").read_text()
    assert "Flight Recorder" in page and "Record sheet" in page
    sheet = (folder / "verdict" / "sheet.txt").read_text()
    assert "run hung, worker group 1" in sheet and f"rank {loops.CULPRIT}: no GPU, pid" in sheet
    assert all(len(row.rstrip()) > 18 for row in sheet.splitlines()), "no line of it is blank"
    return found
