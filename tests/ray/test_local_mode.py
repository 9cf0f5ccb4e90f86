"""Where Ray makes no backend (local mode, torchrun) the config simply works, unguarded."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("ray", reason="ray is not installed")
from tests.ray.clusters import ROOT, environment

SCRIPT = r"""
import os
import torch
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from ray_nccl_guard import GuardedTorchConfig, current_report

def train_func(config):
    import torch.distributed as dist
    tensor = torch.ones(1)
    if dist.is_initialized():
        dist.all_reduce(tensor)
    # One write: under torchrun both ranks share the pipe, and print() makes several.
    os.write(1, f"SUM {tensor.item()} {current_report()}\n".encode())

TorchTrainer(
    train_func, train_loop_config={}, torch_config=GuardedTorchConfig(), scaling_config=ScalingConfig(num_workers=0),
    run_config=RunConfig(name="local", storage_path=STORAGE),
).fit()
"""


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_guarded_config_in_local_mode_trains_without_a_report(tmp_path, ranks):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.replace("STORAGE", repr(str(tmp_path))))
    launcher = [] if ranks == 1 else ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [sys.executable, *launcher, str(script)],
        env=environment(PYTHONPATH=str(ROOT)), capture_output=True, text=True, timeout=150, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count(f"SUM {float(ranks)} None") == ranks, done.stdout
