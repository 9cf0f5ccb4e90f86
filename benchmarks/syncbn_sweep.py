"""Single collectives of `syncbn.py`: all_reduce and all_gather from 4 B up, each backend in turn, with their values checked."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import harness
from benchmarks.syncbn_names import OPERATIONS


class WrongValues(RuntimeError):
    """A backend computed something else than it should: what it took for that is no figure."""


def rounds_of(size: int) -> int:
    """How often a size is timed: large ones take long and vary little."""
    return 30 if size <= 1 << 20 else 10 if size <= 16 << 20 else 5


def sweep(groups: dict[str, Any], control: Any, device: torch.device, asked: list[int]) -> list[dict[str, Any]]:
    """Seconds of every operation and size by backend: from the call until the result is there, on the slowest rank."""
    answers = []
    for operation in OPERATIONS:
        for size in asked:
            make = _all_reduce if operation == "all_reduce" else _all_gather
            runs = {name: _timed(make(group, device, size), control, device) for name, group in groups.items()}
            taken = harness.alternate(runs, rounds=rounds_of(size), warm_up=2)
            for name, seconds in taken.items():
                slowest = torch.tensor(seconds, dtype=torch.float64)
                dist.all_reduce(slowest, dist.ReduceOp.MAX, group=control)
                answers.append({"operation": operation, "bytes": size, "backend": name, "seconds": slowest.tolist()})
            del runs
    return answers


def _timed(run: Callable[[], None], control: Any, device: torch.device) -> Callable[[], float]:
    def once() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        dist.barrier(control)
        start_s = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - start_s

    return once


def _all_reduce(group: Any, device: torch.device, size: int) -> Callable[[], None]:
    rank, world = dist.get_rank(), dist.get_world_size()
    tensor = torch.full((size // 4,), float(rank + 1)).to(device)
    dist.all_reduce(tensor, group=group)
    _check(tensor, world * (world + 1) / 2, f"all_reduce of {size} B on {dist.get_backend(group)}")
    tensor = torch.zeros(size // 4).to(device)  # stays zero: sums of sums would overflow
    return lambda: dist.all_reduce(tensor, group=group)


def _all_gather(group: Any, device: torch.device, size: int) -> Callable[[], None]:
    """`size` is the result's, rounded up so that every rank gives as many whole bytes."""
    rank, world = dist.get_rank(), dist.get_world_size()
    each = -(-size // world)
    own = torch.full((each,), (rank + 1) % 256, dtype=torch.uint8).to(device)
    gathered = torch.zeros(each * world, dtype=torch.uint8).to(device)
    parts = list(gathered.chunk(world))
    dist.all_gather(parts, own, group=group)
    for other, part in enumerate(parts):
        _check(part, (other + 1) % 256, f"all_gather of {size} B on {dist.get_backend(group)}")
    return lambda: dist.all_gather(parts, own, group=group)


def _check(tensor: torch.Tensor, value: float, what: str) -> None:
    low, high = tensor.min().item(), tensor.max().item()
    if low != value or high != value:
        raise WrongValues(f"{what} gave {low:g} to {high:g} where every element is {value:g}")
