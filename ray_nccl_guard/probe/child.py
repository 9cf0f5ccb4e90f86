"""The disposable child: runs the steps of one rank's probe and ends. Everything that may crash or hang does so here."""

from __future__ import annotations

import os
import sys
import traceback
from datetime import timedelta
from typing import Any, NoReturn

from ray_nccl_guard.probe.journal import Journal, start_pulse, wait_for_go
from ray_nccl_guard.probe.spec import MIB, RankTask, Start, Step

# How the child ends, told apart from what torch or the kernel may return.
EXIT_OK, EXIT_FAILED, EXIT_SPAWN_ME = 0, 7, 8

# The child's group must outlive every step's deadline: the launcher decides what hangs, from outside, and a watchdog that
# fires first would only replace silence by an abort. An hour is past any sum of deadlines.
GROUP_TIMEOUT = timedelta(hours=1)


def run(task: RankTask, start: Start, journal: Journal, pulse_fd: int) -> NoReturn:
    """Run the probe's steps, recording each, and end the process without returning."""
    step = Step.IMPORT
    code = EXIT_FAILED
    try:
        start_pulse(pulse_fd)
        for step, work in _steps(task, start, journal):
            journal.write(step.value, "start")
            if step is Step.COMM_INIT:
                # Rank 0's worker serves the store from a thread that looks up the name of whoever connects, under a lock
                # of glibc's resolver. A child forked in that moment waits for the lock for ever (seen with torch 2.15.0),
                # so nobody connects before every rank has its child.
                journal.write(step.value, "doing", "waiting for the other ranks")
                wait_for_go(pulse_fd)
                journal.write(step.value, "start")
            work()
            journal.write(step.value, "ok")
        code = EXIT_OK
    except _SpawnMe as reason:
        journal.write(step.value, "spawn_me", str(reason))
        code = EXIT_SPAWN_ME
    except BaseException as error:  # the outermost frame of a process that ends here: what is caught becomes evidence
        _print_failure(error)
        journal.write(step.value, "failed", told(error))
    finally:
        # Never return into the worker's stack, and run no exit handler: this may be a fork of a Ray worker.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def told(error: BaseException) -> str:
    """An exception as the evidence quotes it."""
    text = f"{type(error).__name__}: {error}"
    if type(error).__name__ == "OutOfMemoryError":
        # In a job's log this class of torch's speaks of the model; here there is none.
        text = f"the probe could not get a few MiB of GPU memory: {text}"
    return text[:8192]


def _print_failure(error: BaseException) -> None:
    # Frames without their source lines: a quoted `raise SomeError("text")` would stand in the log like the error itself.
    for frame in traceback.extract_tb(error.__traceback__):
        sys.stderr.write(f"  at {frame.filename}:{frame.lineno} in {frame.name}\n")
    sys.stderr.write("".join(traceback.format_exception_only(error)))


class _SpawnMe(Exception):
    """This fork cannot use CUDA because the parent already has; only a fresh process can tell anything."""


def _steps(task: RankTask, start: Start, journal: Journal) -> list[tuple[Step, Any]]:
    child: Any = _Child(task, start, journal)
    if task.drill is not None:
        from ray_nccl_guard.probe.act import ActedSteps

        child = ActedSteps(task, journal)
    return [
        (Step.IMPORT, child.import_torch),
        (Step.DEVICE, child.open_device),
        (Step.COMM_INIT, child.form_communicator),
        (Step.COLLECTIVE, child.warm_up),
        (Step.TEARDOWN, child.tear_down),
    ]


