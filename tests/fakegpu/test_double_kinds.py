"""The double on other installations of torch: without the NVIDIA wheels, and on other versions; and under DDP."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fakegpu.double import Double, build, site_of_torch
from tests.fakegpu.ranks import Ended, Ranks

pytestmark = pytest.mark.torch_versions

BODIES = "tests.fakegpu.bodies"
# Interpreters of further virtual environments, separated by colons: CI names one with another torch.
OTHER_PYTHONS = [python for python in os.environ.get("FAKEGPU_PYTHONS", "").split(":") if python]


def values(ended: list[Ended]) -> list[object]:
    assert all(rank.exit_code == 0 for rank in ended), "\n".join(rank.output for rank in ended)
    return [rank.value for rank in ended]


def without_nvidia_wheels(folder: Path) -> Path:
    """The site-packages where torch is, as links, but for the NVIDIA libraries: what `pip install --no-deps torch` gives.

    torch and torch/lib are real folders, since torch looks for the NVIDIA libraries relative to where its own really lie.
    """
    site = site_of_torch()
    for source, target in (
        (site, folder),
        (site / "torch", folder / "torch"),
        (site / "torch" / "lib", folder / "torch" / "lib"),
    ):
        target.mkdir(exist_ok=True)
        for entry in source.iterdir():
            if entry.name not in ("nvidia", "torch", "lib", "__pycache__") and not entry.name.startswith("nvidia_"):
                (target / entry.name).symlink_to(entry)
    return folder


def test_torch_without_any_nvidia_wheel_runs_on_stand_ins(double: Double, tmp_path: Path) -> None:
    site = without_nvidia_wheels(tmp_path / "site")
    slim = build(site)
    assert slim.stand_ins is not None and (slim.stand_ins / "libcudnn.so.9").exists()
    env = slim.env(devices=2, state=tmp_path)
    assert "LD_PRELOAD" not in env
    with Ranks({**env, "PYTHONPATH": str(site)}, flags=("-S",)) as ranks:  # -S: this interpreter's own packages stay unseen
        assert values(ranks.run(f"{BODIES}:every_collective", 2, dtype="float32", size=1000)) == [[], []]
        assert values(ranks.run(f"{BODIES}:mapped_nvidia_files", 1)) == [[]]


@pytest.mark.parametrize("python", OTHER_PYTHONS or [None])
def test_another_torch_gives_right_values_and_the_sticky_error(python: str | None, tmp_path: Path) -> None:
    if python is None:
        pytest.skip("FAKEGPU_PYTHONS names no other interpreter")
    command = [python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"]
    site = Path(subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.strip())
    with Ranks(build(site).env(devices=4, state=tmp_path), python) as ranks:
        for backend in ("nccl", "nccl-legacy"):
            assert values(ranks.run(f"{BODIES}:every_collective", 4, dtype="bfloat16", size=17, backend=backend)) == [[]] * 4
        for rank in ranks.run(f"{BODIES}:sticky", 2, env={"FAKE_FAULT": "allreduce:cuda700"}):
            assert rank.output.count("\ncall: CUDA error: an illegal memory access was encountered") == 3, rank.output


def test_ddp_with_sync_batch_norm_trains_as_one_process_does(double: Double, tmp_path: Path) -> None:
    with Ranks(double.env(devices=2, ops=True, state=tmp_path)) as ranks:
        for losses in values(ranks.run(f"{BODIES}:train", 2)):
            assert isinstance(losses, dict)
            assert losses["ddp"] == pytest.approx(losses["alone"], rel=1e-4)  # float32, other order of summation
            assert losses["ddp"][-1] < losses["ddp"][0]


def test_the_hook_for_kernels_does_not_hide_a_sitecustomize_behind_it(double: Double, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('the one behind')")
    env = double.env(ops=True)
    env["PYTHONPATH"] += f":{tmp_path}"
    done = subprocess.run([sys.executable, "-c", ""], env={**os.environ, **env}, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("the one behind\n", "")


def test_the_environment_names_the_options_it_does_not_know(double: Double) -> None:
    with pytest.raises(TypeError, match="unknown option 'colour'"):
        double.env(colour="green")
