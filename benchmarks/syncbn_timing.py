"""Where a training step of `syncbn.py` spends its time: marks around every collective of one step, CUDA events on a GPU.

The step is bounded by a synchronised device. Statistics: from the call of SyncBatchNorm's collective to its result, on the
stream that computes, which waits meanwhile. Gradients: from a bucket being ready (DDP's communication hook) to its sum being
there; what the step waits for is from the last bucket being ready to the end of backward. Compute is the rest.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

# What torch 2.4 to 2.15 call from SyncBatchNorm, and the written-out layer too.
COLLECTIVES = ("all_gather_single", "all_gather_into_tensor", "all_gather", "all_reduce")


@dataclass(frozen=True)
class Step:
    """Seconds of one step, and how many collectives and buckets it had.

    `gradients_s` is what the step waits for the gradients, DDP's writing back included; `gradients_busy_s` is the time in which
    at least one bucket was under way, be it behind backward.
    """

    total_s: float
    statistics_s: float
    gradients_s: float
    gradients_busy_s: float
    collectives: int
    buckets: int

    @property
    def compute_s(self) -> float:
        return self.total_s - self.statistics_s - self.gradients_s


class Marks:
    """Marks in time on one device, told in seconds since `start()`."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device if device.type == "cuda" else None
        self._begin: Any = None
        self._begin_s = 0.0

    def settle(self) -> None:
        """Wait until the device has nothing left to do."""
        if self._cuda is not None:
            torch.cuda.synchronize(self._cuda)

    def start(self) -> None:
        self.settle()
        self._begin_s = time.perf_counter()
        self._begin = self.mark()

    def mark(self) -> Any:
        """Now, as the current stream sees it: it may not have got there yet."""
        if self._cuda is None:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._cuda))
        return event

    def at_s(self, mark: Any) -> float:
        """When a mark was passed; on a GPU only behind `settle()`."""
        if isinstance(mark, float):  # of this process's clock
            return mark - self._begin_s
        return float(self._begin.elapsed_time(mark)) / 1e3


class StepTimer:
    """Times steps of one model. gloo's results are there when its thread says so, not on a stream: the process's clock then."""

    def __init__(self, device: torch.device, group: Any) -> None:
        self.marks = Marks(device)
        self._group = group
        self._on_stream = device.type == "cuda" and group is not None and "nccl" in dist.get_backend(group)
        self._statistics: list[tuple[Any, Any]] = []
        self._buckets: list[list[Any]] = []
        self._backward: Any = None
        self._inside = False

    def begin(self) -> None:
        self._statistics, self._buckets, self._backward = [], [], None
        self.marks.start()

    def backward_ended(self) -> None:
        self._backward = self.marks.mark()

    def end(self) -> Step:
        last = self.marks.mark()
        self.marks.settle()
        at_s = self.marks.at_s
        statistics = [(at_s(begin), at_s(end)) for begin, end in self._statistics]
        buckets = [(at_s(begin), at_s(end)) for begin, end in self._buckets]
        waited_s = max(0.0, at_s(self._backward) - max(begin for begin, _ in buckets)) if buckets else 0.0
        return Step(
            total_s=at_s(last),
            statistics_s=covered_s(statistics),
            gradients_s=waited_s,
            gradients_busy_s=covered_s(buckets),
            collectives=len(statistics),
            buckets=len(buckets),
        )

    def hook(self, state, bucket):  # type: ignore[no-untyped-def]  # DDP compares annotations as objects, not as strings
        """DDP's own averaging as a communication hook, with marks where a bucket is ready and where its sum is there."""
        times = [self.marks.mark(), None]
        self._buckets.append(times)
        tensor = bucket.buffer().div_(dist.get_world_size(self._group))
        future = dist.all_reduce(tensor, group=self._group, async_op=True).get_future()

        def there(done: Any) -> Any:
            times[1] = self.marks.mark() if self._on_stream else time.perf_counter()
            return done.value()[0]

        return future.then(there)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """While it lasts, every blocking collective of this process is marked: in a step these are SyncBatchNorm's."""
        kept = {name: getattr(dist, name) for name in COLLECTIVES if hasattr(dist, name)}
        try:
            for name, call in kept.items():
                setattr(dist, name, self._marked(call))
            yield
        finally:
            for name, call in kept.items():
                setattr(dist, name, call)

    def _marked(self, call: Any) -> Any:
        def marked(*args: Any, **options: Any) -> Any:
            if options.get("async_op") or self._inside:  # a bucket's, or one collective that is made of another
                return call(*args, **options)
            self._inside = True
            try:
                begin = self.marks.mark()
                result = call(*args, **options)
                self._statistics.append((begin, self.marks.mark()))
                return result
            finally:
                self._inside = False

        return marked


def covered_s(intervals: list[tuple[float, float]]) -> float:
    """Seconds that lie in at least one of the intervals."""
    total_s, reached_s = 0.0, 0.0
    for begin_s, end_s in sorted(intervals):
        total_s += max(0.0, end_s - max(begin_s, reached_s))
        reached_s = max(reached_s, end_s)
    return total_s
