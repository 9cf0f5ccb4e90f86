"""A name server that never answers: torch's store asks it for whoever connects, and a healthy job must get the time for that."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SILENT = "127.0.0.77"
PROBE = """
from dataclasses import replace
from tests.process.ranks import QUICK, run_ranks
results = run_ranks(4, spec=replace(QUICK, store_s=6, comm_init_s=6))
print(*(r.outcome.value for r in results), *(r.error for r in results))
"""


@pytest.fixture
def silent_name_server():
    """A socket at port 53 that takes what comes and says nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as deaf:
        try:
            deaf.bind((SILENT, 53))
        except OSError as error:
            pytest.skip(f"port 53 of {SILENT} is not ours to bind: {error}")
        yield SILENT


def test_a_store_that_waits_for_a_name_server_gets_its_time(silent_name_server, tmp_path):
    configuration = tmp_path / "resolv.conf"
    configuration.write_text(f"nameserver {silent_name_server}\n")
    # Two seconds for each of the four launchers and of the four children: more than the 6 s of each step.
    script = f"mount --bind {configuration} /etc/resolv.conf && exec {sys.executable} -c '{PROBE}'"
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", script],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "RES_OPTIONS": "timeout:2 attempts:1"},
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    if "mount" in done.stderr.partition("\n")[0]:
        pytest.skip(f"no mount namespace here: {done.stderr.strip()}")
    assert done.stdout.split() == ["ok"] * 4, done.stdout + done.stderr[-2000:]
