"""The training group: eager initialisation on the worker's device, the same warm-up, and the deadline around both.

Runs in the worker that will train. The work is done in a thread, so that a hang which releases the GIL (NCCL's initialisation
does, torch 2.14.1 and 2.15.0, measured) still lets the worker answer; one that keeps the GIL is told from outside by the
worker's silence. A worker whose group failed is spent either way.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from ray_nccl_guard.probe.spec import LogLine, Outcome, ProbeResult, ProbeSpec, Step, StepRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupTask:
    """All that one worker needs to join the training group.

    Attributes:
        init_method: the URL as `init_process_group` takes it.
        timeout_s: the group's own timeout, as the user set it.
        device_index: bind the group to this visible GPU and form the communicator at once; None to leave it to torch.
        warm_up: prove the group by all_reduce of `spec.sizes_bytes`, values checked.
        variables: what launchers set (RANK, MASTER_ADDR, ...): libraries read them, torch's `env://` too.
        env: settings to make before the first NCCL call of this process.
        accept_s: seconds that the store takes for each connection (`probe.store.Opened`).
    """

    backend: str
    rank: int
    world_size: int
    init_method: str
    timeout_s: float
    device_index: int | None = None
    warm_up_device: int | None = None
    warm_up: bool = True
    variables: dict[str, str] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    accept_s: float = 0.0
    spec: ProbeSpec = ProbeSpec()

    def init_deadline_s(self) -> float:
        """The store and the communicator together: both happen inside one call of torch."""
        store_s = self.spec.store_s + self.accept_s * self.world_size
        return store_s + self.spec.deadline_s(Step.COMM_INIT, self.world_size)


def join(task: GroupTask) -> ProbeResult:
    """Join the training group within the deadlines. Never raises for what the group does: the result tells."""
    os.environ.update({**task.variables, **task.env})
    joining = _Joining(task)
    thread = threading.Thread(target=joining.run, name="nccl-guard-join", daemon=True)
    started_s = time.monotonic()
    thread.start()
    for step, deadline_s in joining.deadlines():
        if not joining.finished[step].wait(deadline_s):
            return joining.result(Outcome.TIMED_OUT, step, f"no end after {deadline_s:g} s", time.monotonic() - started_s)
        if joining.error:
            return joining.result(Outcome.FAILED, joining.step, joining.error, time.monotonic() - started_s)
    thread.join(timeout=1.0)
    return joining.result(Outcome.OK, Step.COLLECTIVE, "", time.monotonic() - started_s)


class _Joining:
    """The thread's side of `join`."""

    def __init__(self, task: GroupTask) -> None:
        self.task = task
        self.step = Step.COMM_INIT
        self.detail = ""
        self.error = ""
        self.trace = ""
        self.steps: list[StepRecord] = []
        self.all_reduce_s: dict[int, float] = {}
        self.finished = {Step.COMM_INIT: threading.Event(), Step.COLLECTIVE: threading.Event()}

    def deadlines(self) -> list[tuple[Step, float]]:
        if not self.task.warm_up:
            # As plain TorchConfig: what bounds the call is the group's own timeout. The margin lets torch's error come first.
            return [(Step.COMM_INIT, self.task.timeout_s + 60)]
        return [(Step.COMM_INIT, self.task.init_deadline_s()), (Step.COLLECTIVE, self.task.spec.collective_s)]

    def run(self) -> None:
        try:
            for step, work in ((Step.COMM_INIT, self._init), (Step.COLLECTIVE, self._warm_up)):
                self.step, started_s = step, time.monotonic()
                work()
                self.steps.append(StepRecord(step=step, outcome=Outcome.OK, seconds=time.monotonic() - started_s))
                self.finished[step].set()
        except Exception as error:  # the outermost frame of this thread: what is caught is the answer
            from ray_nccl_guard.probe.child import told

            self.trace = traceback.format_exc()
            self.error = told(error)
            for event in self.finished.values():
                event.set()

    def _init(self) -> None:
        import torch
        import torch.distributed as dist

        from ray_nccl_guard.probe.child import avoid_random_hang

        task = self.task
        options: dict[str, Any] = {}
        if task.device_index is not None:
            avoid_random_hang(torch.__version__)
            torch.cuda.set_device(task.device_index)
            options["device_id"] = torch.device("cuda", task.device_index)
        if "nccl" in task.backend and "TORCH_NCCL_BLOCKING_WAIT" not in os.environ:
            # Ray's own default for NCCL groups (ray.train.torch.config): a collective that times out ends the job.
            os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
        dist.init_process_group(
            backend=task.backend,
            init_method=task.init_method,
            rank=task.rank,
            world_size=task.world_size,
            timeout=timedelta(seconds=task.timeout_s),
            **options,
        )

    def _warm_up(self) -> None:
        if not self.task.warm_up:
            return
        import torch

        from ray_nccl_guard.probe import collectives
        from ray_nccl_guard.probe.child import warm_up_sizes

        task = self.task
        device = torch.device("cpu") if task.warm_up_device is None else torch.device("cuda", task.warm_up_device)
        me = collectives.Member(task.rank, task.world_size, device, deadline_s=task.spec.collective_s)
        for size in warm_up_sizes(task.spec.sizes_bytes, task.backend):
            self.detail = f"all_reduce {size} B"
            self.all_reduce_s[size] = collectives.all_reduce(me, size)
        if device.type == "cuda":
            torch.cuda.empty_cache()  # the job starts with the memory it would have without the guard

    def result(self, outcome: Outcome, step: Step, error: str, seconds: float) -> ProbeResult:
        steps = list(self.steps)
        if outcome is not Outcome.OK:
            steps.append(StepRecord(step=step, outcome=outcome, seconds=seconds, detail=self.detail))
        stack = self.trace or ("" if outcome is Outcome.OK else _stack_of("nccl-guard-join"))
        return ProbeResult(
            rank=self.task.rank,
            outcome=outcome,
            step=step,
            detail=self.detail,
            error=error,
            steps=tuple(steps),
            lines=tuple(LogLine(source="worker", number=n, text=line) for n, line in enumerate(stack.splitlines()[-40:], 1)),
            proved=("all_reduce",) if outcome is Outcome.OK and self.task.warm_up else (),
            all_reduce_s=dict(self.all_reduce_s),
            device="cpu" if self.task.warm_up_device is None else f"cuda:{self.task.warm_up_device}",
            seconds=seconds,
        )


def _stack_of(thread_name: str) -> str:
    """Where the thread stands now, as a traceback."""
    for thread in threading.enumerate():
        if thread.name == thread_name and thread.ident is not None:
            frame = sys._current_frames().get(thread.ident)
            return "".join(traceback.format_stack(frame)) if frame else ""
    return ""


def leave() -> None:
    """Give up the default group of this process, if there is one, so that another can be made."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
