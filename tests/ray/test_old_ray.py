"""The oldest Ray whose callback variable exists, Train V2 and V1: an unmodified script is guarded there too."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="ray is not installed")
from tests.ray.clusters import ROOT, environment, packages_here

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

OLD = "2.48.0"


@pytest.fixture(scope="module")
def old_python() -> str:
    """An environment with nothing but the old Ray in it, kept between runs; all else (torch, pyarrow, ...) is this one's."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ray-nccl-guard-tests"
    folder = cache / f"ray-{OLD}-py{sys.version_info.major}{sys.version_info.minor}"
    python, site = (
        folder / "bin" / "python",
        Path("lib") / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages",
    )
    if not (folder / "complete").exists():
        venv.create(folder, with_pip=False, symlinks=True, clear=True)
        done = subprocess.run(
            [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder / site), f"ray=={OLD}"],
            capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        if done.returncode != 0:
            pytest.skip(f"ray {OLD} cannot be installed here: {done.stderr.strip().splitlines()[-1]}")
        (folder / "complete").touch()
    (folder / site / "base.pth").write_text(packages_here())  # after the old Ray on the path
    return str(python)


@pytest.mark.parametrize("v2", ["1", "0"])
def test_an_unmodified_script_is_guarded_on_an_old_ray(old_python, tmp_path, v2):
    done = subprocess.run(
        [old_python, "-m", "ray_nccl_guard", "run", "--policy", "fallback", str(ROOT / "tests/ray/old_ray_driver.py"), str(tmp_path)],
        env=environment(PYTHONPATH=str(ROOT), RAY_TRAIN_V2_ENABLED=v2),
        capture_output=True, text=True, timeout=300, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    (note,) = [line for line in done.stdout.splitlines() if line.startswith("NOTE ")]
    expected = {"backend": "gloo", "sum": 2.0, "action": "fall_back", "ray": OLD, "written": True}
    assert json.loads(note.removeprefix("NOTE ")) == expected
