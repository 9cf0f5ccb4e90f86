"""What runs in a worker and needs Ray: who this worker is, which device it has, and the variables that launchers set."""

from __future__ import annotations

import os
import socket
from typing import Any

import ray

from ray_nccl_guard import current, facts
from ray_nccl_guard.network import addresses
from ray_nccl_guard.probe import process
from ray_nccl_guard.ray_train import recorder
from ray_nccl_guard.ray_train.recorder import Armed

_NAME_S = 5.0  # glibc's wait for one name server (resolv.conf(5)); a slower answer counts as not known


def describe(rank: int) -> facts.RankFacts:
    """This worker's facts: Ray's identity of node and device, then what the machine itself says."""
    context = ray.get_runtime_context()
    gpu_ids = tuple(str(i) for i in ray.get_gpu_ids())
    address = ray.util.get_node_ip_address()
    known: dict[str, Any] = {
        "node": context.get_node_id(),
        "address": address,
        "addresses": addresses.gather(os.environ, node_ip=address, deadline_s=_NAME_S),
        "gpu_ids": gpu_ids,
        "device_index": _device_index(gpu_ids) if gpu_ids else None,
    }
    return facts.collect(rank, **known)


def _device_index(gpu_ids: tuple[str, ...]) -> int:
    """The index that `ray.train.torch.get_device()` has, which training will use."""
    from ray.train.torch import get_device

    # Ray looks the id up in CUDA_VISIBLE_DEVICES and raises ValueError where that is unset or holds UUIDs (2.60).
    try:
        index = get_device().index
    except (ValueError, IndexError, RuntimeError):
        index = None
    if index is not None:
        return int(index)
    return int(gpu_ids[0]) if gpu_ids[0].isdigit() else 0


def import_torch() -> None:
    """What a V2 worker has done before `on_start`, and a V1 worker has not: outside every deadline that means something."""
    import torch.distributed  # noqa: F401


def get_ready(report: dict[str, Any], rank: int, node: str, name: str | None) -> tuple[Armed, int]:
    """All that a worker needs before its group is made, in one question: the report, the recorder, and on rank 0 a port.

    Args:
        report: for `ray_nccl_guard.current_report()` in this process.
        name: of the recorder's run (`recorder.arm`).
    """
    current.set_current(report)
    return recorder.arm(rank, node, name), _free_port() if rank == 0 else 0


def _free_port() -> int:
    """A TCP port that was free a moment ago, for the training group's own store (Ray finds it in the same way)."""
    with socket.socket() as listener:
        listener.bind(("", 0))
        return int(listener.getsockname()[1])


def unlink_shared_memory(pids: tuple[int, ...]) -> None:
    """Unlink NCCL's files in /dev/shm that spent workers of this node still hold: nobody does it once they are killed."""
    process.unlink(process.shared_memory_in(pids))
