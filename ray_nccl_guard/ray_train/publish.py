"""The report goes out: JSON and a page under the run's storage, metrics, and the message once through Ray Train's logger."""

from __future__ import annotations

import json
import logging
from typing import Any

from ray_nccl_guard import html, render
from ray_nccl_guard.classes import FailureClass
from ray_nccl_guard.ray_train import metrics, storage
from ray_nccl_guard.ray_train.run_folder import run_folder
from ray_nccl_guard.ray_train.workers import Workers
from ray_nccl_guard.report import Report

log = logging.getLogger("ray.train.nccl_guard")

FOLDER = "nccl_guard"


_put_off: list[storage.Writing] = []
_under_way: list[storage.Writing] = []


def write(report: Report, workers: Workers) -> Report:
    """Write the report under the run's storage; returns it with the run's name and its path (empty if not written).

    A healthy start does not wait for it, since nobody has to read that report now: `begin` has it written once the workers
    train, so that making its page (50 ms and more of imports) slows no start, and `settle` waits for it when the group ends.
    """
    place = run_folder(workers.group)
    if place is None:
        return report
    report = report.with_changes(run_name=place[1].rstrip("/").rpartition("/")[2])
    folder = f"{place[1]}/{FOLDER}"
    writing = storage.Writing(place[0], folder, lambda: _files(report))
    path = f"{folder}/report.json"
    if _well(report) and report.flight is None:
        _put_off.append(writing)
    else:
        writing.begin()
        path = path if _arrived(writing) else ""
    return report.with_changes(path=path)


def begin() -> None:
    """Begin to write the reports that a healthy start has put off."""
    while _put_off:
        writing = _put_off.pop(0)
        writing.begin()
        _under_way.append(writing)


def settle() -> None:
    """Wait for the reports that a healthy start has left under way, each within its deadline."""
    begin()
    while _under_way:
        _arrived(_under_way.pop())


def _arrived(writing: storage.Writing) -> bool:
    problem = writing.wait(storage.WRITE_S)
    if problem:
        log.warning("nccl_guard: the report could not be written to %s: %s", writing.folder, problem)
    return not problem


def _well(report: Report) -> bool:
    return report.verdict.failure is FailureClass.OK and report.guard_error is None


def _files(report: Report) -> dict[str, bytes]:
    # `report.json` is the only JSON directly in the folder: others look for it there.
    files = {"report.json": json.dumps(report.to_json(), indent=1).encode()}
    try:
        files["report.html"] = html.page(report).encode()
    except html.NoTemplates as error:
        log.debug("nccl_guard: report.html was not written: %s (%s)", error, "; ".join(error.help))
    return files


def announce(report: Report) -> None:
    """Print the message once, and set the metrics. Only loggers below `ray.train` have a handler in the controller."""
    metrics.record(report)
    log.log(
        logging.INFO if _well(report) else logging.WARNING, "nccl_guard: %s", render.render(report), extra=_fields(report)
    )


def _fields(report: Report) -> dict[str, Any]:
    """For whoever searches Ray's structured log: its JSON formatter writes what a record has beyond the standard fields."""
    return {
        "nccl_guard_run": report.run_name,
        "nccl_guard_action": report.decision.action.value,
        "nccl_guard_failure": report.verdict.failure.value,
        "nccl_guard_backend": report.decision.backend or "",
        "nccl_guard_wanted": report.backend_wanted,
        "nccl_guard_culprit_ranks": list(report.verdict.culprit_ranks),
        "nccl_guard_report": report.path,
        "nccl_guard_drill": report.drill,
    }
