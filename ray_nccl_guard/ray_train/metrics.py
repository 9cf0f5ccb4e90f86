"""The report as Ray metrics, for those who alert: a job silently running on gloo must page someone.

Ray exports each name with the prefix `ray_`. All are of the controller's process and carry the run's name.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

from ray_nccl_guard.policy import Action
from ray_nccl_guard.report import Report

log = logging.getLogger("ray.train.nccl_guard")

RUN = "ray_train_run_name"  # the tag of Ray Train's own metrics (ray.train.v2._internal.metrics.base)
DRILL = "drill"  # `yes` where a failure was only rehearsed: alerts are to fire, and to say so
BACKEND, ACTION, FALLBACKS = "nccl_guard_backend", "nccl_guard_action", "nccl_guard_fallbacks"
SECONDS, STAGE_SECONDS = "nccl_guard_seconds", "nccl_guard_stage_seconds"

# What was set to 1 last for a run, to set it to 0 when it is no longer so: a gauge's series lives as long as its process.
_shown: dict[tuple[str, str], dict[str, str]] = {}


@functools.cache
def _metrics() -> dict[str, Any]:
    from ray.util.metrics import Counter, Gauge

    return {
        BACKEND: Gauge(BACKEND, "1 for the backend that the run trains on, beside the one that was asked for",
                       (RUN, DRILL, "wanted", "backend", "relief")),
        ACTION: Gauge(ACTION, "1 for what the guard decided last, and the failure class that it was about",
                      (RUN, DRILL, "action", "failure")),
        FALLBACKS: Counter(FALLBACKS, "starts that went on below the first rung", (RUN, DRILL)),
        SECONDS: Gauge(SECONDS, "seconds that the guard added to the last start", (RUN,)),
        STAGE_SECONDS: Gauge(STAGE_SECONDS, "seconds of the slowest rank in each stage of the chosen rung", (RUN, "stage")),
    }  # fmt: skip


def record(report: Report) -> None:
    """Set the metrics from a report. What Ray refuses is a warning: no metric is worth a run."""
    try:
        _record(report)
    except Exception as error:  # Ray's metrics raise kinds of their own, and none of them may stop a start
        log.warning("nccl_guard: the metrics could not be set: %s: %s", type(error).__name__, error)


def _record(report: Report) -> None:
    metrics, run = _metrics(), {RUN: report.run_name}
    drill = {**run, DRILL: "yes" if report.drill else ""}
    decision = report.decision
    failure = "guard_error" if report.guard_error else report.verdict.failure.value
    _show(metrics, ACTION, report.run_name, {**drill, "action": decision.action.value, "failure": failure})
    trains = decision.action in (Action.PROCEED, Action.FALL_BACK)
    backend = {**drill, "wanted": report.backend_wanted, "backend": decision.backend or "none",
               "relief": " ".join(f"{k}={v}" for k, v in decision.relief.items())}  # fmt: skip
    _show(metrics, BACKEND, report.run_name, backend if trains else {})
    if decision.action is Action.FALL_BACK:
        metrics[FALLBACKS].inc(1, tags=drill)
    metrics[SECONDS].set(report.timings_s.get("guard", 0.0), tags=run)
    for stage, seconds in report.stage_s.items():
        metrics[STAGE_SECONDS].set(seconds, tags={**run, "stage": stage})


def _show(metrics: dict[str, Any], name: str, run_name: str, tags: dict[str, str]) -> None:
    """Set the series with `tags` to 1, and the one that was there before to 0."""
    before = _shown.pop((name, run_name), None)
    if before and before != tags:
        metrics[name].set(0, tags=before)
    if tags:
        metrics[name].set(1, tags=tags)
        _shown[name, run_name] = tags
