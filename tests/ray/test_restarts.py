"""The same run on fresh workers: what was checked and decided is kept on unchanged hardware."""

from __future__ import annotations

import os

import pytest

from ray_nccl_guard import GuardedTorchConfig, Policy
from tests.ray.conftest import train_and_note
from tests.ray.faults import Fault
from tests.ray.test_fit import QUICK, trained_on


def train_and_fail_once(config):
    """A user's own failure in the first worker group."""
    try:
        os.close(os.open(config["once"], os.O_CREAT | os.O_EXCL))
        raise ValueError("the user's own failure")
    except FileExistsError:
        pass
    train_and_note(config)


def test_a_restart_after_a_users_failure_stays_on_the_backend_that_was_decided(fit, tmp_path):
    from ray.train import FailureConfig

    config = GuardedTorchConfig(backend="nccl", probe=QUICK, policy=Policy.fallback())
    run = fit(
        config,
        train=train_and_fail_once,
        workers=1,
        loop={"once": str(tmp_path / "once")},
        failure=FailureConfig(max_failures=2),
    )
    trained_on(run, "gloo", workers=1)
    rungs = [(a["group_attempt"], a["backend"]) for a in run.report["attempts"]]
    assert rungs == [(1, "nccl"), (1, "gloo"), (2, "gloo")], "gloo is proved again, NCCL is not tried again"
    assert run.report["action"] == "fall_back" and run.report["verdict"]["failure"] == "no_gpu_visible"


def test_an_elastic_job_is_guarded_at_the_size_it_gets(fit):
    run = fit(GuardedTorchConfig(backend="gloo", probe=QUICK), workers=(1, 2))
    assert run.error is None and run.report["action"] == "proceed"
    assert run.report["world_size"] == len(run.metrics) in (1, 2)


@pytest.mark.long
def test_a_failure_is_compared_with_the_last_run_of_the_storage_that_passed(fit, tmp_path):
    trained_on(fit(GuardedTorchConfig(backend="gloo", probe=QUICK), name="good"), "gloo")
    fault = Fault("child", "all_reduce", "abort", rank=1, once=str(tmp_path / "once"))
    run = fit(GuardedTorchConfig(backend="gloo", probe=QUICK), name="bad", loop={"fault": fault})
    said = [note for note in run.report["notes"] if "passed" in note]
    assert said, run.report["notes"]
