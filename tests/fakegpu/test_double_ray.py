"""Ray, told nothing, finds the double's GPUs and gives each actor its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fakegpu.double import Double
from tests.fakegpu.ranks import free_port


def test_ray_detects_the_gpus_and_gives_one_to_each_actor(double: Double, tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="ray is not installed")
    env = {**os.environ, **double.env(devices=3, state=tmp_path)}
    command = [sys.executable, str(Path(__file__).with_name("ray_sees.py")), str(free_port())]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    seen = json.loads(done.stdout.splitlines()[-1])
    assert (seen["gpus"], seen["types"]) == (3.0, ["accelerator_type:H100"])
    assert sorted(seen["seen"]) == [[1, 1], [2, 1]]
    assert seen["sums"] == [9.0, 9.0]
    assert "peer access is not supported between these two devices" in seen["faulty"]
