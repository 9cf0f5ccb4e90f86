"""Where a run's files lie: the storage that `Result.path` shows, on Train V2 and V1."""

from __future__ import annotations

from typing import Any


def run_folder(worker_group: Any) -> tuple[Any, str] | None:
    """The run's filesystem (pyarrow) and its folder there, None if this version of Ray keeps them elsewhere.

    V2: the storage context of the worker group. V1: the session of the Tune trial in whose process `on_start` runs; a trial
    is a run there, and has a folder of its own.
    """
    storage = getattr(worker_group, "_storage_context", None)
    if storage is not None:
        return storage.storage_filesystem, str(storage.experiment_fs_path)
    try:
        from ray.train._internal.session import get_session
    except ImportError:
        return None
    storage = getattr(get_session(), "storage", None)
    return None if storage is None else (storage.storage_filesystem, str(storage.trial_fs_path))
