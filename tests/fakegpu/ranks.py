"""Runs a function on every rank of a small world under the double, in tenths of a second, and tells how each rank ended."""

from __future__ import annotations

import json
import os
import random
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

REPOSITORY = Path(__file__).resolve().parents[2]
STARTING_S = 120.0  # importing torch on a busy two-core machine


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """How one rank ended.

    Attributes:
        value: what the function returned; None when it did not return.
        signal: the signal that killed it, None for an exit; SIGKILL by us when `hung`.
        error_type, error_text: of the exception that it raised, if it did.
        output: all that it printed.
    """

    rank: int
    pid: int
    exit_code: int | None
    signal: int | None
    hung: bool
    seconds: float
    output: str
    value: Any = None
    error_type: str | None = None
    error_text: str = ""


def free_port() -> int:
    """A port below the ephemeral range, which other programs' connections are given numbers from."""
    while True:
        port = random.randint(20000, 32000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
                return port
            except OSError:
                continue


def abandoned_shared_memory() -> set[str]:
    """NCCL's files in /dev/shm that no living process maps: what a run in progress uses, be it somebody else's, is not meant."""
    files = {path.name for path in Path("/dev/shm").glob("nccl-*")}
    for maps in Path("/proc").glob("[0-9]*/maps") if files else ():
        try:
            files -= set(re.findall(r"/dev/shm/(nccl-\w+)", maps.read_text()))
        except OSError:
            continue  # it ended while we looked
    return files


class Ranks:
    """A process that has imported torch and forks ranks on request. Close it, or use it in a `with` block."""

    def __init__(self, env: Mapping[str, str], python: str = sys.executable, flags: tuple[str, ...] = ()) -> None:
        answers, for_child = os.pipe()
        paths = [str(REPOSITORY), env.get("PYTHONPATH", os.environ.get("PYTHONPATH", ""))]
        full = {**os.environ, **env, "PYTHONPATH": ":".join(path for path in paths if path)}
        command = [python, *flags, str(Path(__file__).with_name("rank_server.py")), str(for_child)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, env=full, pass_fds=(for_child,), text=True)
        os.close(for_child)
        self._answers: IO[str] = os.fdopen(answers)
        self._left_s = STARTING_S

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def run(
        self, body: str, world: int, deadline_s: float = 30.0, env: Mapping[str, str] | None = None, **arguments: Any
    ) -> list[Ended]:
        """Runs "module:function" on ranks 0 .. world-1 and returns how they ended, by rank.

        `env` is added to each rank's environment; "{rank}" in a value stands for the rank. Arguments and the returned value
        must be JSON. A rank still running after `deadline_s` is killed and called hung. Raises RuntimeError when no answer
        comes.
        """
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "500"}
        request = {
            "body": body,
            "world": world,
            "env": {**address, **(env or {})},
            "arguments": arguments,
            "deadline_s": deadline_s,
        }
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        give_up_s = time.monotonic() + self._left_s + deadline_s
        ready, _, _ = select.select([self._answers], [], [], give_up_s - time.monotonic())
        line = self._answers.readline() if ready else ""
        if not line:
            self._process.kill()  # a late answer must not be taken for that of the next request
            raise RuntimeError(f"the rank server gave no answer (exit code {self._process.poll()})")
        self._left_s = 60.0  # torch is imported: from now on only forking and waiting, if slowly on a loaded machine
        return [Ended(**ended) for ended in json.loads(line)]

    def close(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait(timeout=10)
        self._answers.close()
