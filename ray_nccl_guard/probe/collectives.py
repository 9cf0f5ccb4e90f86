"""The collectives a job may need, each with the values it must return. Imports torch: used by the child and by `eager.py` only."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


class WrongResult(RuntimeError):
    """A collective returned without an error and with wrong numbers."""


@dataclass(frozen=True, slots=True)
class Member:
    """This process as a member of the default group: `cpu` or one CUDA device."""

    rank: int
    world_size: int
    device: torch.device
    deadline_s: float

    def tensor(self, values: torch.Tensor) -> torch.Tensor:
        # Made on the CPU and copied: no kernel of torch's own may be blamed for what NCCL does.
        return values.to(self.device)

    def settle(self) -> None:
        """Wait until the device has done what was asked, or raise TimeoutError.

        `work.wait()` is only stream ordering on NCCL (torch 2.15), so an event is polled against the deadline.
        """
        if self.device.type != "cuda":
            return
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        end_s = time.monotonic() + self.deadline_s
        pause_s = 0.0002
        while not event.query():
            if time.monotonic() > end_s:
                raise TimeoutError(f"the device did not finish within {self.deadline_s:g} s")
            time.sleep(pause_s)
            pause_s = min(0.01, pause_s * 2)


def pattern(rank: int, count: int) -> torch.Tensor:
    """What `rank` contributes: depends on rank and index, and sums exactly in float32 up to 65,536 ranks."""
    # 61 and 7 are primes that divide no power of two: a buffer shifted by a chunk, or two ranks exchanged, changes the sum.
    return (torch.arange(count, dtype=torch.float32) % 61 + 1) * (rank % 7 + 1)


def _expect(name: str, got: torch.Tensor, want: torch.Tensor) -> None:
    got = got.cpu()
    if torch.equal(got, want):
        return
    wrong = (got != want).nonzero().flatten()
    at = int(wrong[0])
    raise WrongResult(
        f"wrong result: {name} returned {got.flatten()[at].item():g} where {want.flatten()[at].item():g} is right "
        f"({len(wrong)} of {want.numel()} elements differ, the first at {at})"
    )


def all_reduce(me: Member, size_bytes: int = 4) -> float:
    """Sum `size_bytes` of float32 over all ranks; returns its seconds."""
    count = max(1, size_bytes // 4)
    weight = sum(rank % 7 + 1 for rank in range(me.world_size))
    tensor = me.tensor(pattern(me.rank, count))
    me.settle()
    start_s = time.monotonic()
    dist.all_reduce(tensor)
    me.settle()
    seconds = time.monotonic() - start_s
    _expect(f"all_reduce {size_bytes} B", tensor, (torch.arange(count, dtype=torch.float32) % 61 + 1) * weight)
    return seconds


# One full DDP bucket, and smaller ones for a network on which even that takes long.
PRICE_SIZES = (25 << 20, 8 << 20, 1 << 20)
_PRICE_ROUNDS = 5
# What the price may cost a start that has already lost its first backend, for each size.
_PRICE_S = 1.0


def price(me: Member, size_bytes: int, seconds: float) -> Iterator[tuple[int, float]]:
    """Median seconds of warm all_reduces by size in bytes: a first call pays for connections and memory as well.

    Args:
        size_bytes, seconds: the largest all_reduce so far: sizes that would take more than about a second are left out.
    """
    if size_bytes < PRICE_SIZES[-1]:  # a few bytes tell the latency only
        size_bytes, seconds = PRICE_SIZES[-1], all_reduce(me, PRICE_SIZES[-1])
    mean = me.tensor(torch.tensor([seconds], dtype=torch.float64))
    dist.all_reduce(mean)  # the ranks must leave out the same ones
    per_byte_s = float(mean.cpu()[0]) / me.world_size / size_bytes
    fitting = [size for size in PRICE_SIZES if per_byte_s * size * (_PRICE_ROUNDS + 1) < _PRICE_S]
    for size in sorted({4, 64 << 10, *fitting[:1], *(s for s in fitting if s == PRICE_SIZES[-1])}):
        yield size, _median_all_reduce_s(me, size)


def _median_all_reduce_s(me: Member, size_bytes: int) -> float:
    tensor = me.tensor(torch.zeros(size_bytes // 4))
    taken = []
    for _ in range(_PRICE_ROUNDS + 1):
        me.settle()
        start_s = time.monotonic()
        dist.all_reduce(tensor)
        me.settle()
        taken.append(time.monotonic() - start_s)
    return sorted(taken[1:])[_PRICE_ROUNDS // 2]


def _broadcast(me: Member) -> None:
    tensor = me.tensor(pattern(me.rank, 64))
    dist.broadcast(tensor, src=0)
    me.settle()
    _expect("broadcast", tensor, pattern(0, 64))


def _all_gather(me: Member) -> None:
    out = [me.tensor(torch.zeros(64)) for _ in range(me.world_size)]
    dist.all_gather(out, me.tensor(pattern(me.rank, 64)))
    me.settle()
    _expect("all_gather", torch.cat([t.cpu() for t in out]), torch.cat([pattern(r, 64) for r in range(me.world_size)]))


def _all_gather_into_tensor(me: Member) -> None:
    out = me.tensor(torch.zeros(64 * me.world_size))
    dist.all_gather_into_tensor(out, me.tensor(pattern(me.rank, 64)))
    me.settle()
    _expect("all_gather_into_tensor", out, torch.cat([pattern(r, 64) for r in range(me.world_size)]))


def _reduce_scatter(me: Member) -> None:
    out = me.tensor(torch.zeros(16))
    dist.reduce_scatter_tensor(out, me.tensor(pattern(me.rank, 16 * me.world_size)))
    me.settle()
    total = sum(pattern(r, 16 * me.world_size) for r in range(me.world_size))
    assert isinstance(total, torch.Tensor)
    _expect("reduce_scatter", out, total[16 * me.rank : 16 * (me.rank + 1)])


def _reduce(me: Member) -> None:
    tensor = me.tensor(pattern(me.rank, 64))
    dist.reduce(tensor, dst=0)
    me.settle()
    if me.rank == 0:
        total = sum(pattern(r, 64) for r in range(me.world_size))
        assert isinstance(total, torch.Tensor)
        _expect("reduce", tensor, total)


def _all_to_all(me: Member) -> None:
    out = me.tensor(torch.zeros(me.world_size))
    dist.all_to_all_single(out, me.tensor(torch.arange(me.world_size, dtype=torch.float32) + 100 * me.rank))
    me.settle()
    _expect("all_to_all", out, torch.arange(me.world_size, dtype=torch.float32) * 100 + me.rank)


def _send_recv(me: Member) -> None:
    if me.world_size < 2:
        return
    # Even ranks send first, so that a blocking transport cannot deadlock; a last odd one out has no partner.
    partner = me.rank ^ 1
    if partner >= me.world_size:
        return
    mine, theirs = me.tensor(pattern(me.rank, 64)), me.tensor(torch.zeros(64))
    for sends in (me.rank < partner, me.rank > partner):
        if sends:
            dist.send(mine, partner)
        else:
            dist.recv(theirs, partner)
    me.settle()
    _expect("send_recv", theirs, pattern(partner, 64))


def _barrier(me: Member) -> None:
    dist.barrier(device_ids=[me.device.index]) if me.device.type == "cuda" else dist.barrier()
    me.settle()


def _object_gather(me: Member) -> None:
    out: list[Any] = [None] * me.world_size
    try:
        dist.all_gather_object(out, ("rank", me.rank))
    except (pickle.UnpicklingError, EOFError, AttributeError, ImportError, IndexError, ValueError) as error:
        # What pickle documents for bytes that nobody has pickled: they came back other than they went out.
        raise WrongResult(f"wrong result: object_gather returned bytes that are no pickle ({error})") from error
    if out != [("rank", rank) for rank in range(me.world_size)]:
        raise WrongResult(f"wrong result: object_gather returned {out!r}")


def _coalesced(me: Member) -> None:
    tensors = [me.tensor(pattern(me.rank, 16)), me.tensor(pattern(me.rank, 32))]
    with dist._coalescing_manager():
        for tensor in tensors:
            dist.all_reduce(tensor)
    me.settle()
    weight = sum(rank % 7 + 1 for rank in range(me.world_size))
    for tensor, count in zip(tensors, (16, 32), strict=True):
        _expect("coalesced all_reduce", tensor, (torch.arange(count, dtype=torch.float32) % 61 + 1) * weight)


def _coalesced_all_gather(me: Member) -> None:
    outs = [me.tensor(torch.zeros(count * me.world_size)) for count in (16, 32)]
    with dist._coalescing_manager():
        for out, count in zip(outs, (16, 32), strict=True):
            dist.all_gather_into_tensor(out, me.tensor(pattern(me.rank, count)))
    me.settle()
    for out, count in zip(outs, (16, 32), strict=True):
        _expect("coalesced all_gather", out, torch.cat([pattern(r, count) for r in range(me.world_size)]))


# The keys are the names a job declares (`GuardedTorchConfig(collectives=...)`); `probe.operations` lists them without torch.
RUN: dict[str, Callable[[Member], Any]] = {
    "all_reduce": all_reduce,
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "all_gather_into_tensor": _all_gather_into_tensor,
    "reduce_scatter": _reduce_scatter,
    "reduce": _reduce,
    "all_to_all": _all_to_all,
    "send_recv": _send_recv,
    "barrier": _barrier,
    "object_gather": _object_gather,
    "coalesced": _coalesced,
    "coalesced_all_gather": _coalesced_all_gather,
}
