"""The reports of earlier runs in the same storage: after a failure the first question is what has changed since one passed."""

from __future__ import annotations

import json
import threading
from typing import Any

from ray_nccl_guard.last_good import compare_json
from ray_nccl_guard.ray_train.run_folder import run_folder
from ray_nccl_guard.ray_train.workers import Workers
from ray_nccl_guard.report import Report

# A storage folder may hold years of runs; the newest ones tell what changed. A listing of a bucket takes a second or two.
_NEWEST = 20
_WITHIN_S = 5.0
_MAX_BYTES = 32 << 20  # a report of 4,096 ranks is 8 MB (benchmarks/publish.py)


def since_last_good(report: Report, workers: Workers) -> tuple[str, ...]:
    """Sentences that compare `report` with the last run of this storage that passed; none if there was none.

    What cannot be read in time is left out: a comparison is a help, and no reason to wait.
    """
    place = run_folder(workers.group)
    if place is None:
        return ()
    found: list[Any] = []
    thread = threading.Thread(target=_read, args=(*place, found), daemon=True, name="nccl-guard-earlier")
    thread.start()
    thread.join(_WITHIN_S)
    return compare_json(report.to_json(), list(found)).sentences


def _read(filesystem: Any, run: str, found: list[Any]) -> None:
    """The newest reports beside `run`, oldest first (they carry no date, so their files' do)."""
    from pyarrow.fs import FileSelector, FileType

    storage, _, own = run.rstrip("/").rpartition("/")
    try:
        runs = [entry for entry in filesystem.get_file_info(FileSelector(storage)) if entry.type is FileType.Directory]
        paths = [f"{entry.path}/nccl_guard/report.json" for entry in runs if entry.base_name != own]
        files = [f for f in filesystem.get_file_info(paths) if f.type is FileType.File and f.size < _MAX_BYTES]
        for file in sorted(files, key=lambda f: f.mtime)[-_NEWEST:]:
            with filesystem.open_input_stream(file.path) as stream:
                found.append(json.loads(stream.read()))
    except Exception:  # every filesystem raises its own kind; what was read so far stands
        return
