"""What the ranks of test_syncbn.py run: the benchmark's own measuring, and the same training by one process on all images."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks import syncbn_model
from benchmarks.syncbn_timing import StepTimer
from benchmarks.syncbn_worker import images, measure

CONFIG: dict[str, Any] = {
    "models": ["tiny"], "dtypes": ["fp32"], "batches": [3], "image": 8, "steps": 2, "rounds": 2, "minutes": 5,
    "sizes": [4, 1024],
}  # fmt: skip


def join(rank: int, world: int, device: str) -> torch.device:
    torch.set_num_threads(1)
    if device == "cpu":
        dist.init_process_group("gloo", rank=rank, world_size=world)
        return torch.device("cpu")
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=world, device_id=torch.device("cuda", rank))
    return torch.device("cuda", rank)


def measured(rank: int, world: int, device: str, **changes: Any) -> dict[str, Any]:
    backends = ["gloo"] if device == "cpu" else ["nccl", "gloo"]
    where = join(rank, world, device)
    answer = measure({**CONFIG, "backends": backends, **changes}, where, None)
    answer["expected"] = whole(world, CONFIG["steps"] * (CONFIG["rounds"] + 1))
    return answer


def whole(world: int, steps: int) -> list[float]:
    """The losses of one CPU process with torch's own BatchNorm on the images of all ranks."""
    torch.manual_seed(0)
    model = syncbn_model.build("tiny")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    parts = [images(CONFIG["batches"][0], CONFIG["image"], rank) for rank in range(world)]
    pictures, labels = (torch.cat([part[i] for part in parts]) for i in (0, 1))
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(pictures), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def statistics(rank: int, world: int) -> dict[str, list[float]]:
    """Running mean and variance of the first layer, and the gradient of its weight: written out over two ranks, and whole."""
    join(rank, world, "cpu")
    parts = [torch.randn(2 + other, 3, 4, 4, generator=torch.Generator().manual_seed(other)) for other in range(world)]
    found = {}
    for name, group, x in (("ranks", dist.group.WORLD, parts[rank]), ("whole", None, torch.cat(parts))):
        layer: Any = nn.Sequential(nn.BatchNorm2d(3))
        if group is not None:
            layer = syncbn_model.written_out(layer, group)
        layer[0].weight.data.copy_(torch.tensor([0.5, 1.0, 2.0]))
        (layer(x).pow(3) * torch.linspace(-1, 1, 3).view(1, -1, 1, 1)).sum().backward()
        gradient = layer[0].weight.grad
        if group is not None:
            dist.all_reduce(gradient)
        found[name] = [v for t in (layer[0].running_mean, layer[0].running_var, gradient) for v in t.tolist()]
    return found


def split(rank: int, world: int, delay_s: float) -> dict[str, Any]:
    """A step in which rank 1 comes late to a statistics collective, by a pause before it: rank 0 waits in the collective."""
    device = join(rank, world, "cpu")
    timer = StepTimer(device, dist.group.WORLD)
    dist.barrier()
    with timer.watching():
        timer.begin()
        if rank == 1:
            time.sleep(delay_s)
        dist.all_reduce(torch.ones(4))
        timer.backward_ended()
        step = timer.end()
    untouched = dist.all_reduce.__module__ != StepTimer.__module__
    return {"statistics_s": step.statistics_s, "compute_s": step.compute_s, "count": step.collectives, "put_back": untouched}


def wrong(rank: int, world: int) -> str:
    """NCCL is made to add wrongly (FAKE_FAULT): the benchmark must not print a figure for it."""
    measured(rank, world, "cuda")
    return "measured"
