"""The example's unmodified script through `ray job submit`: with the package in the image, and in the job's working directory."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest

pytest.importorskip("ray", reason="ray is not installed")
pytest.importorskip("aiohttp", reason="ray job needs ray[default]")
from tests.ray.clusters import ROOT, Cluster, bare_python, environment, started

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

SCRIPT = ROOT / "examples/unmodified/train.py"
VERB = ("-m", "ray_nccl_guard", "run")


# Nothing in it knows the guard; its setting comes too late for a communicator that exists.
LATE = """
import os, sys
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

def train_func():
    import torch.distributed as dist
    os.environ["NCCL_ALGO"] = "Ring"
    assert dist.get_backend() == "gloo"

TorchTrainer(
    train_func,
    torch_config=TorchConfig(backend="nccl"),
    scaling_config=ScalingConfig(num_workers=2),
    run_config=RunConfig(name="variable", storage_path=sys.argv[1]),
).fit()
"""


def submit(cluster: Cluster, *entrypoint: str, options: tuple[str, ...] = (), verb: tuple[str, ...] = VERB) -> str:
    """The job's output. `ray job submit` ends with the job's status."""
    done = subprocess.run(
        [sys.executable, "-m", "ray.scripts.scripts", "job", "submit", "--address", cluster.dashboard, *options, "--",
         cluster.python, *verb, *entrypoint],
        env=environment(), capture_output=True, text=True, timeout=300, check=False, cwd="/",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def test_with_the_package_in_the_image_by_the_verb_and_by_rays_variable_alone(tmp_path):
    late = tmp_path / "late.py"
    late.write_text(LATE)
    variables = {"RAY_TRAIN_CALLBACKS": "ray_nccl_guard.ray_train.hook.GuardHook", "RAY_NCCL_GUARD_POLICY": "fallback"}
    options = ("--runtime-env-json", json.dumps({"env_vars": variables}))
    with started(tmp_path, python=sys.executable, with_package=True) as cluster:
        output = submit(cluster, "--policy", "strict", str(SCRIPT), "--storage", str(tmp_path), "--name", "image")
        alone = submit(cluster, str(late), str(tmp_path), options=options, verb=())
    assert "trained on gloo" in output
    report = json.loads((tmp_path / "image" / "nccl_guard" / "report.json").read_text())
    assert report["action"] == "proceed" and report["policy"]["sources"] == {"name": "argument"}
    report = json.loads((tmp_path / "variable" / "nccl_guard" / "report.json").read_text())
    assert report["action"] == "fall_back" and report["policy"]["sources"] == {"name": "environment"}
    assert "train_func changed NCCL_ALGO=Ring, which had no effect" in alone


def test_with_the_package_in_the_working_directory_of_a_cluster_that_has_none(tmp_path):
    python = bare_python(tmp_path / "bare")
    folder = tmp_path / "job"
    shutil.copytree(
        ROOT / "ray_nccl_guard", folder / "ray_nccl_guard", ignore=shutil.ignore_patterns("__pycache__", ".mypy_cache")
    )
    shutil.copy(SCRIPT, folder)
    (folder / "policy.toml").write_text('preset = "strict"\nbudget_s = 77\n')
    options = ("--working-dir", str(folder), "--runtime-env-json", json.dumps({"env_vars": {"OF_THE_JOB": "1"}}))
    with started(tmp_path, python=python, with_package=False) as cluster:
        output = submit(
            cluster, "--policy", "policy.toml", "train.py", "--storage", str(tmp_path), "--name", "sent", options=options
        )
    assert "trained on gloo" in output
    report = json.loads((tmp_path / "sent" / "nccl_guard" / "report.json").read_text())
    assert report["policy"]["budget_s"] == 77 and report["policy"]["sources"] == {"name": "file", "budget_s": "file"}
