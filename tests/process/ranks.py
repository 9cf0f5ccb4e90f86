"""Ranks as real processes: each is forked from the test, plays a worker, and runs the launcher; no Ray needed."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
import uuid
from collections.abc import Callable
from typing import Any

from ray_nccl_guard.probe import launch, store
from ray_nccl_guard.probe.spec import ProbeResult, ProbeSpec, RankTask

# Short, so that a hang costs seconds; long enough for two busy cores.
QUICK = ProbeSpec(store_s=5, comm_init_s=6, comm_init_per_rank_s=0, collective_s=6, device_s=20, teardown_s=3)


def run_ranks(
    world_size: int,
    *,
    backend: str = "gloo",
    spec: ProbeSpec = QUICK,
    before: Callable[[int], None] | None = None,
    after: Callable[[int, ProbeResult], ProbeResult] | None = None,
    absent: tuple[int, ...] = (),
    deadline_s: float = 60.0,
    **changes: Any,
) -> list[ProbeResult]:
    """Probe a world of real processes. `before(rank)` runs in the rank's process, before its child is forked: what it
    replaces there (in torch, in the C library) is the fault. `after(rank, result)` runs there behind the probe and gives the
    result to answer with."""
    run_id = uuid.uuid4().hex[:8]
    context = multiprocessing.get_context("fork")
    answers: Any = context.SimpleQueue()
    ports: Any = context.SimpleQueue()

    def rank_process(rank: int) -> None:
        os.setpgid(0, 0)
        if before is not None:
            before(rank)
        if rank == 0:
            opened = store.open_store(run_id, "127.0.0.1")  # in rank 0's process, as in a worker
            for _ in range(world_size - 1):
                ports.put(opened)
        else:
            opened = ports.get()
        task = RankTask(
            run_id=run_id,
            backend=backend,
            rank=rank,
            world_size=world_size,
            store_host="127.0.0.1",
            store_port=opened.port,
            accept_s=opened.accept_s,
            spec=spec,
            **{name: value(rank) if callable(value) else value for name, value in changes.items()},
        )
        result = launch.run_rank(task)
        answers.put(result if after is None else after(rank, result))
        if rank == 0:
            leave.get()  # the store ends with this process, and must outlive the other launchers

    leave: Any = context.SimpleQueue()
    processes = [context.Process(target=rank_process, args=(rank,)) for rank in range(world_size) if rank not in absent]
    try:
        for process in processes:
            process.start()
        results: list[ProbeResult] = []
        end_s = time.monotonic() + deadline_s
        while len(results) < len(processes):
            assert time.monotonic() < end_s, f"only {len(results)} of {len(processes)} launchers answered in {deadline_s} s"
            if answers.empty():
                time.sleep(0.02)
            else:
                results.append(answers.get())
        leave.put(None)
        for process in processes:
            process.join(5)
        return sorted(results, key=lambda r: r.rank)
    finally:
        for process in processes:
            if process.pid is not None and process.is_alive():
                os.kill(process.pid, signal.SIGKILL)
                process.join(5)


def in_child(rank: int, wanted: int, name: str, fault: Callable[[], None]) -> None:
    """On rank `wanted`, make `torch.distributed.NAME` run `fault` first. Only the probe's child calls it."""
    if rank != wanted:
        return
    import torch.distributed as dist

    original = getattr(dist, name)

    def faulty(*args: Any, **kwargs: Any) -> Any:
        fault()
        return original(*args, **kwargs)

    setattr(dist, name, faulty)


def children_of(pid: int) -> set[int]:
    """PIDs of the living children of `pid`."""
    found = set()
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat") as file:
                    fields = file.read().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[1]) == pid and fields[0] != "Z":
                found.add(int(entry))
    return found
