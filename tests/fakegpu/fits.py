"""Keeps one driver with a local Ray on fake GPUs, and asks it for guarded fit() calls."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from tests.fakegpu.ranks import REPOSITORY

# Most faults ask for no 32 MiB, which the double takes seconds to sum. Only a hang costs its deadline; whatever else fails here ends by itself, also on a machine that is busy with other things.
WHOLE: dict[str, Any] = {
    "store_s": 30, "comm_init_s": 40, "comm_init_per_rank_s": 0, "collective_s": 60, "device_s": 60, "import_s": 120,
}  # fmt: skip
PATIENT = {**WHOLE, "sizes_bytes": (4, 1 << 20)}
SHORT = {**PATIENT, "comm_init_s": 8}
STARTING_S = 150.0  # a local Ray on a loaded two-core machine: 12 s were measured alone, 60 s among other suites


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """What came of one fit(); `log` is where driver, controller and workers print, from byte `since` on for this fit()."""

    error: tuple[str, str] | None
    report: dict[str, Any]
    notes: list[dict[str, Any]]
    seconds: float
    left: list[str]
    log: Path
    since: int

    @property
    def logged(self) -> str:
        return self.log.read_bytes()[self.since :].decode(errors="replace")

    def told(self, text: str, within_s: float = 20.0) -> bool:
        """Whether `text` was printed. Ray hands on what its actors print when it comes to it, which may be behind the fit()'s end."""
        end_s = time.monotonic() + within_s
        while text not in self.logged:
            if time.monotonic() > end_s:
                return False
            time.sleep(0.1)
        return True


def trained_on(run: Fit, backend: str, workers: int = 2) -> None:
    """Every worker trained on `backend`, with right sums, and nothing is left."""
    assert run.error is None, f"{run.error}\n{run.logged[-4000:]}"
    assert [n["backend"] for n in run.notes] == [backend] * workers, run.report
    assert {n["sum"] for n in run.notes} == {workers * (workers + 1) / 2}
    assert run.left == []


def refused(run: Fit) -> str:
    """The job was refused before `train_func`, and nothing is left; returns why."""
    assert run.error is not None and run.error[0] == "NcclInitRefused", f"{run.error}\n{run.logged[-4000:]}"
    assert run.report["action"] == "refuse" and run.report["backend_chosen"] is None
    assert run.notes == [] and run.left == []
    return str(run.report["because"])


def verdict(run: Fit) -> tuple[str, list[int], str | None]:
    said = run.report["verdict"]
    return said["failure"], said["culprit_ranks"], said["step"]


class Fits:
    """A driver process with its own Ray. Close it, or use it in a `with` block."""

    def __init__(self, env: Mapping[str, str], folder: Path) -> None:
        answers, for_child = os.pipe()
        paths = [str(REPOSITORY), env.get("PYTHONPATH", os.environ.get("PYTHONPATH", ""))]
        full = {
            **os.environ,
            **env,
            "PYTHONPATH": ":".join(path for path in paths if path),
            "RAY_AUTH_MODE": "disabled",
            "RAY_USAGE_STATS_ENABLED": "0",
            "FAKE_FIT": uuid.uuid4().hex,
        }
        self.mark = full["FAKE_FIT"]
        self._log = folder / "driver.log"
        with open(self._log, "w") as log:
            command = [sys.executable, "-m", "tests.fakegpu.fit_driver", str(for_child), str(folder)]
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=full,
                pass_fds=(for_child,),
                text=True,
                cwd=REPOSITORY,
            )
        os.close(for_child)
        self._answers: IO[str] = os.fdopen(answers)
        self._left_s = STARTING_S

    def __enter__(self) -> Fits:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def guarded(self, fault: str = "", **request: Any) -> Fit:
        """One guarded fit() under `fault`, with deadlines that only a hang meets."""
        request["env"] = {"FAKE_FAULT": fault, **request.get("env", {})}
        return self.fit(**{"spec": PATIENT, **request})

    def fit(self, deadline_s: float = 400.0, **request: Any) -> Fit:
        """One guarded fit() (`fit_driver.fit` tells what `request` may hold).

        Raises:
            RuntimeError: the driver gave no answer; the driver is spent.
        """
        seen = self._log.stat().st_size
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        ready, _, _ = select.select([self._answers], [], [], self._left_s + deadline_s)
        line = self._answers.readline() if ready else ""
        if not line:
            self._process.kill()
            logged = self._log.read_text(errors="replace")
            raise RuntimeError(f"the driver gave no answer (exit code {self._process.poll()}):\n{logged[-3000:]}")
        self._left_s = 30.0
        answer = json.loads(line)
        error = answer.pop("error")
        return Fit(**answer, error=None if error is None else (error[0], error[1]), log=self._log, since=seen)

    def kill(self) -> str:
        """End the driver by SIGKILL, as a cluster's job manager does; returns the mark that its processes carry."""
        self._process.kill()
        self._process.wait(timeout=30)
        return self.mark

    def close(self) -> None:
        if self._process.stdin is not None:
            try:
                self._process.stdin.close()
            except BrokenPipeError:
                pass  # it is gone
        try:
            self._process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(timeout=10)
        self._answers.close()
