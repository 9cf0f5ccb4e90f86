"""Keeps one driver with a local Ray on fake GPUs, and asks it for guarded fit() calls."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from tests.fakegpu.ranks import REPOSITORY

STARTING_S = 150.0  # a local Ray on a loaded two-core machine: 12 s were measured alone, 60 s among other suites


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """What came of one fit(); `logged` is what driver, controller and workers printed meanwhile."""

    error: tuple[str, str] | None
    report: dict[str, Any]
    notes: list[dict[str, Any]]
    seconds: float
    left: list[str]
    logged: str


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
        logged = self._log.read_text(errors="replace")
        if not line:
            self._process.kill()
            raise RuntimeError(f"the driver gave no answer (exit code {self._process.poll()}):\n{logged[-3000:]}")
        self._left_s = 30.0
        answer = json.loads(line)
        error = answer.pop("error")
        return Fit(**answer, error=None if error is None else (error[0], error[1]), logged=logged[seen:])

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
