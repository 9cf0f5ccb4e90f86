"""What Ray tells only its callbacks: a hang that its NCCL RAS detector confirms, and Ctrl-C. The culprit is named all the same."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="ray is not installed")
from tests.ray import flight_loops as loops
from tests.ray.clusters import ROOT, environment

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

DEADLINE_S = 240
WORKERS = 3

# The client program of NCCL's RAS, which asks a library that is not there: a communicator whose ranks never go on.
NCCLRAS = '#!/bin/sh\ncase "$*" in *json*) cat "$(dirname "$0")/ras.json" ;; *) echo "rank 1 lags behind" ;; esac\n'
RUNNING = {"init_state": 0, "async_error": 0, "finalize_called": False, "destroy_flag": False, "abort_flag": False}


def ras_answer() -> str:
    ranks = [
        {"rank": rank, "host": "h", "pid": 1, "status": RUNNING, "collective_counts": {"AllReduce": 4 - (rank == 1)}}
        for rank in range(WORKERS)
    ]
    communicator = {"hash": "0xabc", "size": WORKERS, "ranks_count": WORKERS, "ranks": ranks, "missing_ranks": []}
    return json.dumps({"timestamp": "now", "communicators_count": 1, "communicators": [communicator]})


class Driver:
    """The cases run one after the other on one Ray; what the driver prints goes to a file."""

    def __init__(self, folder: Path, *cases: str) -> None:
        self.folder, self.output = folder, folder / "output"
        tool = folder / "bin"
        tool.mkdir()
        (tool / "ncclras").write_text(NCCLRAS)
        (tool / "ncclras").chmod(0o755)
        (tool / "ras.json").write_text(ras_answer())
        env = environment(
            PYTHONPATH=str(ROOT), PATH=f"{tool}:{os.environ['PATH']}", RAY_DEDUP_LOGS="0",
            RAY_TRAIN_NCCL_RAS_MIN_POLL_INTERVAL_S="1", RAY_TRAIN_NCCL_RAS_CONFIRM_DURATION_S="4",
        )  # fmt: skip
        command = [sys.executable, "-m", "tests.ray.flight_driver", str(folder), *cases]
        with open(self.output, "w") as file:
            self.process = subprocess.Popen(command, env=env, stdout=file, stderr=file, cwd=ROOT, start_new_session=True)

    def text(self) -> str:
        return self.output.read_text(errors="replace")

    def wait_for(self, what: str, done) -> None:
        end_s = time.monotonic() + DEADLINE_S
        while not done():
            assert time.monotonic() < end_s and self.process.poll() is None, f"{what} did not come:\n{self.text()[-6000:]}"
            time.sleep(0.3)

    def flight(self, case: str) -> dict:
        path = self.folder / "storage" / case / "nccl_guard" / "report.json"
        return (json.loads(path.read_text())["flight"] or {}) if path.exists() else {}

    def trains(self, case: str) -> bool:
        return len(list((self.folder / f"{case}-notes").glob("*"))) == WORKERS

    def node_folders(self, case: str) -> set[str]:
        notes = [json.loads(path.read_text()) for path in (self.folder / f"{case}-notes").iterdir()]
        return {os.path.dirname(note["dumps"]) for note in notes}


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    started = Driver(tmp_path_factory.mktemp("callbacks"), "observe", "fail", "interrupted")
    yield started
    if started.process.poll() is None:
        os.killpg(started.process.pid, signal.SIGKILL)
    started.process.wait()


def is_named(found: dict) -> None:
    assert (found["kind"], found["culprit_ranks"]) == ("missing_rank", [loops.CULPRIT]), found
    place = found["ranks_ended"][loops.CULPRIT]["place"]
    assert place.endswith(f"flight_loops.py:{loops.line_of('the live culprit')} in waits_for_a_file")


def test_a_hang_that_ras_only_observes_is_named_while_the_run_goes_on(driver):
    driver.wait_for("the verdict", lambda: driver.flight("observe"))
    is_named(driver.flight("observe"))
    assert any("NCCL RAS" in line for line in driver.flight("observe")["because"])
    time.sleep(4)  # the detector goes on confirming it
    (driver.folder / "observe-go").touch()
    driver.wait_for("the end of the run", lambda: '"case": "observe"' in driver.text())
    assert '"case": "observe", "error": ""' in driver.text(), "it was not stopped"
    assert driver.text().count("error[missing_rank]") == 1
    assert not any(map(os.path.exists, driver.node_folders("observe")))


def test_a_hang_that_ras_ends_is_named_before_the_workers_are_gone(driver):
    driver.wait_for("the end of the run", lambda: '"case": "fail"' in driver.text())
    assert '"case": "fail", "error": "NCCLHangError"' in driver.text()
    is_named(driver.flight("fail"))
    assert not any(map(os.path.exists, driver.node_folders("fail")))


def test_ctrl_c_during_a_hang_names_the_culprit_and_leaves_nothing_behind(driver):
    driver.wait_for("the training", lambda: driver.trains("interrupted"))
    time.sleep(2)
    started_s = time.monotonic()
    driver.process.send_signal(signal.SIGINT)
    driver.process.wait(120)
    assert time.monotonic() - started_s < 60, "nobody waits longer after Ctrl-C"
    is_named(driver.flight("interrupted"))
    assert any("Ctrl-C came first" in line for line in driver.flight("interrupted")["against"])
    assert "nccl_guard: error[missing_rank]" in driver.text().rpartition('"case": "fail"')[2], driver.text()[-3000:]
    assert not any(map(os.path.exists, driver.node_folders("interrupted")))
