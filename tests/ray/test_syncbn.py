"""benchmarks/syncbn.py where no GPU is: it refuses, and measures gloo on a cluster that has neither it nor the guard."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="ray is not installed")
from benchmarks import syncbn
from tests.ray.clusters import ROOT, Cluster, bare_python, environment, started

SMALL = "--device cpu --workers 2 --models tiny --batches 3 --dtypes fp32 --image 8 --steps 1 --rounds 2 --largest 1K"
LONG = (pytest.mark.long, pytest.mark.timeout(400))


def long(function):
    for mark in LONG:
        function = mark(function)
    return function


@pytest.mark.parametrize(
    ("device", "backends", "workers", "share", "gpus", "sentence"),
    [
        ("cuda", ["nccl", "gloo"], [1, 2], 1.0, 0, "no GPU in this cluster"),
        ("cuda", ["nccl", "gloo"], [1, 4], 1.0, 2, "4 workers with 1 GPUs each do not fit on 2"),
        ("cuda", ["gloo"], [2], 0.5, 1, None),
        ("cpu", ["nccl", "gloo"], [2], 1.0, 0, "nccl needs GPUs, and --device is cpu"),
        ("cpu", ["gloo"], [2], 1.0, 0, None),
    ],
)
def test_what_cannot_be_measured_is_refused_in_a_sentence(device, backends, workers, share, gpus, sentence):
    given = argparse.Namespace(device=device, backends=backends, workers=workers, gpus_per_worker=share)
    said = syncbn.refusal(given, {"CPU": 4.0, **({"GPU": float(gpus)} if gpus else {})})
    assert (said is None) if sentence is None else (sentence in said)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Its interpreter has torch and Ray; the benchmark and the guard have to come along."""
    folder = tmp_path_factory.mktemp("syncbn")
    with started(folder, python=bare_python(folder / "bare"), with_package=False) as cluster:
        yield cluster


def measured_on_gloo(result: dict) -> None:
    assert [row["arm"] for row in result["rows"] if "arm" in row] == [
        "no exchange",
        "gloo, SyncBN",
        "gloo, BN unsynchronised",
    ]
    assert any("verdict ok, proceed on gloo" in note for note in result["notes"]), result["notes"]
    assert "no GPU, no NCCL" in result["head"]["what"]


@long
def test_without_a_gpu_it_exits_with_2_in_one_sentence(cluster: Cluster):
    done = subprocess.run(
        [sys.executable, "benchmarks/syncbn.py", "--address", cluster.address],
        env=environment(), capture_output=True, text=True, timeout=120, check=False, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 2 and done.stdout == "", done.stderr[-3000:]
    assert done.stderr.splitlines()[-1] == (
        "benchmarks/syncbn.py: no GPU in this cluster, so there is no throughput of GPUs to measure; "
        "--device cpu measures gloo on the CPU"
    )


@long
def test_on_a_running_cluster_by_its_address(cluster: Cluster, tmp_path: Path):
    command = [
        sys.executable,
        "benchmarks/syncbn.py",
        "--address",
        cluster.address,
        "--storage",
        str(tmp_path),
        *SMALL.split(),
        "--json",
    ]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=300, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-4000:]
    measured_on_gloo(json.loads(done.stdout.splitlines()[-1]))
    assert json.loads((tmp_path / "syncbn-2" / "nccl_guard" / "report.json").read_text())["action"] == "proceed"


@long
def test_as_a_job_with_this_repository_as_its_working_directory(cluster: Cluster):
    pytest.importorskip("aiohttp", reason="ray job needs ray[default]")
    done = subprocess.run(
        [sys.executable, "-m", "ray.scripts.scripts", "job", "submit", "--address", cluster.dashboard, "--working-dir", ".",
         "--", cluster.python, "benchmarks/syncbn.py", *SMALL.split(), "--json"],
        env=environment(), capture_output=True, text=True, timeout=300, check=False, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    (line,) = (line for line in done.stdout.splitlines() if line.startswith('{"head"'))
    measured_on_gloo(json.loads(line))
