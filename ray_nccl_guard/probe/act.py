"""A drill's child: passes the steps as a real one does, without NCCL and without the device, and does at its point what was asked.

Where real ranks would meet in the communicator, these meet at the store: whoever waits for a rank that acts waits as in NCCL.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from datetime import timedelta
from typing import Any, NoReturn

from ray_nccl_guard.probe.child import GROUP_TIMEOUT, warm_up_sizes
from ray_nccl_guard.probe.drill import CUDA_ERRORS, OPERATIONS, PRESETS, RESULTS, Fault
from ray_nccl_guard.probe.journal import Journal
from ray_nccl_guard.probe.spec import Outcome, RankTask, Step

# On every line that a drill prints in NCCL's voice: nobody who finds it in a log may take it for the real thing.
MARK = "(drill)"
DEVICE = "none (drill)"


class Drilled(RuntimeError):
    """What a drill raises where NCCL or CUDA would."""


class ActedSteps:
    """The steps of a child that acts; each method is one step, as in `child`."""

    def __init__(self, task: RankTask, journal: Journal) -> None:
        self.task, self.journal = task, journal
        self.faults: tuple[Fault, ...] = task.drill or ()
        self.store: Any = None
        self._meetings = 0

    def import_torch(self) -> None:
        self._pass("import")
        import torch.distributed  # noqa: F401 - the store below is its

    def open_device(self) -> None:
        self.journal.write(Step.DEVICE.value, "note", device=DEVICE)
        self._pass("device")

    def form_communicator(self) -> None:
        import torch.distributed as dist

        task = self.task
        self._pass("init")
        left = timedelta(seconds=task.deadline_s(Step.COMM_INIT) + 60)
        tcp = dist.TCPStore(task.store_host, task.store_port, None, False, timeout=left, wait_for_workers=False)
        self.store = dist.PrefixStore(f"{task.run_id}/drill", tcp)
        self._meet()

    def warm_up(self) -> None:
        sizes = [(f"all_reduce {size} B", "all_reduce", size)
                 for size in warm_up_sizes(self.task.spec.sizes_bytes, self.task.backend)]  # fmt: skip
        others = [(name, name, None) for name in self.task.collectives if name != "all_reduce"]
        for doing, name, size in (*sizes, *others):
            self.journal.write(Step.COLLECTIVE.value, "doing", doing)
            self._pass(OPERATIONS[name], size, doing)
            self._meet()

    def tear_down(self) -> None:
        self._pass("destroy")
        self._meet()

    def _meet(self) -> None:
        self._meetings += 1
        if self.store.add(f"here/{self._meetings}", 1) == self.task.world_size:
            self.store.set(f"all/{self._meetings}", "1")
        self.store.wait([f"all/{self._meetings}"], GROUP_TIMEOUT)

    def _pass(self, point: str, size_bytes: int | None = None, doing: str = "") -> None:
        for fault in self.faults:
            if fault.is_at(point, size_bytes):
                _do(fault, self.task, doing)


def at_store(task: RankTask) -> Outcome | None:
    """Before a rank goes to the store, in the worker's launcher: the outcome of one that is not to come, None if it goes."""
    for fault in task.drill or ():
        if fault.is_at("store"):
            longest_s = 2 * task.deadline_s(Step.STORE)
            time.sleep(longest_s / 2 if fault.action == "hang" else min(fault.number / 1000, longest_s))
            if fault.action == "hang":
                return Outcome.MISSING
    return None


def _do(fault: Fault, task: RankTask, doing: str) -> None:
    # Not a word of the drill's own: the rules read what is printed here, and would find "hang" in it.
    match fault.action:
        case "delay":
            time.sleep(fault.number / 1000)
        case "hang":
            while True:
                time.sleep(3600)
        case "hang-gil":
            ctypes.PyDLL(None).pause()
        case "abort":
            os.abort()
        case "segv":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "exit":
            os._exit(fault.number)
        case "wrong":
            from ray_nccl_guard.probe.collectives import WrongResult

            raise WrongResult(f"wrong result: {doing} returned other numbers than are right {MARK}")
        case _:
            _fail(fault, task)


def _fail(fault: Fault, task: RankTask) -> NoReturn:
    """Fail in the words that NCCL and torch have for it."""
    if fault.action == "cuda":
        raise Drilled(f"CUDA error: {CUDA_ERRORS[fault.number]} {MARK}")
    if fault.action == "oom" and fault.point == "device":
        raise Drilled(f"CUDA error: {CUDA_ERRORS[2]} {MARK}")
    result, line = PRESETS[fault.preset] if fault.preset else (fault.number, "")
    if fault.action == "oom":
        result, line = 1, f"include/alloc.h:178 NCCL WARN Cuda failure 2 '{CUDA_ERRORS[2]}'"
    if line:
        sys.stderr.write(f"{os.uname().nodename}:{os.getpid()}:{os.getpid()} [{task.local_rank}] {line} {MARK}\n")
    raise Drilled(f"NCCL error: {RESULTS[result]} {MARK}")
