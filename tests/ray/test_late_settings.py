"""Settings made inside train_func come too late, and are said once, by name, with the cure."""

from __future__ import annotations

import logging
import os
import subprocess
import sys

import pytest

pytest.importorskip("ray", reason="ray is not installed")
from ray_nccl_guard import GuardedTorchConfig
from ray_nccl_guard.ray_train.late_settings import SettingsWatch


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    monkeypatch.delenv("NCCL_P2P_DISABLE", raising=False)
    monkeypatch.setenv("NCCL_ALGO", "Ring")


def run(change, caplog) -> list[str]:
    with caplog.at_level(logging.WARNING, logger="ray.train.nccl_guard"):
        try:
            with GuardedTorchConfig().train_func_context():
                change()
        except KeyError:
            pass
    return [record.getMessage() for record in caplog.records]


def test_a_setting_that_was_made_changed_or_taken_away_is_named_with_the_cure(caplog, monkeypatch):
    def change():
        os.environ["NCCL_P2P_DISABLE"] = "1"
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "max_split_size_mb:64"
        del os.environ["NCCL_ALGO"]

    (warning,) = run(change, caplog)
    assert "NCCL_P2P_DISABLE=1" in warning and "NCCL_ALGO (unset)" in warning and "PYTORCH_CUDA_ALLOC_CONF" in warning
    assert 'runtime_env={"env_vars": {"NCCL_P2P_DISABLE": "1"' in warning
    os.environ.pop("NCCL_P2P_DISABLE")
    os.environ.pop("PYTORCH_CUDA_ALLOC_CONF")


def test_it_is_said_also_when_train_func_raises(caplog):
    def change():
        os.environ["NCCL_P2P_DISABLE"] = "1"
        raise KeyError("the model's own trouble")

    (warning,) = run(change, caplog)
    assert "NCCL_P2P_DISABLE=1" in warning
    os.environ.pop("NCCL_P2P_DISABLE")


def test_nothing_is_said_about_other_variables_or_none(caplog):
    assert run(lambda: os.environ.update(MY_JOBS_OWN="1"), caplog) == []


def test_the_context_is_rays_own_with_the_watch_around_it():
    from ray.train.torch.config import TorchConfigContextManager

    assert issubclass(SettingsWatch, TorchConfigContextManager)


@pytest.mark.parametrize(
    ("options", "mode"), [({"eager_init": False}, "on"), ({"policy": "observe"}, "on"), ({}, "observe"), ({}, "off")]
)
def test_where_the_group_is_formed_as_ray_does_it_the_context_is_rays_too(options, mode, monkeypatch):
    from ray.train.torch.config import TorchConfigContextManager

    monkeypatch.setenv("RAY_NCCL_GUARD", mode)
    assert GuardedTorchConfig(**options).train_func_context is TorchConfigContextManager


def test_rays_own_context_is_watched_in_a_worker_that_is_told_to_and_nothing_is_said_twice():
    program = (
        "import logging, os, sys\n"
        "from ray.train.torch.config import TorchConfigContextManager\n"
        "from ray_nccl_guard.ray_train.late_settings import SettingsWatch, watch\n"
        "logging.getLogger('ray.train.nccl_guard').addHandler(logging.StreamHandler(sys.stdout))\n"
        "watch(); watch()\n"
        "with TorchConfigContextManager(): os.environ['NCCL_ALGO'] = 'Ring'\n"
        "with SettingsWatch(): os.environ['NCCL_PROTO'] = 'LL'\n"
        "with TorchConfigContextManager(): pass\n"
    )
    environment = {k: v for k, v in os.environ.items() if not k.startswith("NCCL_")}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert [line.partition(", which")[0].rpartition(" ")[2] for line in done.stdout.splitlines()] == [
        "NCCL_ALGO=Ring",
        "NCCL_PROTO=LL",
    ]
