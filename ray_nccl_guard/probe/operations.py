"""The names of the collectives a job may declare, and the presets of jobs that people run. No torch: read in the driver."""

from __future__ import annotations

from collections.abc import Iterable

OPERATIONS = (
    "all_reduce",
    "broadcast",
    "all_gather",
    "all_gather_into_tensor",
    "reduce_scatter",
    "reduce",
    "all_to_all",
    "send_recv",
    "barrier",
    "object_gather",
    "coalesced",
    "coalesced_all_gather",
)

# What gloo has not for CUDA tensors (torch 2.4 to 2.15): there is no CUDA class of send and receive, which take the raw
# pointer (pytorch#11387), and a coalesced all_gather into a tensor crashes the process (pytorch#152645).
GLOO_LACKS_ON_CUDA = {"send_recv": "pytorch#11387", "coalesced_all_gather": "pytorch#152645"}

# What each kind of job calls, read in torch 2.15: DDP broadcasts parameters and all-reduces buckets; SyncBatchNorm gathers
# statistics; FSDP gathers parameters into one tensor and scatters gradients; tensor parallelism reduces and gathers
# activations; pipeline stages send and receive.
PRESETS: dict[str, tuple[str, ...]] = {
    "ddp": ("broadcast", "all_reduce", "barrier", "object_gather"),
    "syncbn": ("all_reduce", "all_gather"),
    "fsdp": ("broadcast", "all_reduce", "all_gather_into_tensor", "reduce_scatter", "barrier", "object_gather"),
    "tp": ("all_reduce", "all_gather_into_tensor", "reduce_scatter", "all_to_all"),
    "pp": ("send_recv", "broadcast", "all_reduce", "barrier"),
}

DEFAULT = ("ddp", "syncbn")


def expand(names: str | Iterable[str] | None) -> tuple[str, ...]:
    """Operation names, in the order of `OPERATIONS`, for presets and names mixed freely (`None` is ddp + syncbn).

    Raises:
        ValueError: a name is neither an operation nor a preset.
    """
    wanted = DEFAULT if names is None else (names,) if isinstance(names, str) else tuple(names)
    found: set[str] = set()
    for name in wanted:
        if name in PRESETS:
            found.update(PRESETS[name])
        elif name in OPERATIONS:
            found.add(name)
        else:
            raise ValueError(
                f"collectives: {name!r} is neither a preset ({', '.join(PRESETS)}) nor an operation ({', '.join(OPERATIONS)})"
            )
    return tuple(name for name in OPERATIONS if name in found)
