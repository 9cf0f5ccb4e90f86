"""A script that knows nothing of the guard, on a running cluster that does not see its environment: every fit() is guarded."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="ray is not installed")
from tests.ray.clusters import ROOT, environment, started

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

RULE = """
failure = "no_gpu_visible"
role = "cause"
certainty = "established"
summary = "the rule of a pack says so"
patterns = ["requires at least one CUDA device"]
shares = ["no-gpu-visible"]
weight = 1.0
"""


@pytest.fixture(scope="module")
def cases(tmp_path_factory) -> dict[str, dict]:
    """One cluster and one script under `run` for all: what it prints by case."""
    folder = tmp_path_factory.mktemp("entry")
    storage, pack = folder / "storage", folder / "pack"
    storage.mkdir()
    pack.mkdir()
    (pack / "of-a-pack.toml").write_text(RULE)
    (folder / "policy.toml").write_text('preset = "fallback"\nbudget_s = 99\n')
    with started(folder, python=sys.executable, with_package=True) as cluster:
        done = subprocess.run(
            [sys.executable, "-m", "ray_nccl_guard", "run", "--policy", "policy.toml", "--deadline", "12", "--collectives",
             "ddp", str(ROOT / "tests/ray/entry_driver.py"), str(storage)],
            env=environment(
                RAY_ADDRESS=cluster.address, PYTHONPATH=str(ROOT), RAY_NCCL_GUARD_RULES=str(pack),
                ENTRY_REMOVE=f"{folder / 'policy.toml'} {pack}",
            ),
            capture_output=True, text=True, timeout=560, check=False, cwd=folder,
        )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    lines = [line.removeprefix("CASE ") for line in done.stdout.splitlines() if line.startswith("CASE ")]
    return {case["case"]: case for case in map(json.loads, lines)}


@pytest.mark.parametrize("name", ["explicit", "task", "tune"])
def test_every_way_to_call_fit_is_guarded_with_settings_carried_by_value(cases, name):
    case = cases[name]
    assert case["error"] is None and case["note"]["backend"] == "gloo", case
    report = case["note"]["report"]
    assert (report["backend_wanted"], report["action"]) == ("nccl", "fall_back")
    assert report["policy"]["budget_s"] == 99 and report["policy"]["sources"] == {"name": "file", "budget_s": "file"}
    assert report["policy"]["file"].endswith("/policy.toml")
    assert report["collectives_proved"] == ["all_reduce", "broadcast", "barrier", "object_gather"], "--collectives ddp"
    assert "of-a-pack" in {rule for c in report["verdict"]["candidates"] for rule in c["rules"]}, "the rule pack came along"


def test_a_trainer_without_a_config_is_guarded_too(cases):
    assert cases["none"]["note"]["report"]["action"] == "proceed", cases["none"]


def test_the_errors_of_workers_end_in_the_verdict_over_their_dumps(cases):
    text = cases["raises"]["note"]["error"]
    assert "ValueError: a label out of range" in text and "nccl_guard: missing_rank: rank 1 raised ValueError" in text, text


@pytest.mark.parametrize("name", ["other", "local"])
def test_what_is_not_rays_torch_backend_is_left_alone(cases, name):
    assert cases[name] == {"case": name, "note": {"backend": None, "report": None}, "error": None}


def test_a_hook_that_cannot_work_leaves_the_script_alone(tmp_path):
    """An invalid policy in the environment of a script that did not ask for the guard: a warning, and Ray's own start."""
    program = (
        "import os; os.environ.update(RAY_NCCL_GUARD_POLICY='stict')\n"
        "from ray_nccl_guard.ray_train.hook import GuardHook; GuardHook()\n"
        "from ray.train.torch.config import TorchConfig, _TorchBackend\n"
        "assert TorchConfig(backend='gloo').backend_cls is _TorchBackend\n"
        "os.environ['RAY_NCCL_GUARD_POLICY'] = 'strict'; config = TorchConfig(backend='gloo')\n"
        "assert config.backend_cls is not _TorchBackend and config.guard.policy.name == 'strict'\n"
        "os.environ['RAY_NCCL_GUARD'] = 'off'; assert TorchConfig(backend='gloo').backend_cls is _TorchBackend\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment(PYTHONPATH=str(ROOT)),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "NOT guarded" in done.stderr and "did you mean 'strict'" in done.stderr


def test_a_broken_import_inside_the_hook_does_not_abort_fit(tmp_path):
    broken = tmp_path / "ray_nccl_guard"
    (broken / "ray_train").mkdir(parents=True)
    for name in ("__init__.py", "ray_train/__init__.py"):
        (broken / name).write_text("")
    (broken / "ray_train" / "hook.py").write_text((ROOT / "ray_nccl_guard/ray_train/hook.py").read_text())
    done = subprocess.run(
        [sys.executable, "-c", "from ray.train.v2._internal.callbacks.env_callback import _initialize_env_callbacks as make; print(make())"],
        env=environment(PYTHONPATH=str(tmp_path), RAY_TRAIN_CALLBACKS="ray_nccl_guard.ray_train.hook.GuardHook"),
        capture_output=True, text=True, timeout=120, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0 and "GuardHook" in done.stdout, done.stderr
    assert "NOT guarded" in done.stderr


def test_the_hook_is_where_ray_looks_for_it():
    from ray_nccl_guard.cli.run import CALLBACK
    from ray_nccl_guard.ray_train import hook

    assert hook.CALLBACK == CALLBACK and Path(hook.__file__).name == "hook.py"
