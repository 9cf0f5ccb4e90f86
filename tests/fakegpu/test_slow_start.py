"""A start that passes, slowly: all ranks leave it together, and the one that the others waited for is named all the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.fakegpu.double import Double

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 240.0


def test_the_rank_that_the_others_waited_for_is_named(double: Double, tmp_path: Path):
    fault = "init:delay=4000@rank2"
    env = {**os.environ, **double.env(devices=4, ops=True, fault=fault, state=tmp_path)}
    env["PYTHONPATH"] = f"{env['PYTHONPATH']}:{ROOT}"
    command = [sys.executable, "-m", "ray_nccl_guard", "probe", "--ranks", "4", "--timeout", "60", "--json"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    took_s = [rank["steps"]["comm_init"][1] for rank in report["attempts"][0]["outcomes"]]
    assert min(took_s) > 3.5, f"the stage's own times tell nobody apart: {took_s}"
    (note,) = (note for note in report["notes"] if note.startswith("comm_init passed"))
    assert note.startswith("comm_init passed, but rank 2 on "), report["notes"]
    assert "spent 4.0 s loading NCCL's kernels, where the median of the others is 0.0 s" in note
