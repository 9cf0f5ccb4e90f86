"""Gives the double's kernels an effect: aten's CUDA ops run their CPU kernels on the (host) "device memory".

Without it every kernel is silently a no-op. Installing takes about 0.25 s and makes no CUDA call, so a process may fork
afterwards. A stream is drained before each op: a hang shows at the next op, not at the next synchronisation as on a GPU.
"""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map

# Not replaced: ops that allocate, view or copy (torch's own code does these right, on any memory), ops of libraries that
# are not there, and the CUDA-only parts of SyncBatchNorm, which have no CPU kernel and are written below.
LEFT_ALONE = (
    *("empty", "new_empty", "_efficientzerotensor", "copy", "to_copy", "as_strided", "view", "set_", "resize", "lift"),
    *("record_stream", "pin_memory", "is_pinned", "_local_scalar_dense", "_reshape_alias", "unfold", "is_set_to"),
    *("_has_same_storage", "cudnn", "miopen", "_fused_rms", "segment"),
    *("batch_norm_stats", "batch_norm_gather", "batch_norm_elemt", "batch_norm_backward"),
)

_library: torch.library.Library | None = None  # the registrations live as long as this


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """A CPU tensor over the same bytes as a CUDA tensor."""
    size = tensor.untyped_storage().nbytes()
    if size == 0 or tensor.numel() == 0:
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
    memory = (ctypes.c_char * size).from_address(tensor.untyped_storage().data_ptr())
    flat = torch.frombuffer(memory, dtype=torch.uint8)[: size // tensor.itemsize * tensor.itemsize]
    return flat.view(tensor.dtype).as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())


