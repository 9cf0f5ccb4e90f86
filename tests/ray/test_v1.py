"""Ray Train V1: probe, ladder and gloo within one attempt, and an error of ours instead of V1's TypeError."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="ray is not installed")
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def cases(tmp_path_factory) -> dict[str, dict]:
    """One driver for all: V1 or V2 is decided when ray.train is imported. It runs under the `run` verb."""
    folder = tmp_path_factory.mktemp("v1")
    (folder / "faults").mkdir()
    environment = {**os.environ, "RAY_TRAIN_V2_ENABLED": "0", "RAY_AUTH_MODE": "disabled", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "ray_nccl_guard", "run", "--policy", "fallback", str(ROOT / "tests/ray/v1_driver.py"), str(folder)],
        env={**environment, "V1_FAULTS": str(folder / "faults")},
        capture_output=True, text=True, timeout=600, check=False, cwd=folder,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    lines = [line.removeprefix("CASE ") for line in done.stdout.splitlines() if line.startswith("CASE ")]
    found = {case["case"]: case for case in map(json.loads, lines)}
    found["output"] = {"text": done.stdout + done.stderr}
    return found


pytestmark = [pytest.mark.slow, pytest.mark.timeout(640)]


def test_a_healthy_job_trains_and_has_its_report_where_result_path_shows(cases):
    case = cases["healthy"]
    assert case["error"] is None, case
    assert case["note"]["sum"] == 2.0 and case["note"]["action"] == "proceed"
    assert case["report"]["action"] == "proceed" and case["report"]["collectives_proved"]


def test_the_ladder_reaches_gloo_in_the_same_attempt_and_a_later_nccl_group_is_warned_about(cases):
    case = cases["fallback"]
    assert case["error"] is None and case["note"]["backend"] == "gloo" and case["note"]["sum"] == 2.0
    assert [a["group_attempt"] for a in case["report"]["attempts"]] == [1, 1]
    assert "new_group() makes a group on 'nccl'" in cases["output"]["text"] and "v1_driver.py:" in cases["output"]["text"]


@pytest.mark.parametrize("name", ["refused", "dies_in_facts", "dies_in_group"])
def test_what_cannot_train_ends_in_the_guards_own_error(cases, name):
    case = cases[name]
    assert (case["error"], case["cause"]) == ("TrainingFailedError", "NcclInitRefused"), case
    if name == "dies_in_group":
        assert case["report"]["verdict"]["culprit_ranks"] == [1]
    if name == "dies_in_facts":
        assert "was lost before the probe began" in case["text"]


def test_a_hang_in_training_ends_as_ray_ends_it_and_leaves_torchs_files_on_the_node(cases):
    """V1 ends workers without a word to the backend, so nothing is collected, and nobody removes the folder."""
    case = cases["hangs"]
    assert case["error"] == "TrainingFailedError" and case["cause"] != "NcclInitRefused", case
    assert "timed out" in case["text"].lower() or "connection closed" in case["text"].lower(), case
    folder = os.path.dirname(case["note"]["dumps"])
    assert os.path.basename(folder).startswith("nccl_guard-") and os.path.isdir(folder)
    shutil.rmtree(folder)


@pytest.mark.parametrize("name", ["healthy", "fallback"])
def test_a_script_that_knows_nothing_of_the_guard_is_guarded_too(cases, name):
    wanted = {"healthy": ("gloo", "proceed"), "fallback": ("nccl", "fall_back")}[name]
    report = cases[name]["report"]
    assert (report["backend_wanted"], report["action"]) == wanted
    assert report["policy"]["name"] == "fallback" and report["policy"]["sources"] == {"name": "argument"}


def test_every_attempt_gives_its_workers_back(cases):
    assert {case["cpus"] for name, case in cases.items() if name != "output"} == {4.0}
