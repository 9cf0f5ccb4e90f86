"""Ranks that go out of step on NCCL with the recorder on, as `recorder.arm` switches it on in a worker."""

from __future__ import annotations

import base64
import os
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ray_nccl_guard.ray_train import flight_pull, recorder
from tests.fakegpu.bodies import join

CULPRIT = 1
SETTLE_S = 2.0  # after the culprit is at its odd place, the others are in their collective


def skips(rank: int, device: torch.device) -> None:
    if rank == CULPRIT:
        time.sleep(60)  # the culprit sleeps
    dist.all_reduce(torch.ones(16).to(device))


def other_operation(rank: int, device: torch.device) -> None:
    if rank == CULPRIT:
        dist.broadcast(torch.ones(16).to(device), 0)
    else:
        dist.all_reduce(torch.ones(16).to(device))


def other_size(rank: int, device: torch.device) -> None:
    dist.all_reduce(torch.ones(64 if rank == CULPRIT else 16).to(device))


def one_more(rank: int, device: torch.device) -> None:
    if rank == CULPRIT:
        dist.all_reduce(torch.ones(8).to(device))


def nothing_odd(rank: int, device: torch.device) -> None:
    pass


def _train(rank: int, device: torch.device, odd: str, at_place: threading.Event) -> None:
    for _ in range(3):
        dist.all_reduce(torch.ones(16).to(device))
        torch.cuda.synchronize()
    at_place.set()
    globals()[odd](rank, device)
    torch.cuda.synchronize()


def pulled(rank: int, world: int, odd: str, backend: str, folder: str) -> dict[str, Any]:
    """Run the loop beside, and after a while do what the guard does in a worker: pull on the main thread."""
    os.environ.update(recorder.settings_for(torch.__version__, folder, os.environ))
    device = join(rank, backend, timeout_s=120)
    at_place = threading.Event()
    threading.Thread(target=_train, args=(rank, device, odd, at_place), name="TrainingThread(x)", daemon=True).start()
    assert at_place.wait(60)
    time.sleep(SETTLE_S)
    had = flight_pull.pull()
    Path(folder, f"done_{rank}").touch()
    while len(list(Path(folder).glob("done_*"))) < world:
        time.sleep(0.05)  # no dump may show the end of the test
    return {
        "dumps": {name: base64.b64encode(data).decode() for name, data in had.dumps.items()},
        "place": [list(frame) for frame in had.place],
        "groups": {name: list(ranks) for name, ranks in had.groups.items()},
        "notes": list(had.notes),
    }


def killed_by_its_watchdog(rank: int, world: int, backend: str, folder: str, timeout_s: float) -> dict[str, Any] | None:
    """The culprit sleeps and can be asked; torch's watchdog ends the others, which leave a file each."""
    os.environ.update(recorder.settings_for(torch.__version__, folder, os.environ))
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "1"  # as Ray sets it
    device = join(rank, backend, timeout_s=timeout_s)
    for _ in range(3):
        dist.all_reduce(torch.ones(16).to(device))
        torch.cuda.synchronize()
    if rank != CULPRIT:
        dist.all_reduce(torch.ones(16).to(device))
        torch.cuda.synchronize()
        time.sleep(60)  # the watchdog frees the device first, and ends the process a moment later
        return None
    time.sleep(timeout_s + 8)  # the watchdog looks once a second, dumps, and gives the others a moment to dump too
    had = flight_pull.pull()
    return {"dumps": {name: base64.b64encode(data).decode() for name, data in had.dumps.items()}}
