"""`flight --run NAME` on a run that trains: another driver asks its ranks, and the run goes on."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time

import pytest

from ray_nccl_guard import GuardedTorchConfig, ProbeSpec
from tests.ray import flight_loops as loops
from tests.ray.conftest import ROOT

# Each test starts two drivers; on a crowded two-core machine that takes minutes.
pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

DEADLINE_S = 300


def ask(*arguments: str) -> subprocess.CompletedProcess[str]:
    import ray

    address = ray.get_runtime_context().gcs_address
    command = [sys.executable, "-m", "ray_nccl_guard", "flight", "--address", address, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, cwd=ROOT, check=False)


@pytest.fixture
def live(fit, tmp_path):
    """Train with a loop in the background; `live(loop)` returns when the run can be asked. It is let go at the end."""
    go, outcomes, threads = tmp_path / "go", [], []

    def start(loop, name):
        config = GuardedTorchConfig(backend="gloo", timeout_s=DEADLINE_S, probe=ProbeSpec())

        def train():
            outcomes.append(fit(config, train=loop, workers=3, name=name, loop={"go": str(go)}))

        threads.append(threading.Thread(target=train, daemon=True))
        threads[0].start()
        from ray_nccl_guard.ray_train import flight_live

        end_s = time.monotonic() + DEADLINE_S
        while name not in flight_live.names():
            assert time.monotonic() < end_s and threads[0].is_alive(), "the run has not announced itself"
            time.sleep(0.2)
        time.sleep(3)  # until the loop is in its odd place; two steps before it are milliseconds

    def finish():
        go.touch()
        threads[0].join(DEADLINE_S)
        return outcomes[0]

    yield start, finish
    go.touch()


def test_a_live_run_that_hangs_tells_its_culprit_and_goes_on(live, tmp_path):
    start, finish = live
    start(loops.waits_for_a_file, "hangs")
    told = ask("--run", "hangs", "--out", str(tmp_path / "kept"))
    assert told.returncode == 10, told.stdout + told.stderr
    assert "error[missing_rank]: rank 1 never asked" in told.stdout
    assert f"flight_loops.py:{loops.line_of('the live culprit')}" in told.stdout
    assert (tmp_path / "kept" / "gloo" / "rank_0").exists() and (tmp_path / "kept" / "stacks" / "rank_1.txt").exists()
    outcome = finish()
    assert outcome.error is None and outcome.report["flight"] is None, "it was not stopped, and it ended well"
    gone = ask("--run", "hangs")
    assert gone.returncode == 2 and "no guarded run 'hangs' trains" in gone.stderr


def test_a_live_run_that_moves_is_called_well(live):
    start, finish = live
    start(loops.moves_until_a_file, "moves")
    told = ask("--run", "moves", "--json")
    found = json.loads(told.stdout)
    assert told.returncode == 0 and found["kind"] == "none" and found["moved"].keys() == {"0", "1", "2"}, told.stdout
    assert finish().error is None
