"""A cluster started beforehand, with a clean environment and without the package: modes and policy are carried by value."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="ray is not installed")
from tests.ray import clusters

# Several fits on clusters of their own: part of .ci/run, not of make test.
pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory) -> str:
    """An interpreter that has everything but the package."""
    folder = tmp_path_factory.mktemp("bare")
    python = clusters.bare_python(folder)
    own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # which other files' clusters set
    done = subprocess.run(
        [python, "-c", "import ray_nccl_guard"], cwd=folder, env=own, capture_output=True, timeout=60, check=False
    )
    assert b"ModuleNotFoundError" in done.stderr, "the package must not be there"
    return python


@pytest.fixture(scope="module")
def started(bare_python, tmp_path_factory):
    """`ray start --head` in the foreground, in a session of its own that the end kills."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "NCCL", "PYTHONPATH", "TORCH"))}
    environment["RAY_AUTH_MODE"] = "disabled"
    log = open(tmp_path_factory.mktemp("log") / "head.log", "w")  # noqa: SIM115 - closed below
    head = subprocess.Popen(
        [bare_python, "-m", "ray.scripts.scripts", "start", "--head", "--block", f"--port={port}", "--num-cpus=4",
         "--include-dashboard=false", f"--temp-dir={tmp_path_factory.mktemp('r')}"],
        env=environment, stdout=log, stderr=log, start_new_session=True, cwd="/",
    )  # fmt: skip
    try:
        yield f"127.0.0.1:{port}", bare_python
    finally:
        os.killpg(head.pid, signal.SIGTERM)
        try:
            head.wait(8)
        except subprocess.TimeoutExpired:
            os.killpg(head.pid, signal.SIGKILL)
            head.wait(10)
        log.close()


def test_off_and_the_policy_reach_a_cluster_that_sees_neither_environment_nor_package(started, tmp_path):
    address, python = started
    end_s = time.monotonic() + 170
    while True:
        done = subprocess.run(
            [python, str(ROOT / "tests/ray/started_cluster_driver.py"), address, str(ROOT / "ray_nccl_guard"), str(tmp_path)],
            env={**os.environ, "PYTHONPATH": str(ROOT), "RAY_AUTH_MODE": "disabled"},
            capture_output=True, text=True, timeout=150, check=False,
        )  # fmt: skip
        if "ConnectionError" not in done.stderr or time.monotonic() > end_s - 100:
            break
        time.sleep(1)  # the head is still starting
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    off, by_name = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("off", "by_name"))
    assert off == {"backend": "gloo", "sum": 2.0, "guarded": False}
    assert not (tmp_path / "off" / "nccl_guard").exists(), "off means off, in the controller too"
    assert by_name == {"backend": "gloo", "sum": 2.0, "guarded": True}
    report = json.loads((tmp_path / "by_name" / "nccl_guard" / "report.json").read_text())
    assert report["action"] == "fall_back" and report["policy"]["name"] == "fallback"
