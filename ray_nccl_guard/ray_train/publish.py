"""The report goes out: JSON under the run's storage, the message once through the controller's `ray.train` logger."""

from __future__ import annotations

import json
import logging
import threading
from typing import Any

from ray_nccl_guard import render
from ray_nccl_guard.classes import FailureClass
from ray_nccl_guard.ray_train.run_folder import run_folder
from ray_nccl_guard.ray_train.workers import Workers
from ray_nccl_guard.report import Report

log = logging.getLogger("ray.train.nccl_guard")

FOLDER = "nccl_guard"
# Storage may be a bucket or a network mount; a report that does not get there in time is a warning, not a failed run.
_WRITE_S = 10.0


def write(report: Report, workers: Workers) -> Report:
    """Write the report's JSON under the run's storage; returns it with its path, or with a note if it could not be written."""
    place = run_folder(workers.group)
    if place is None:
        return report
    filesystem, folder = place[0], f"{place[1]}/{FOLDER}"
    failure: list[str] = []
    thread = threading.Thread(
        target=_write, args=(filesystem, folder, report.to_json(), failure), daemon=True, name="nccl-guard-report"
    )
    thread.start()
    thread.join(_WRITE_S)
    path = f"{folder}/report.json"
    if thread.is_alive():
        failure.append(f"the storage did not answer within {_WRITE_S:g} s")
    if failure:
        log.warning("nccl_guard: the report could not be written to %s: %s", path, failure[0])
        return report
    return report.with_changes(path=path)


def _write(filesystem: Any, folder: str, report: dict[str, Any], failure: list[str]) -> None:
    text = json.dumps(report, indent=1).encode()
    try:
        filesystem.create_dir(folder, recursive=True)
        with filesystem.open_output_stream(f"{folder}/report.json") as stream:
            stream.write(text)
    except Exception as error:  # every filesystem raises its own kind; what is caught is said in the warning
        failure.append(f"{type(error).__name__}: {error}")


def announce(report: Report) -> None:
    """Print the message once. Only loggers below `ray.train` have a handler in the controller."""
    text = render.render(report)
    if report.verdict.failure is FailureClass.OK and report.guard_error is None:
        log.info("nccl_guard: %s", text)
    else:
        log.warning("nccl_guard: %s", text)
