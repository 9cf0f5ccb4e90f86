"""The price: what a training step spends on communication with the backend that was chosen, from what the probe measured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ray_nccl_guard.errors import UsageError
from ray_nccl_guard.report import Report

# DistributedDataParallel's own (torch 2.15): the first bucket is small so that reducing starts early, unless the user sets a size.
_MIB = 1 << 20
_MODEL_BYTES = 100_000_000 * 4
FIRST_BUCKET_BYTES = _MIB
BUCKET_CAP_MB = 25.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """Seconds that one step of DistributedDataParallel spends on communication if nothing of it overlaps with computation.

    Attributes:
        seconds: the sum of the parts.
        gradients_s: one all_reduce for each bucket.
        buffers_s: the broadcast of buffers (BatchNorm's statistics) before each forward pass.
        sync_batch_norm_s: one all_gather forward and one all_reduce backward for each SyncBatchNorm layer.
        buckets: bytes of each gradient bucket, in the order in which they are reduced.
        backend: what the measurements were made on.
        measured_bytes: the largest all_reduce that was measured; larger buckets are extrapolated from it.
    """

    seconds: float
    gradients_s: float
    buffers_s: float
    sync_batch_norm_s: float
    buckets: tuple[int, ...]
    backend: str
    measured_bytes: int

    def __str__(self) -> str:
        size = sum(self.buckets) / _MIB
        return f"about {self.seconds:.3g} s of communication a step on {self.backend} ({size:.0f} MiB of gradients)"


def estimate_step_cost(
    model: Any, report: Report | Mapping[str, Any], *, bucket_cap_mb: float | None = None, broadcast_buffers: bool = True
) -> StepCost:
    """What one training step of `model` under DDP spends on communication, with the speed that the probe measured.

    Args:
        model: a `torch.nn.Module`, before or after DDP has wrapped it.
        report: of the run: `current_report()` inside `train_func`, a `Report`, or the JSON of one.
        bucket_cap_mb, broadcast_buffers: as DDP is given them.

    Raises:
        UsageError: the report holds no measurement, since nothing passed or an earlier check was reused.
    """
    data = report.to_json() if isinstance(report, Report) else report
    measured = {int(size): float(seconds) for size, seconds in data.get("all_reduce_s", {}).items()}
    if not measured:
        raise UsageError("the report holds no measured all_reduce, so no price can be said")
    curve, world_size = Curve(measured), int(data["world_size"])
    buckets = gradient_buckets([p for p in model.parameters() if p.requires_grad], bucket_cap_mb)
    gradients_s = sum(map(curve.seconds, buckets))
    buffers_s = sum(map(curve.seconds, _by_type(model.buffers()))) if broadcast_buffers else 0.0
    norm_s = sum(_sync_batch_norm_s(features, curve, world_size) for features in _sync_batch_norms(model))
    return StepCost(
        seconds=gradients_s + buffers_s + norm_s,
        gradients_s=gradients_s,
        buffers_s=buffers_s,
        sync_batch_norm_s=norm_s,
        buckets=buckets,
        backend=str(data["backend_chosen"]),
        measured_bytes=max(measured),
    )


def sentence(report: Report) -> str:
    """What the message says of the price: what was measured, and what it means for a model that people can imagine."""
    chosen = report.chosen
    measured = chosen.all_reduce_s if chosen else {}
    if not measured:
        return ""
    size, backend = max(measured), report.decision.backend
    text = f"all_reduce of {_size(size)} takes {_time(measured[size])} on {backend}; {_other(report, size)}"
    step_s = _MODEL_BYTES / (BUCKET_CAP_MB * _MIB) * Curve(measured).seconds(int(BUCKET_CAP_MB * _MIB))
    guess = "" if size >= BUCKET_CAP_MB * _MIB else ", extrapolated"
    return (
        f"{text}. With 100 million float32 parameters about {_time(step_s)} a step, if nothing of it overlaps{guess} "
        "(ray_nccl_guard.estimate_step_cost(model, current_report()) says it for yours)"
    )


def _other(report: Report, size_bytes: int) -> str:
    """What the backend that the job asked for took, if it ever finished one of that size or a smaller one."""
    asked = report.backend_wanted
    # Only a first call is known of it, if any: good enough for a comparison of the order of magnitude, and said so.
    tries = [a.all_reduce_s for a in report.attempts if a.rung.backend == asked and not a.rung.env and a.all_reduce_s]
    sizes = [size for size in (tries[-1] if tries else {}) if size <= size_bytes]
    if not sizes or report.decision.backend == asked:
        return (
            f"{asked} without the setting was not measured"
            if report.decision.backend == asked
            else f"{asked} never finished one"
        )
    return f"{asked} had taken {_time(tries[-1][max(sizes)])} for {_size(max(sizes))}, its first"


def _size(size_bytes: int) -> str:
    return f"{size_bytes / _MIB:.3g} MiB" if size_bytes >= _MIB else f"{size_bytes} B"


def _time(seconds: float) -> str:
    return f"{seconds:.2g} s" if seconds >= 0.995 else f"{seconds * 1e3:.3g} ms"


class Curve:
    """Seconds of an all_reduce of any size: straight lines between what was measured, the last slope beyond it."""

    def __init__(self, measured: Mapping[int, float]) -> None:
        self.points: Sequence[tuple[int, float]] = sorted(measured.items())

    def seconds(self, size_bytes: int) -> float:
        points = self.points
        if len(points) == 1 or size_bytes <= points[0][0]:
            return points[0][1] * (max(1.0, size_bytes / points[0][0]) if len(points) == 1 else 1.0)
        above = next((i for i, (size, _) in enumerate(points) if size >= size_bytes), len(points) - 1)
        (small, small_s), (large, large_s) = points[above - 1], points[above]
        # Noise may make the larger one look faster; time never goes down with size.
        slope = max(0.0, (large_s - small_s) / (large - small))
        return small_s + slope * (size_bytes - small)


def gradient_buckets(parameters: Sequence[Any], bucket_cap_mb: float | None = None) -> tuple[int, ...]:
    """Bytes of DDP's gradient buckets once it has rebuilt them, after the first step: in the order in which gradients come.

    That order is taken as the reverse of the parameters' order, as DDP itself does before it has seen a step. One open
    bucket for each type and device; it is closed when it has reached the limit (torch's
    `compute_bucket_assignment_by_size`): `bucket_cap_mb`, or if that is None 1 MiB for a type's first one and 25 MiB after.
    """
    first = FIRST_BUCKET_BYTES if bucket_cap_mb is None else bucket_cap_mb * _MIB
    others = (BUCKET_CAP_MB if bucket_cap_mb is None else bucket_cap_mb) * _MIB
    limits: dict[tuple[str, str], float] = {}
    open_bytes: dict[tuple[str, str], int] = {}
    closed: list[int] = []
    for parameter in reversed(parameters):
        kind = (str(parameter.dtype), str(parameter.device))
        open_bytes[kind] = open_bytes.get(kind, 0) + parameter.numel() * parameter.element_size()
        if open_bytes[kind] >= limits.get(kind, first):
            closed.append(open_bytes.pop(kind))
            limits[kind] = others
    return (*closed, *open_bytes.values())


def _by_type(tensors: Any) -> tuple[int, ...]:
    """Bytes of all tensors by their type: each type is broadcast in one piece (DDP's limit of 250 MiB aside)."""
    sizes: dict[str, int] = {}
    for tensor in tensors:
        sizes[str(tensor.dtype)] = sizes.get(str(tensor.dtype), 0) + tensor.numel() * tensor.element_size()
    return tuple(sizes.values())


def _sync_batch_norms(model: Any) -> Iterator[int]:
    """Number of features of each SyncBatchNorm layer, by the name of its class: torch need not be imported here."""
    for module in model.modules():
        if any(kind.__name__ == "SyncBatchNorm" for kind in type(module).__mro__):
            yield int(module.num_features)


def _sync_batch_norm_s(features: int, curve: Curve, world_size: int) -> float:
    """Forward gathers mean, variance and count of each rank, backward sums two vectors (torch/nn/modules/_functions.py)."""
    return curve.seconds(4 * (2 * features + 1) * world_size) + curve.seconds(4 * 2 * features)
