"""What a killed launcher's child had in shared memory is unlinked by the process that outlives both for a moment."""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import time
from pathlib import Path

from ray_nccl_guard.probe.process import PR_SET_PDEATHSIG
from ray_nccl_guard.probe.sweep import Sweep


def hold(path: Path) -> None:
    """In a child: holds `path` as NCCL does, until its parent dies."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    with open(path, "w+b") as file:
        file.truncate(4096)
        mapped = mmap.mmap(file.fileno(), 4096)
    time.sleep(60)
    mapped.close()


def launcher(path: Path, ready: int) -> None:
    """In a process of its own: has such a child, looks as a launcher does, and tells once somebody waits."""
    child = os.fork()
    if child == 0:
        hold(path)
        os._exit(0)
    sweep = Sweep(child)
    while not standing_by(path):
        sweep.look(time.monotonic())
        time.sleep(0.02)
    os.write(ready, b"%d" % child)
    time.sleep(60)


def standing_by(path: Path) -> list[int]:
    """Processes that wait to unlink `path`: those that nobody of ours is the parent of."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            started = (
                b"sys.stdin.read" in (entry / "cmdline").read_bytes()
                and str(path).encode() in (entry / "cmdline").read_bytes()
            )
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it ended while we looked
        if started and fields[0] != "Z" and fields[2] != entry.name:  # the first of its group has handed over
            found.append(int(entry.name))
    return found


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def until(holds, within_s: float = 10.0) -> bool:
    end_s = time.monotonic() + within_s
    while not holds() and time.monotonic() < end_s:
        time.sleep(0.02)
    return bool(holds())


def test_a_killed_launchers_child_leaves_no_file_and_no_process():
    path = Path(f"/dev/shm/nccl-sweep{os.getpid()}")
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            launcher(path, write)
        finally:
            os._exit(1)
    try:
        child = int(os.read(read, 16))
        assert path.exists() and standing_by(path)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        assert until(lambda: not path.exists() and gone(child) and not standing_by(path)), (
            "its file, or the process that removes it, is left"
        )
    finally:
        path.unlink(missing_ok=True)
        os.close(read)
        os.close(write)


def test_a_child_without_such_a_file_costs_no_process():
    sweep = Sweep(os.getpid())
    sweep.look(time.monotonic() + 10)
    assert sweep._started == []
    sweep.end()


def test_the_end_of_a_child_unlinks_what_is_left_and_takes_what_is_gone_already():
    paths = [Path(f"/dev/shm/nccl-sweepend{number}x{os.getpid()}") for number in range(2)]
    held = []
    for path in paths:
        with open(path, "w+b") as file:
            file.truncate(4096)
            held.append(mmap.mmap(file.fileno(), 4096))
    sweep = Sweep(os.getpid())
    sweep.look(time.monotonic() + 10)
    assert len(sweep._started) == 1, "one process for both"
    paths[0].unlink()
    sweep.end()
    assert not paths[1].exists() and sweep._started == []
    assert until(lambda: not standing_by(paths[1]))
    for mapped in held:
        mapped.close()
