"""A guarded fit() on a real local Ray with real process groups, on CPU workers."""

from __future__ import annotations

import pickle

import pytest

from ray_nccl_guard import GuardedTorchConfig, NcclInitRefused, Policy, ProbeSpec
from tests.ray.faults import Fault

# A variant of what its neighbours show, at 15 to 30 s each: part of .ci/run, not of make test.
VARIANT = pytest.mark.slow
QUICK = ProbeSpec(store_s=5, comm_init_s=5, comm_init_per_rank_s=0, collective_s=5)


def guarded(backend="gloo", **options):
    return GuardedTorchConfig(backend=backend, **{"probe": QUICK, **options})


def trained_on(fit, backend, workers=2):
    assert fit.error is None, fit.error
    assert [m["backend"] for m in fit.metrics] == [backend] * workers
    assert {m["sum"] for m in fit.metrics} == {workers * (workers + 1) / 2}


@pytest.mark.parametrize("workers", [2, 4])
def test_a_healthy_job_proceeds_and_can_ask_for_its_report(fit, workers):
    run = fit(guarded(), workers=workers)
    trained_on(run, "gloo", workers=workers)
    assert run.report["action"] == "proceed" and run.report["verdict"]["failure"] == "ok"
    assert run.report["collectives_proved"] == ["all_reduce", "broadcast", "all_gather", "barrier", "object_gather"]
    assert run.metrics[0]["action"] == "proceed", "current_report() inside train_func"


def test_nccl_without_a_gpu_falls_back_where_the_policy_allows_it(fit):
    run = fit(guarded("nccl", policy=Policy.fallback()))
    trained_on(run, "gloo")
    report = run.report
    assert (report["action"], report["backend_wanted"], report["backend_chosen"]) == ("fall_back", "nccl", "gloo")
    assert report["verdict"]["failure"] == "no_gpu_visible" and report["verdict"]["evidence"], "NCCL's own refusal is quoted"


def test_nccl_without_a_gpu_is_refused_by_default_and_the_error_carries_the_report(fit):
    run = fit(guarded("nccl"))
    assert isinstance(run.refused, NcclInitRefused), run.error
    assert run.refused.report["action"] == "refuse" and run.refused.report["verdict"]["failure"] == "no_gpu_visible"
    assert run.metrics == [], "train_func must not have started"
    again = pickle.loads(pickle.dumps(run.refused))
    assert again.report == run.refused.report and str(again) == str(run.refused)


def test_observing_changes_nothing_but_writes_what_was_seen(fit):
    run = fit(guarded("nccl", policy=Policy.observe()))
    assert "nccl" in str(run.error).lower() and not isinstance(run.refused, NcclInitRefused), "as plain TorchConfig"
    assert run.report["action"] == "proceed" and run.report["verdict"]["failure"] == "no_gpu_visible"


def test_one_worker_and_a_second_fit_in_the_same_driver(fit):
    trained_on(fit(guarded(), workers=1), "gloo", workers=1)
    trained_on(fit(guarded(probe=None), workers=1), "gloo", workers=1)


@pytest.mark.parametrize(
    "action, failure", [("abort", "process_crashed"), pytest.param("hang_gil", "init_timeout_hang", marks=VARIANT)]
)
def test_a_child_that_dies_or_hangs_once_is_tried_again_in_the_same_workers(fit, tmp_path, action, failure):
    fault = Fault("child", "all_reduce", action, rank=1, once=str(tmp_path / "once"))
    run = fit(guarded(), loop={"fault": fault})
    trained_on(run, "gloo")
    assert run.report["verdict"]["failure"] == failure and run.report["verdict"]["culprit_ranks"] == [1]
    assert run.report["verdict"]["step"] == "collective"
    assert [a["group_attempt"] for a in run.report["attempts"]] == [1, 1], "no new workers for a dead child"


@VARIANT
def test_a_child_that_always_hangs_is_refused_with_its_rank(fit):
    run = fit(guarded(), loop={"fault": Fault("child", "all_reduce", "stop", rank=0)})
    assert isinstance(run.refused, NcclInitRefused), run.error
    assert run.refused.report["verdict"]["culprit_ranks"] == [0]
    slowest = max(a["seconds"] for a in run.report["attempts"])
    assert slowest < QUICK.collective_s + 2 + 2, "deadline + 2 s, and 2 s for two busy cores"


@pytest.mark.parametrize(
    "action", ["abort", pytest.param("stop", marks=VARIANT), pytest.param("hang_gil", marks=pytest.mark.long)]
)
def test_a_worker_lost_during_the_probe_is_replaced(fit, tmp_path, action):
    fault = Fault("worker", "TCPStore", action, rank=1, once=str(tmp_path / "once"))
    run = fit(guarded(), loop={"fault": fault})
    trained_on(run, "gloo")
    assert run.report["verdict"]["culprit_ranks"] == [1], run.report["verdict"]
    assert [a["group_attempt"] for a in run.report["attempts"]] == [1, 2], "fresh workers"


@pytest.mark.parametrize(
    "action", ["raise", *(pytest.param(action, marks=VARIANT) for action in ("abort", "hang_gil", "stop"))]
)
def test_a_training_group_that_fails_after_a_good_probe_gets_fresh_workers(fit, tmp_path, action):
    fault = Fault("worker", "init_process_group", action, rank=1, once=str(tmp_path / "once"))
    run = fit(guarded(), loop={"fault": fault})
    trained_on(run, "gloo")
    origins = [(a["origin"], a["failure"] == "ok") for a in run.report["attempts"]]
    assert origins == [("probe", True), ("training_group", False), ("probe", True)]
    assert run.report["attempts"][1]["culprit_ranks"] == [1]


@VARIANT
def test_a_training_group_that_never_forms_is_refused_after_a_few_attempts(fit):
    run = fit(guarded(), loop={"fault": Fault("worker", "init_process_group", "abort", rank=1)})
    assert isinstance(run.refused, NcclInitRefused), run.error
    assert run.refused.report["attempts"][-1]["origin"] == "training_group"


def test_where_the_user_forbids_a_restart_the_error_is_ours_with_the_report(fit):
    from ray.train import FailureConfig

    fault = Fault("worker", "init_process_group", "abort", rank=1)
    run = fit(guarded(), loop={"fault": fault}, failure=FailureConfig(controller_failure_limit=0))
    assert run.refused.report["attempts"], "GuardRestart or NcclInitRefused, each with its report"
    assert run.refused.report["verdict"]["culprit_ranks"] == [1]
