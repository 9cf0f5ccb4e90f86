"""Skips the whole folder, with the reason in the summary, where namespaces are not permitted."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.net.netlab import REPOSITORY, read_line, why_not


@pytest.fixture(scope="session")
def lab_works() -> None:
    reason = why_not()
    if reason:
        pytest.skip(f"no fault lab here: {reason}")


@pytest.fixture(scope="session")
def gloo() -> Iterator[subprocess.Popen[bytes]]:
    pytest.importorskip("torch", reason="real gloo needs torch")
    world = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("gloo_world.py"))], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, env={**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    try:
        assert read_line(world, 180.0) == "ready"
        yield world
    finally:
        world.kill()
        world.communicate()
