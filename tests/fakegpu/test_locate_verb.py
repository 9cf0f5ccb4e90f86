"""`probe --locate` on fake GPUs: real torch, real children; the fault clings to a pair of GPUs, to one GPU, or to a size."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakegpu.double import Double

ROOT = Path(__file__).resolve().parents[2]
# One import of torch on a loaded machine, then ten rounds of children at most, each within its deadline.
LIMIT_S = 240.0


def probe(double: Double, state: Path, fault: str, *words: str, devices: int = 4) -> tuple[int, dict[str, Any], float]:
    env = {**os.environ, **double.env(devices=devices, ops=True, fault=fault, state=state)}
    env["PYTHONPATH"] = f"{env['PYTHONPATH']}:{ROOT}"
    command = [sys.executable, "-m", "ray_nccl_guard", "probe", "--ranks", str(devices), "--timeout", "4", "--json", *words]
    started_s = time.monotonic()
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout), time.monotonic() - started_s


def forgotten() -> set[str]:
    """NCCL's files in shared memory that no living process has mapped."""
    mapped = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            mapped |= set(re.findall(r"/dev/shm/nccl-\w+", maps.read_text()))
        except OSError:
            continue  # it ended while we looked
    return {str(path) for path in Path("/dev/shm").glob("nccl-*")} - mapped


@pytest.fixture(autouse=True)
def no_shared_memory_is_left() -> Iterator[None]:
    before = forgotten()
    yield
    end_s = time.monotonic() + 10
    while left := forgotten() - before:
        assert time.monotonic() < end_s, f"left behind: {left}"
        time.sleep(0.2)


@pytest.mark.slow
def test_a_bad_pair_of_gpus_is_named_as_a_link(double: Double, tmp_path: Path):
    code, report, _ = probe(double, tmp_path, "allreduce:error=6@gpupair=1-2", "--locate", "--policy", "strict")
    assert code == 20
    assert (report["located"]["kind"], report["located"]["ranks"]) == ("link", [1, 2]), report["located"]
    assert report["verdict"]["culprit_ranks"] == [1, 2]


def test_a_size_from_which_worlds_fail_is_found_without_being_asked_and_gloo_goes_on(double: Double, tmp_path: Path):
    code, report, _ = probe(double, tmp_path, "allreduce:cuda700@world>=4")
    assert code == 10 and report["backend_chosen"] == "gloo"
    assert report["verdict"]["failure"] == "illegal_memory_access" and report["verdict"]["scope"] != "program"
    assert (report["located"]["kind"], report["located"]["smallest"]) == ("threshold", 4), report["located"]
    assert "worlds of 3 work and fail from 4 on" in report["located"]["sentence"]


def test_one_bad_gpu_is_named_as_its_rank(double: Double, tmp_path: Path):
    code, report, _ = probe(double, tmp_path, "init:error=1@gpu=3", "--locate", "--policy", "strict")
    assert code == 20
    assert (report["located"]["kind"], report["located"]["ranks"]) == ("rank", [3]), report["located"]


@pytest.mark.slow
def test_a_hang_between_two_gpus_is_located_within_its_budget(double: Double, tmp_path: Path):
    code, report, seconds = probe(double, tmp_path, "init:hang@gpupair=0-3", "--locate", "--policy", "strict")
    assert code == 20
    assert (report["located"]["kind"], report["located"]["ranks"]) == ("link", [0, 3]), report["located"]
    assert report["timings_s"]["locate"] < 60 + 20, "no round begins after the budget, and none is longer than its deadlines"
    assert seconds < LIMIT_S


def test_backends_are_compared_on_gpus(double: Double, tmp_path: Path):
    code, report, _ = probe(double, tmp_path, "init:error=1@world>=2", "--backend", "nccl", "--backend", "gloo", devices=2)
    assert code == 10 and report["backend_chosen"] == "gloo"
    assert [one["action"] for one in report["compared"]] == ["refuse", "proceed"]


def test_more_ranks_than_gpus_is_wrong_usage(double: Double, tmp_path: Path):
    env = {**os.environ, **double.env(devices=1, ops=True, state=tmp_path)}
    env["PYTHONPATH"] = f"{env['PYTHONPATH']}:{ROOT}"
    done = subprocess.run(
        [sys.executable, "-m", "ray_nccl_guard", "probe", "--ranks", "2"], env=env, capture_output=True, text=True,
        timeout=LIMIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 2 and "2 ranks need 2 GPUs, and this host shows 1" in done.stderr