def on_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A CUDA tensor with the values of a CPU tensor."""
    out = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)
    if tensor.numel():
        alias(out).copy_(tensor)
    return out


class _Call:
    """One call of an op: its CUDA arguments as CPU aliases, and the way back for what it returns."""

    def __init__(self) -> None:
        self.device: torch.device | None = None
        self.pairs: list[tuple[torch.Tensor, torch.Tensor, torch.Size]] = []

    def down(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.is_cuda:
            if self.device is None:
                self.device = value.device
                torch.cuda.current_stream(value.device).synchronize()
            self.pairs.append((value, alias(value), value.size()))
            return self.pairs[-1][1]
        if isinstance(value, torch.device) and value.type == "cuda":
            self.device = self.device or value
            return torch.device("cpu")
        return None if isinstance(value, torch.Generator) else value

    def keep_resized(self) -> None:
        """An out= argument that the CPU kernel made larger no longer lies in the CUDA tensor's memory."""
        for original, cpu, size in self.pairs:
            moved = cpu.numel() and cpu.untyped_storage().data_ptr() != original.untyped_storage().data_ptr()
            if cpu.size() != size or moved:
                original.resize_(cpu.size())
                original.copy_(cpu)

    def up(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        for original, cpu, _ in self.pairs:
            if value is cpu:
                return original
        return on_device(value, self.device or torch.device("cuda", torch.cuda.current_device()))


def through_cpu(op: Callable[..., Any]) -> Callable[..., Any]:
    """The CUDA kernel that runs `op`'s CPU kernel on aliases."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        call = _Call()
        result = op(*tree_map(call.down, args), **tree_map(call.down, kwargs))
        call.keep_resized()
        return tree_map(call.up, result)

    return kernel


def _register(name: str, kernel: Callable[..., Any]) -> None:
    assert _library is not None
    try:
        _library.impl(name, kernel, "CUDA", allow_override=True)
    except TypeError:  # torch before 2.7 has no allow_override, and overrides with a warning
        _library.impl(name, kernel, "CUDA")


def install() -> int:
    """Replaces the CUDA kernels of aten in this process; the number of ops replaced. A second call does nothing."""
    global _library
    if _library is not None:
        return 0
    torch.backends.cudnn.enabled = False
    _library = torch.library.Library("aten", "IMPL")
    names = [
        *torch._C._dispatch_get_registrations_for_dispatch_key("CUDA"),
        "aten::convolution",
        "aten::convolution_backward",
    ]
    replaced = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # one "overriding a previously registered kernel" per op
        for qualified in names:
            namespace, _, name = qualified.partition("::")
            base, _, overload = name.partition(".")
            if namespace != "aten" or base.lstrip("_").startswith(LEFT_ALONE) or base.startswith(LEFT_ALONE):
                continue
            op = getattr(getattr(torch.ops.aten, base, None), overload or "default", None)
            if op is not None:  # some names are registered for dispatch only and cannot be called from Python
                _register(name, through_cpu(op))
                replaced += 1
        for name, kernel in {"copy_": copy_, **SYNC_BATCH_NORM}.items():
            _register(name, kernel)
    return replaced


def copy_(self: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """aten::copy_ between any two of CPU and CUDA, also with another dtype or layout."""
    for tensor in (self, source):
        if tensor.is_cuda:
            torch.cuda.current_stream(tensor.device).synchronize()
    (alias(self) if self.is_cuda else self).copy_(alias(source) if source.is_cuda else source)
    return self


# The CUDA-only kernels of SyncBatchNorm, by their formulas: statistics per channel, over batch and space.


def _per_channel(like: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return values.view([1, -1] + [1] * (like.dim() - 2))


def _all_but_channel(tensor: torch.Tensor) -> list[int]:
    return [0, *range(2, tensor.dim())]


def _stats(x: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    torch.cuda.current_stream().synchronize()
    values, dims = alias(x).float(), _all_but_channel(x)
    inverse = (values.var(dims, unbiased=False) + eps).rsqrt()
    return on_device(values.mean(dims), x.device), on_device(inverse, x.device)


def _gather(x, mean, inverse, running_mean, running_var, momentum, eps, counts):  # type: ignore[no-untyped-def]
    """Mean and 1/std over all ranks from each rank's; updates the running statistics."""
    torch.cuda.current_stream().synchronize()
    means, inverses, n = alias(mean).float(), alias(inverse).float(), alias(counts).float().view(-1, 1)
    total = n.sum()
    all_mean = (means * n).sum(0) / total
    variance = ((1 / inverses**2 - eps + (means - all_mean) ** 2) * n).sum(0) / total
    if running_mean is not None:
        alias(running_mean).mul_(1 - momentum).add_(momentum * all_mean)
    if running_var is not None:
        alias(running_var).mul_(1 - momentum).add_(momentum * variance * total / (total - 1))
    return on_device(all_mean, x.device), on_device((variance + eps).rsqrt(), x.device)


def _elementwise(x, weight, bias, mean, inverse, eps):  # type: ignore[no-untyped-def]
    torch.cuda.current_stream().synchronize()
    out = (alias(x).float() - _per_channel(x, alias(mean))) * _per_channel(x, alias(inverse))
    if weight is not None:
        out = out * _per_channel(x, alias(weight)) + _per_channel(x, alias(bias))
    return on_device(out.to(x.dtype), x.device)


def _backward_reduce(grad, x, mean, inverse, weight, input_g, weight_g, bias_g):  # type: ignore[no-untyped-def]
    torch.cuda.current_stream().synchronize()
    dims, g, centred = _all_but_channel(x), alias(grad).float(), alias(x).float() - _per_channel(x, alias(mean))
    sum_g, sum_gx = g.sum(dims), (g * centred).sum(dims)
    return tuple(on_device(t, x.device) for t in (sum_g, sum_gx, sum_gx * alias(inverse), sum_g))


def _backward_elementwise(grad, x, mean, inverse, weight, sum_g, sum_gx, count):  # type: ignore[no-untyped-def]
    torch.cuda.current_stream().synchronize()
    n, i = alias(count).sum().float(), alias(inverse)
    centred = alias(x).float() - _per_channel(x, alias(mean))
    slope = _per_channel(x, i * i * alias(sum_gx) / n)
    out = (alias(grad).float() - _per_channel(x, alias(sum_g) / n) - centred * slope) * _per_channel(x, i)
    if weight is not None:
        out = out * _per_channel(x, alias(weight))
    return on_device(out.to(x.dtype), x.device)


SYNC_BATCH_NORM: dict[str, Callable[..., Any]] = {
    "batch_norm_stats": _stats,
    "batch_norm_gather_stats_with_counts": _gather,
    "batch_norm_elemt": _elementwise,
    "batch_norm_backward_reduce": _backward_reduce,
    "batch_norm_backward_elemt": _backward_elementwise,
}
