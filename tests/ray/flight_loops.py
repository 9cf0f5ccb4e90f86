"""Training loops that go wrong on purpose, as users' loops do. Each returns the line that a reader has to be shown."""

from __future__ import annotations

import json
import os
import signal
import time
from datetime import timedelta
from typing import Any

CULPRIT = 1


def _steps(config: dict[str, Any], count: int = 2) -> int:
    import ray.train
    import torch
    import torch.distributed as dist

    rank = int(ray.train.get_context().get_world_rank())
    with open(f"{config['notes']}/{rank}", "w") as file:
        json.dump({"rank": rank, "dumps": os.environ["TORCH_FR_DUMP_TEMP_FILE"]}, file)
    for _ in range(count):
        dist.all_reduce(torch.ones(16))
        dist.broadcast(torch.ones(4), 0)
    return rank


def healthy(config: dict[str, Any]) -> None:
    _steps(config)


def rank_skips(config: dict[str, Any]) -> None:
    import torch
    import torch.distributed as dist

    rank = _steps(config)
    if rank != CULPRIT:
        dist.all_reduce(torch.ones(16))


def other_operation(config: dict[str, Any]) -> None:
    import torch
    import torch.distributed as dist

    rank = _steps(config)
    if rank == CULPRIT:
        dist.all_gather([torch.ones(16) for _ in range(3)], torch.ones(16))  # the odd line
    else:
        dist.all_reduce(torch.ones(16))


def other_size(config: dict[str, Any]) -> None:
    import torch
    import torch.distributed as dist

    rank = _steps(config)
    # gloo aborts the process of a rank that receives more than it expects: an innocent neighbour of the culprit.
    dist.all_reduce(torch.ones(640 if rank == CULPRIT else 16))


def rank_dies(config: dict[str, Any]) -> None:
    import torch
    import torch.distributed as dist

    rank = _steps(config)
    if rank == CULPRIT:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(16))


def next_batch() -> None:
    time.sleep(120)  # the data loader stands still


def sleeps_in_the_data_loader(config: dict[str, Any]) -> None:
    import torch
    import torch.distributed as dist

    rank = _steps(config)
    if rank == CULPRIT:
        next_batch()
    dist.all_reduce(torch.ones(16))


def one_more_collective(config: dict[str, Any]) -> None:
    import torch
    import torch.distributed as dist

    rank = _steps(config)
    if rank == CULPRIT:
        dist.all_reduce(torch.ones(8))  # only if loss.isnan(), say


def raises_alone(config: dict[str, Any]) -> None:
    import torch
    import torch.distributed as dist

    rank = _steps(config)
    if rank == CULPRIT:
        time.sleep(1)  # the others are in the collective by now
        raise ValueError("a label out of range")
    dist.all_reduce(torch.ones(16))


def keeps_the_gil(config: dict[str, Any]) -> None:
    """Hangs in C without giving the interpreter back: the worker answers nothing any more."""
    import ctypes

    import torch
    import torch.distributed as dist

    rank = _steps(config)
    if rank == CULPRIT:
        ctypes.PyDLL(None).sleep(120)
    dist.all_reduce(torch.ones(16))


def ddp_unused_branch(config: dict[str, Any]) -> None:
    """In its last step one rank takes no part in a branch of the model, so DDP reduces nothing there."""
    import torch

    rank = _steps(config)

    class Branched(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.common, self.branch = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

        def forward(self, x: torch.Tensor, take_branch: bool) -> torch.Tensor:
            x = self.common(x)
            return self.branch(x) if take_branch else x

    model = torch.nn.parallel.DistributedDataParallel(Branched())
    for step in range(3):
        loss = model(torch.ones(2, 8), step < 2 or rank != CULPRIT).sum()
        loss.backward()  # DDP reduces here


def mesh_other_operation(config: dict[str, Any]) -> None:
    """A 2 x 2 mesh: in one row of it a rank gathers where its neighbour reduces."""
    import torch
    import torch.distributed as dist

    rank = _steps(config)
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    row, column = mesh.get_group("tp"), mesh.get_group("dp")
    for group in (row, column):  # a mesh takes torch's own default, 30 minutes on gloo, not the timeout of the whole group
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=config["hang_s"]), group)
    for step in range(3):
        if rank == CULPRIT and step == 2:
            dist.all_gather([torch.ones(8) for _ in range(2)], torch.ones(8), group=row)  # the odd call of the mesh
        else:
            dist.all_reduce(torch.ones(8), group=row)
        dist.all_reduce(torch.ones(32), group=column)


def waits_for_a_file(config: dict[str, Any]) -> None:
    """Hangs until the test lets it go, and then ends well."""
    import torch
    import torch.distributed as dist

    rank = _steps(config)
    if rank == CULPRIT:
        while not os.path.exists(config["go"]):
            time.sleep(0.2)  # the live culprit
    dist.all_reduce(torch.ones(16))


def moves_until_a_file(config: dict[str, Any]) -> None:
    import torch
    import torch.distributed as dist

    rank = _steps(config)
    go_on = torch.ones(1)
    while go_on.item():
        time.sleep(0.05)
        if rank == 0 and os.path.exists(config["go"]):
            go_on.zero_()
        dist.broadcast(go_on, 0)


def line_of(needle: str) -> int:
    """The line number here that holds `needle`."""
    with open(__file__) as file:
        return next(number for number, line in enumerate(file, 1) if needle in line)
