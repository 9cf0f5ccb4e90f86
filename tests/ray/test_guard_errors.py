"""The guard's own bugs, one at each stage border: training still runs, and the report says what broke."""

from __future__ import annotations

import dataclasses

import pytest

from ray_nccl_guard import GuardedTorchConfig, Policy, ProbeSpec
from ray_nccl_guard.rulebook import shipped_rules
from tests.ray.test_fit import QUICK, trained_on


class Broken(RuntimeError):
    """Stands for a bug of the guard."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class BrokenInTheLauncher(ProbeSpec):
    """A spec whose deadline cannot be told: the launcher in the worker fails."""

    def deadline_s(self, step, world_size):
        import os

        if os.environ.get("RANK") is None:  # in the probe; the training group is formed with the launch variables set
            raise Broken("deadline")
        return super().deadline_s(step, world_size)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BrokenInTheDecision(Policy):
    """A policy that cannot decide."""

    def action_for(self, failure):
        raise Broken("action_for")


class BrokenPattern:
    """A rule's pattern that breaks when it is read."""

    @property
    def literals(self):
        raise Broken("rules")


BROKEN_RULE = dataclasses.replace(shipped_rules()[0], id="broken", patterns=(BrokenPattern(),))


@dataclasses.dataclass(frozen=True, kw_only=True)
class BrokenInTheReport(Policy):
    """A policy that cannot be written into the report."""

    def to_json(self):
        raise Broken("to_json")


class BrokenFacts:
    """Travels in train_loop_config and breaks `socket.gethostname` in the workers, which the facts ask."""

    def __reduce__(self):
        return (break_hostname, ())


def break_hostname():
    import socket

    from tests.ray import faults

    if "RayTrainWorker" in faults._actor_name():
        socket.gethostname = lambda: (_ for _ in ()).throw(Broken("gethostname"))
    return BrokenFacts()


def config(**options):
    return GuardedTorchConfig(backend="gloo", **{"probe": QUICK, **options})


@pytest.mark.parametrize(
    "stage, options, loop",
    [
        pytest.param("facts", {}, {"broken": BrokenFacts()}, marks=pytest.mark.slow),
        ("probe", {"probe": BrokenInTheLauncher()}, {}),
        pytest.param("report", {"policy": BrokenInTheReport()}, {}, marks=pytest.mark.slow),
    ],
)
def test_training_goes_on_and_the_report_says_what_broke(fit, stage, options, loop):
    run = fit(config(**options), loop=loop)
    trained_on(run, "gloo")
    if stage != "report":  # that one cannot be written
        assert "Broken" in run.report["guard_error"] and run.report["action"] == "proceed", stage


@pytest.mark.slow
@pytest.mark.parametrize(
    "stage, options", [("verdict", {"rules": [BROKEN_RULE]}), ("decision", {"policy": BrokenInTheDecision()})]
)
def test_a_bug_after_a_failed_probe_leaves_ray_to_itself(fit, stage, options):
    # NCCL is not there on this machine, so plain TorchConfig fails with torch's words, and so must we.
    run = fit(GuardedTorchConfig(backend="nccl", probe=QUICK, **options))
    assert "nccl" in str(run.error).lower()
    assert "Broken" in run.report["guard_error"], stage


def test_a_policy_may_ask_for_the_error_instead(fit):
    run = fit(config(policy=Policy(on_guard_error="raise")), loop={"broken": BrokenFacts()})
    assert "gethostname" in str(run.error) and run.metrics == []
