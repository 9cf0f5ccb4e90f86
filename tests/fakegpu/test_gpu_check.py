"""tests/gpu/check.sh, prepared for a machine with one real GPU, runs to its end on the double and says that it was one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fakegpu.double import Double
from tests.fakegpu.ranks import REPOSITORY


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_checks_for_one_real_gpu_all_pass_on_the_double(double: Double, tmp_path: Path) -> None:
    pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
    env = {**os.environ, **double.env(devices=1, ops=True, state=tmp_path), "PYTHON": sys.executable}
    command = [str(REPOSITORY / "tests" / "gpu" / "check.sh")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=350, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert "on the double: no figure here says anything about a GPU" in done.stdout.splitlines()[0]
    results = [
        line.split(" | ")[1] for line in done.stdout.splitlines() if line.startswith("| ") and "| check |" not in line
    ]
    assert results == ["ok"] * 9, done.stdout
