"""Real gloo jobs that go wrong on purpose: the culprit is named from the dumps that torch wrote."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from ray_nccl_guard import flight
from tests.process.make_flight_dumps import SCENARIOS

MAKER = Path(__file__).with_name("make_flight_dumps.py")
DEADLINE_S = 170  # all scenarios took 20 s on two idle cores


@pytest.fixture(scope="module")
def dumps(tmp_path_factory):
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed")
    out = tmp_path_factory.mktemp("flight")
    # In a process of its own: ranks are forked from one that has torch and no threads.
    done = subprocess.run([sys.executable, MAKER, out], capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stderr[-2000:]
    return out


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_rank_that_was_made_to_misbehave_is_named(dumps, name):
    scenario = SCENARIOS[name]
    verdict = flight.diagnose(flight.load([dumps / name], world_size=scenario.world_size))
    assert verdict.missing_dumps == scenario.silent
    assert (verdict.kind.value, verdict.culprit_ranks) == (scenario.kind, scenario.culprits), verdict


def test_the_stack_of_the_culprit_is_of_the_body_that_misbehaved(dumps):
    stacks = flight.diagnose(flight.load([dumps / "other_operation"])).stacks
    sides = {stack.culprit: (stack.op, {frame.name for frame in stack.frames}) for stack in stacks}
    assert sides[True][0] == "all_gather" and "other_operation" in sides[True][1]
    assert sides[False][0] == "all_reduce" and "other_operation" in sides[False][1]
