"""Training functions for the fake GPUs: each rank notes what it ran on as JSON."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import ray.train
import torch
import torch.distributed as dist
from ray.train import Checkpoint

nn = torch.nn


def write(config: dict[str, Any], **more: Any) -> None:
    """Note this rank's backend, GPU, a checked sum and the guard's own report, and what the function adds."""
    from ray_nccl_guard import current_report

    rank = ray.train.get_context().get_world_rank()
    device = ray.train.torch.get_device()
    x = torch.full((8,), float(rank + 1)).to(device)
    dist.all_reduce(x)
    report = current_report()
    noted = {
        "rank": rank,
        "backend": dist.get_backend(),
        "sum": x.cpu()[0].item(),
        "gpu": str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None,
        "action": report["action"] if report else None,
        "nccl": {
            name: value
            for name, value in os.environ.items()
            if name.endswith(("_DISABLE", "_ENABLE")) and name.startswith("NCCL_")
        },
        **more,
    }
    (Path(config["notes"]) / str(rank)).write_text(json.dumps(noted))


def note(config: dict[str, Any]) -> None:
    write(config)


def tells_its_cards(config: dict[str, Any]) -> None:
    """Notes the GPUs on which this process holds memory, as its communicator does: NVML's word, not torch's."""
    import pynvml

    dist.all_reduce(torch.ones(1).to(ray.train.torch.get_device()))
    pynvml.nvmlInit()
    cards = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
    held = [c for c in cards if os.getpid() in (p.pid for p in pynvml.nvmlDeviceGetComputeRunningProcesses(c))]
    write(config, cards=[pynvml.nvmlDeviceGetUUID(card) for card in held])


def sets_late(config: dict[str, Any]) -> None:
    """Settings made where they come too late."""
    os.environ["NCCL_P2P_DISABLE"] = "1"
    os.environ.pop("NCCL_P2P_DISABLE", None) if config.get("undo") else None
    write(config)


def makes_a_group_on_nccl(config: dict[str, Any]) -> None:
    """Asks for NCCL by name, as libraries do, whatever the job has fallen back to."""
    for _ in range(2):
        try:
            dist.new_group(backend="nccl")  # the line that the warning must name
        except RuntimeError:
            pass  # torch 2.15 forms it at once, and meets the fault
    write(config)


def makes_its_own_group(config: dict[str, Any]) -> None:
    """Reads the group as Lightning and Accelerate do, then ends it and forms its own."""
    default = dist.distributed_c10d._get_default_group()
    seen = {
        "launch": all(name in os.environ for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")),
        "bound": str(default.bound_device_id),
        "accelerate": os.environ.get("ACCELERATE_TORCH_DEVICE"),
    }
    halves = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    x = torch.ones(1).to(ray.train.torch.get_device())
    dist.all_reduce(x, group=halves[dist.get_rank()])
    rank, world = dist.get_rank(), dist.get_world_size()
    address = [(os.environ["MASTER_ADDR"], _free_port())]
    dist.broadcast_object_list(address, src=0)
    host, port = address[0]
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group("nccl", init_method=f"tcp://{host}:{port}", rank=rank, world_size=world)
    write(config, **seen)


def _free_port() -> int:
    from tests.fakegpu.ranks import free_port

    return free_port()


def net() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5))


def batch(world: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(4 * world, 3, 8, 8, generator=generator), torch.randint(0, 5, (4 * world,), generator=generator)


def alone(world: int, steps: int) -> list[float]:
    """The losses of one CPU process on the whole batch."""
    torch.manual_seed(0)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = batch(world)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def train(config: dict[str, Any]) -> None:
    """DDP with SyncBatchNorm on this rank's part of a fixed batch; checkpoints every step, and loses a worker if asked to."""
    rank, world, device = dist.get_rank(), dist.get_world_size(), ray.train.torch.get_device()
    steps = int(config.get("steps", 3))
    torch.manual_seed(0)
    model = nn.SyncBatchNorm.convert_sync_batchnorm(net()).to(device)
    first, losses = 0, []
    if (checkpoint := ray.train.get_checkpoint()) is not None:
        with checkpoint.as_directory() as folder:
            state = torch.load(f"{folder}/state.pt", map_location="cpu")
        model.load_state_dict(state["model"])
        first, losses = state["steps"], state["losses"]
    ddp = nn.parallel.DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    x, y = batch(world)
    part = slice(4 * rank, 4 * rank + 4)
    for step in range(first, steps):
        if step == config.get("dies_at") and checkpoint is None and rank == 1:
            os._exit(17)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(ddp(x[part].to(device)), y[part].to(device))
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.cpu().item() / world)
        if config.get("checkpoints"):
            save(rank, {"model": {k: v.cpu() for k, v in model.state_dict().items()}, "steps": step + 1, "losses": losses})
    write(config, losses=losses, alone=alone(world, steps), first=first)


def save(rank: int, state: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        if rank == 0:
            torch.save(state, f"{folder}/state.pt")
        ray.train.report({"step": state["steps"]}, checkpoint=Checkpoint.from_directory(folder) if rank == 0 else None)
