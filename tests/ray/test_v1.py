"""Ray Train V1: probe, ladder and gloo within one attempt, and an error of ours instead of V1's TypeError."""

from __future__ import annotations

import json
import os
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


def test_a_hang_in_training_is_named_although_v1_ends_workers_without_a_word_to_the_backend(cases):
    case = cases["hangs"]
    assert case["error"] == "TrainingFailedError" and case["cause"] != "NcclInitRefused", case
    assert "timed out" in case["text"].lower() or "connection closed" in case["text"].lower(), case
    found = case["report"]["flight"]
    assert (found["kind"], found["culprit_ranks"], found["missing_dumps"]) == ("missing_rank", [1], [1]), found
    source = (ROOT / "tests/ray/v1_driver.py").read_text().splitlines()
    line = next(number for number, text in enumerate(source, 1) if "the culprit's line" in text)
    assert found["ranks_ended"][1]["place"].endswith(f"v1_driver.py:{line} in train_func"), found["ranks_ended"]
    assert cases["output"]["text"].count("error[missing_rank]") == 1
    folder = Path(found["folder"])
    assert (folder / "gloo" / "rank_0").exists() and (folder / "stacks" / "rank_1.txt").exists()
    assert not os.path.exists(os.path.dirname(case["note"]["dumps"])), "the node's folder is removed"


@pytest.mark.parametrize("name", ["healthy", "fallback"])
def test_a_script_that_knows_nothing_of_the_guard_is_guarded_too(cases, name):
    wanted = {"healthy": ("gloo", "proceed"), "fallback": ("nccl", "fall_back")}[name]
    report = cases[name]["report"]
    assert (report["backend_wanted"], report["action"]) == wanted
    assert report["policy"]["name"] == "fallback" and report["policy"]["sources"] == {"name": "argument"}


def test_every_attempt_gives_its_workers_back(cases):
    assert {case["cpus"] for name, case in cases.items() if name != "output"} == {4.0}
