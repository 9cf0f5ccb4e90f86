"""The example scripts as a user runs them, on a cluster of CPUs that was started beforehand."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="ray is not installed")
from tests.ray.clusters import ROOT, Cluster, environment, started

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with started(tmp_path_factory.mktemp("examples"), python=sys.executable, with_package=True) as cluster:
        yield cluster


def run(cluster: Cluster, name: str, storage: Path, *words: str) -> tuple[str, dict[str, dict]]:
    """What an example printed on stdout and stderr, and the reports that its runs wrote, by run."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / name), "--storage", str(storage), *words],
        env=environment(RAY_ADDRESS=cluster.address, PYTHONPATH=str(ROOT), HF_HUB_OFFLINE="1"),
        capture_output=True, text=True, timeout=300, check=False, cwd=storage,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    reports = {path.parts[-3]: json.loads(path.read_text()) for path in storage.glob("*/nccl_guard/report.json")}
    return done.stdout + done.stderr, reports


@pytest.mark.parametrize(
    "name, needs, proved",
    [
        ("ddp_syncbn.py", (), {"all_reduce", "broadcast", "all_gather", "barrier"}),
        ("fsdp.py", (), {"all_gather_into_tensor", "reduce_scatter"}),
        ("lightning_trainer.py", ("lightning",), {"all_reduce", "broadcast"}),
        ("hf_transformers.py", ("transformers", "accelerate"), {"all_reduce", "broadcast"}),
    ],
)
def test_an_example_trains_on_a_backend_that_has_proved_what_it_needs(cluster, tmp_path, name, needs, proved):
    if missing := [package for package in needs if importlib.util.find_spec(package) is None]:
        pytest.skip(f"{', '.join(missing)} is not installed")
    text, reports = run(cluster, name, tmp_path)
    (report,) = reports.values()
    assert report["action"] == "proceed" and proved <= set(report["collectives_proved"])
    assert re.search(r"trained on gloo, loss \d+\.\d+", text), text[-2000:]


def test_every_trial_of_tune_has_a_report_of_its_own(cluster, tmp_path):
    text, reports = run(cluster, "tune_train.py", tmp_path)
    trials = [report for name, report in reports.items() if name.startswith("trial-")]
    assert len(trials) == 2 and all(report["action"] == "proceed" for report in trials)
    assert "lr 0.01: loss" in text and "lr 0.1: loss" in text


def test_the_drill_prints_its_message_once_and_trains_on_gloo(cluster, tmp_path):
    text, reports = run(cluster, "drill.py", tmp_path)
    assert text.count("nccl_guard: DRILL: warning[illegal_memory_access]") == 1, text[-3000:]
    assert "trained on gloo after the drill allreduce:cuda700@rank1" in text
    assert reports["drill"]["drill"] == "allreduce:cuda700@rank1"
