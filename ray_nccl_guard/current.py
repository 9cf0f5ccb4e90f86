"""The report of the run that this process trains in, for `train_func` to ask."""

from __future__ import annotations

from typing import Any

_current: dict[str, Any] | None = None


def current_report() -> dict[str, Any] | None:
    """The guard's report of the running job as plain JSON values (see docs/report.md), None outside a guarded worker."""
    return _current


def set_current(report: dict[str, Any] | None) -> None:
    global _current
    _current = report