class _Child:
    """The steps share a store and a device; each method is one step."""

    def __init__(self, task: RankTask, start: Start, journal: Journal) -> None:
        self.task, self.start, self.journal = task, start, journal
        self.store: Any = None

    def import_torch(self) -> None:
        import torch

        # An OpenMP pool that the parent has used hangs a fork at its first parallel loop (torch 2.14.1, measured); one
        # thread never enters it. Before anything else touches a tensor.
        torch.set_num_threads(1)
        if self.start is Start.FORK and self.task.device_index is not None and torch.cuda._is_in_bad_fork():
            raise _SpawnMe("CUDA was initialised in the worker before the probe")
        import torch.distributed as dist

        avoid_random_hang(torch.__version__)
        if not dist.is_available():
            raise RuntimeError("torch.distributed is not available in this build of torch")

    def open_device(self) -> None:
        import torch

        index = self.task.device_index
        if index is None:
            if _wants_gpu(self.task.backend):
                self._hear_refusal()
            return
        torch.cuda.set_device(index)
        free_bytes, _ = torch.cuda.mem_get_info(index)
        # Work without NCCL first: CUDA that is broken on its own must not be called an NCCL failure, and torch 2.15's
        # nccl aborts instead of raising when CUDA fails inside its constructor (measured).
        (torch.ones(256).to(f"cuda:{index}") + 1).cpu()
        torch.cuda.synchronize(index)
        self.journal.write(Step.DEVICE.value, "note", device=f"cuda:{index}", free_before_bytes=free_bytes)

    def _hear_refusal(self) -> None:
        """A GPU backend without a GPU: let torch itself say why not, in its own words."""
        import torch
        import torch.distributed as dist

        dist.init_process_group(self.task.backend, store=dist.HashStore(), rank=0, world_size=1)
        raise RuntimeError(
            f"no CUDA device is visible to this worker (torch.cuda.is_available() is {torch.cuda.is_available()})"
        )

    def form_communicator(self) -> None:
        import torch
        import torch.distributed as dist

        task = self.task
        timeout = timedelta(seconds=task.deadline_s(Step.COMM_INIT) + task.deadline_s(Step.COLLECTIVE) + 60)
        tcp = dist.TCPStore(task.store_host, task.store_port, None, False, timeout=timeout, wait_for_workers=False)
        self.store = dist.PrefixStore(f"{task.run_id}/group", tcp)
        options: dict[str, Any] = {}
        if task.device_index is not None and _wants_gpu(task.backend):
            options["device_id"] = torch.device("cuda", task.device_index)
        dist.init_process_group(
            task.backend,
            store=self.store,
            rank=task.rank,
            world_size=task.world_size,
            timeout=GROUP_TIMEOUT,
            **options,
        )

    def warm_up(self) -> None:
        import torch

        from ray_nccl_guard.probe import collectives

        task, note = self.task, self.journal
        device = torch.device("cpu") if task.device_index is None else torch.device("cuda", task.device_index)
        me = collectives.Member(task.rank, task.world_size, device, deadline_s=GROUP_TIMEOUT.total_seconds())
        for size in warm_up_sizes(task.spec.sizes_bytes, task.backend):
            note.write(Step.COLLECTIVE.value, "doing", f"all_reduce {size} B")
            seconds = collectives.all_reduce(me, size)
            note.write(Step.COLLECTIVE.value, "proved", "all_reduce", size_bytes=size, seconds=seconds)
        for name in task.collectives:
            if name != "all_reduce":
                note.write(Step.COLLECTIVE.value, "doing", name)
                collectives.RUN[name](me)
                note.write(Step.COLLECTIVE.value, "proved", name)
        if task.price:
            note.write(Step.COLLECTIVE.value, "doing", "all_reduce for the price")
            for priced_bytes, priced_s in collectives.price(me, size, seconds):
                note.write(Step.COLLECTIVE.value, "priced", size_bytes=priced_bytes, seconds=priced_s)
        if task.device_index is not None:
            note.write(Step.COLLECTIVE.value, "note", free_after_bytes=torch.cuda.mem_get_info(task.device_index)[0])

    def tear_down(self) -> None:
        import torch.distributed as dist

        # A rank that leaves while another still reads its last bytes makes that one report a dead peer (gloo). The store
        # lives in rank 0's worker, so it can be asked to the end.
        if self.store.add("finished", 1) == self.task.world_size:
            self.store.set("all_finished", "1")
        self.store.wait(["all_finished"], timedelta(seconds=self.task.deadline_s(Step.TEARDOWN) + 60))
        if _wants_gpu(self.task.backend):
            dist.destroy_process_group()  # gloo's, whose threads take 20 ms to be joined (torch 2.15.0), ends with this process


def _wants_gpu(backend: str) -> bool:
    return "nccl" in backend


def warm_up_sizes(sizes_bytes: tuple[int, ...], backend: str) -> tuple[int, ...]:
    """The all_reduce sizes for `backend`: sizes above 1 MiB guard against NCCL's protocol thresholds, gloo has none."""
    return sizes_bytes if _wants_gpu(backend) else tuple(s for s in sizes_bytes if s <= MIB) or sizes_bytes[:1]


def avoid_random_hang(torch_version: str) -> None:
    """Switch off non-blocking communicators where eager initialisation hangs at random with them.

    torch 2.6.0 to 2.7.0 made them the default (pytorch#138527); they hang with NCCL 2.26 (#153960), and 2.7.1 switched
    them off again (#154055). What the user has set stands.
    """
    numbers = tuple(int(part) for part in torch_version.split("+")[0].split(".")[:3] if part.isdigit())
    if (2, 6, 0) <= numbers <= (2, 7, 0):
        os.environ.setdefault("TORCH_NCCL_USE_COMM_NONBLOCKING", "0")
