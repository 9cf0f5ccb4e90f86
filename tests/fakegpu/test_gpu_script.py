"""benchmarks/gpu.sh, the prepared run for a machine with a GPU, on the fake ones: it comes to its end and pretends nothing."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fakegpu.double import Double
from tests.fakegpu.ranks import REPOSITORY

SCRIPT = "benchmarks/gpu.sh"
SMALL = "--models tiny --image 8 --batches 3 --dtypes fp32 --steps 1 --rounds 2 --largest 1K"


def run(folder: Path, env: dict[str, str], *options: str) -> subprocess.CompletedProcess[str]:
    full = {**os.environ, **env, "PYTHON": sys.executable, "RAY_AUTH_MODE": "disabled"}
    command = [str(REPOSITORY / SCRIPT), str(folder), *options]
    return subprocess.run(command, env=full, capture_output=True, text=True, timeout=620, check=False, cwd="/")


def logs(folder: Path) -> str:
    return "\n".join(f"{path.name}: {path.read_text()[-1500:]}" for path in sorted(folder.glob("*.log")))


def test_without_a_gpu_it_exits_with_2_and_names_what_can_be_measured(double: Double, tmp_path: Path) -> None:
    done = run(tmp_path / "results", double.env(devices=0, state=tmp_path))
    assert done.returncode == 2 and "no GPU here; benchmarks/syncbn.py --device cpu" in done.stderr, done.stderr


@pytest.mark.long
@pytest.mark.timeout(640)
@pytest.mark.parametrize(
    ("devices", "parts"), [(1, ["check", "start_cost", "syncbn_1", "syncbn_2_on_1"]), (2, ["check", "start_cost", "syncbn"])]
)
def test_every_part_ends_and_says_that_it_is_no_measurement(
    double: Double, tmp_path: Path, devices: int, parts: list[str]
) -> None:
    pytest.importorskip("ray", reason="ray is not installed")
    results = tmp_path / "results"
    env = {**double.env(devices=devices, ops=True, state=tmp_path), "ROUNDS": "1"}
    done = run(results, env, *SMALL.split())
    assert done.returncode == 0, done.stdout + done.stderr + logs(results)
    assert re.findall(r"^(\w+): ok, \d+ s$", done.stdout, re.MULTILINE) == parts
    for part in parts:
        first = (results / f"{part}.md").read_text().splitlines()[0]
        assert "NOT A MEASUREMENT" in first or "no figure here says anything about a GPU" in first, first
