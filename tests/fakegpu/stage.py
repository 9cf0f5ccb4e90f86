"""Plays the cases of the matrix side by side, in the order of their tests: most of a case is waiting, for a deadline or a peer."""

from __future__ import annotations

import os
import queue
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.fakegpu.double import Double
from tests.fakegpu.matrix import PATIENT, Case
from tests.fakegpu.ranks import Ended, Ranks, abandoned_shared_memory

BODY = "tests.fakegpu.guarded:preflight"
# On two cores the cases of `make test` take 68 s two at a time, 46 s four at a time and 42 s seven at a time; the gate plays those of
# another torch beside them.
AT_ONCE = int(os.environ.get("FAULT_MATRIX_AT_ONCE", "0")) or 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """What came of a case: how the pre-flight ended, and what it left on the machine: processes, NCCL's files."""

    ended: Ended
    left: list[str]


class Stage:
    """Starts all cases it is given, AT_ONCE at a time. Use it in a `with` block; leaving it ends what still runs."""

    def __init__(self, double: Double, cases: Sequence[tuple[Case, str]], folders: pytest.TempPathFactory) -> None:
        self._double, self._folders = double, folders
        self._servers: queue.SimpleQueue[Ranks] = queue.SimpleQueue()
        self._open: list[Ranks] = []
        for _ in range(min(AT_ONCE, len(cases))):
            self._servers.put(self._server())
        self._pool = ThreadPoolExecutor(AT_ONCE)
        self._plays: dict[tuple[str, str], Future[Played]] = {
            (case.name, backend): self._pool.submit(self._play, case, backend, folders.mktemp(case.name))
            for case, backend in cases
        }

    def __enter__(self) -> Stage:
        return self

    def __exit__(self, *exception: object) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        for server in self._open:
            server.close()
        self._pool.shutdown()

    def played(self, case: Case, backend: str) -> Played:
        """Waits for the case's end. Raises RuntimeError where its server gave no answer."""
        return self._plays[case.name, backend].result()

    def _server(self) -> Ranks:
        self._open.append(Ranks(self._double.env(devices=8, ops=True, state=self._folders.mktemp("ledger"))))
        return self._open[-1]

    def _play(self, case: Case, backend: str, state: Path) -> Played:
        server = self._servers.get()
        try:
            return play(case, backend, server, self._double, state)
        except RuntimeError:
            server = self._server()  # that one is spent, and the other cases are none of its business
            raise
        finally:
            self._servers.put(server)


def play(case: Case, backend: str, server: Ranks, double: Double, state: Path) -> Played:
    """One case, whose processes have `state` as their working directory."""
    shared_before = abandoned_shared_memory()
    env = {**double.env(devices=8, state=state, fault=case.fault, **case.options), **case.env}
    (ended,) = server.run(
        BODY,
        1,
        deadline_s=150,
        env={name: value for name, value in env.items() if name.startswith(("FAKE_", "NCCL_", "CUDA_"))},  # it has the rest
        ranks=case.ranks,
        backend=backend,
        spec={**PATIENT, **case.spec},
        devices=case.devices,
        asked_gpus=case.asked_gpus,
        policy=case.policy,
        touched=case.touched,
    )
    return Played(ended=ended, left=left(state, shared_before))


def left(state: Path, shared_before: set[str], within_s: float = 10.0) -> list[str]:
    """Processes that were started for this case, and NCCL's new files that nobody uses: what is still there after `within_s`.

    The files are everybody's on this machine, and another run may be about to clean its own up.
    """
    end_s = time.monotonic() + within_s
    while found := [*of_case(state), *sorted(abandoned_shared_memory() - shared_before)]:
        if time.monotonic() > end_s:
            return found
        time.sleep(0.05)
    return []


def of_case(state: Path) -> list[str]:
    """Living processes whose working directory is this case's folder: the pre-flight makes it so for all that it starts."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if os.readlink(entry / "cwd") == str(state):
                found.append(f"process {entry.name}")
        except OSError:
            continue  # it ended while we looked
    return found
