"""The driver is killed in the middle of the ladder: no process of the run is left, and none of NCCL's files."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fakegpu.double import Double
from tests.fakegpu.fits import PATIENT, Fits
from tests.fakegpu.ranks import abandoned_shared_memory

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def test_nothing_is_left_when_the_driver_is_killed_while_nccl_hangs(double: Double, tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="ray is not installed")
    before = abandoned_shared_memory()
    fits = Fits(double.env(devices=2, ops=True, state=tmp_path), tmp_path)
    asking = threading.Thread(target=ask, args=(fits,))
    asking.start()
    try:
        until(lambda: len(children(fits.mark)) == 2, within_s=200, what="the children of the probe")
        time.sleep(8)  # they are in ncclCommInitRank by then, where one hangs, and the launchers have looked at them
        mark = fits.kill()
        until(
            lambda: not with_a_journal(mark), within_s=60, what="the end of the workers and of what the guard started there"
        )
        until(lambda: abandoned_shared_memory() <= before, within_s=10, what="the end of NCCL's files")
    finally:
        fits.close()
        asking.join(30)


def ask(fits: Fits) -> None:
    with pytest.raises(RuntimeError, match="gave no answer"):
        fits.guarded("init:hang@rank1", spec={**PATIENT, "comm_init_s": 300})


def until(holds: Callable[[], bool], *, within_s: float, what: str) -> None:
    end_s = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < end_s, f"{what} did not come"
        time.sleep(0.2)


def of_run(mark: str) -> list[int]:
    """Living processes that carry the driver's mark in their environment: Ray's, the workers, and what the guard started."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            if state != "Z" and f"FAKE_FIT={mark}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except OSError:
            continue  # it ended while we looked
    return found


def children(mark: str) -> list[int]:
    """The disposable children: processes with a probe's journal whose parent, the worker, has one too."""
    parents = with_a_journal(mark)
    return [pid for pid, parent in parents.items() if parent in parents]


def with_a_journal(mark: str) -> dict[int, int]:
    """Processes that hold a probe's journal, with their parents. Ray's own may stay for minutes (PlacementGroupCleaner, 2.60)."""
    parents = {}
    for pid in of_run(mark):
        try:
            if any("memfd:nccl-guard-journal" in str(fd.readlink()) for fd in Path(f"/proc/{pid}/fd").iterdir()):
                parents[pid] = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue  # it ended while we looked
    return parents
