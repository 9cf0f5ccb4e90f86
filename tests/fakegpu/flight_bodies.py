"""Ranks that go out of step on NCCL with the recorder on, as `recorder.arm` switches it on in a worker."""

from __future__ import annotations

import base64
import os
import signal
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


# A model and groups are made before anything odd happens.
PREPARES_S = {"ddp_unused_branch": 12.0, "mesh_skips": 6.0, "mesh_other_operation": 6.0}


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


def other_dtype(rank: int, device: torch.device) -> None:
    # As many bytes, so that nothing but the type tells them apart.
    dist.all_reduce(torch.ones(16, dtype=torch.int32 if rank == CULPRIT else torch.float32).to(device))


def hangs_in_nccl(rank: int, device: torch.device) -> None:
    dist.all_reduce(torch.ones(16).to(device))  # a fault of the double keeps one rank's from running


def dies(rank: int, device: torch.device) -> None:
    if rank == CULPRIT:
        time.sleep(SETTLE_S / 2)  # the others have read what it has written for them before
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(16).to(device))


def mesh_skips(rank: int, device: torch.device) -> None:
    """Rows [0, 1], [2, 3] and columns [0, 2], [1, 3]: the culprit's row stands, then its neighbours' columns, then all."""
    rows = [dist.new_group(ranks, group_desc="tp") for ranks in ([0, 1], [2, 3])]
    columns = [dist.new_group(ranks, group_desc="dp") for ranks in ([0, 2], [1, 3])]
    for step in range(3):
        if rank == CULPRIT and step == 2:
            time.sleep(60)  # the culprit of the mesh sleeps
        dist.all_reduce(torch.ones(8).to(device), group=rows[rank // 2])
        torch.cuda.synchronize()
        dist.all_reduce(torch.ones(32).to(device), group=columns[rank % 2])
        torch.cuda.synchronize()


def mesh_other_operation(rank: int, device: torch.device) -> None:
    """The same mesh: in one row a rank broadcasts where its neighbour reduces; the other row's ranks wait in their columns."""
    rows = [dist.new_group(ranks, group_desc="tp") for ranks in ([0, 1], [2, 3])]
    columns = [dist.new_group(ranks, group_desc="dp") for ranks in ([0, 2], [1, 3])]
    for step in range(3):
        if rank == CULPRIT and step == 2:
            dist.broadcast(torch.ones(8).to(device), 0, group=rows[0])
        else:
            dist.all_reduce(torch.ones(8).to(device), group=rows[rank // 2])
        torch.cuda.synchronize()
        dist.all_reduce(torch.ones(32).to(device), group=columns[rank % 2])
        torch.cuda.synchronize()


def ddp_unused_branch(rank: int, device: torch.device) -> None:
    class Branched(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.common, self.branch = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.common(x)
            return x if rank == CULPRIT else self.branch(x)

    model = torch.nn.parallel.DistributedDataParallel(Branched().to(device), device_ids=[device.index])
    model(torch.ones(2, 8).to(device)).sum().backward()


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
    time.sleep(PREPARES_S.get(odd, SETTLE_S))
    had = flight_pull.pull()
    Path(folder, f"done_{rank}").touch()
    while len(list(Path(folder).glob("done_*"))) < world - (odd == "dies"):
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
