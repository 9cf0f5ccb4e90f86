"""Faults that a user's own module brings into the workers: unpickling it (it travels in train_loop_config) replaces a call of torch.

This is the way in which real jobs bring code into a worker before `on_start`; nothing of the guard is replaced.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable
from typing import Any

ACTIONS: dict[str, Callable[[], None]] = {
    "abort": os.abort,
    "hang_gil": lambda: ctypes.PyDLL(None).pause() and None,
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "sleep": lambda: time.sleep(3600),
}


def _raise() -> None:
    raise RuntimeError("a fault that the test made")


ACTIONS["raise"] = _raise


class Fault:
    """`action` when `torch.distributed.CALL` is called on `rank`, in the probe's child or in the worker itself.

    `once` is a file: the fault strikes only the process that creates it. `call` may be `TCPStore`, which the launcher uses.
    """

    def __init__(self, where: str, call: str, action: str, rank: int = 1, once: str = "") -> None:
        self.arguments = (where, call, action, rank, once)

    def __reduce__(self) -> tuple[Any, ...]:
        return (install, self.arguments)


def install(where: str, call: str, action: str, rank: int, once: str) -> Fault:
    fault = Fault(where, call, action, rank, once)
    if "RayTrainWorker" not in _actor_name():
        return fault  # the driver and the controller unpickle it too
    import torch.distributed as dist

    here = os.getpid()
    original = getattr(dist, call)

    def faulty(*args: Any, **kwargs: Any) -> Any:
        import ray.train

        in_child = os.getpid() != here
        mine = _rank.get("rank", -1) if in_child else ray.train.get_context().get_world_rank()
        if not in_child:
            _rank["rank"] = mine
        if in_child == (where == "child") and mine == rank and _first(once):
            ACTIONS[action]()
        return original(*args, **kwargs)

    setattr(dist, call, faulty)
    if where == "child":
        _remember_rank(dist)
    return fault


_rank: dict[str, int] = {}


def _remember_rank(dist: Any) -> None:
    """A forked child must not call into Ray, so the worker notes its rank when its launcher meets the store."""
    original = dist.PrefixStore

    def noting(*args: Any, **kwargs: Any) -> Any:
        if "rank" not in _rank:
            import ray.train

            _rank["rank"] = ray.train.get_context().get_world_rank()
        return original(*args, **kwargs)

    dist.PrefixStore = noting


def _first(once: str) -> bool:
    if not once:
        return True
    try:
        os.close(os.open(once, os.O_CREAT | os.O_EXCL))
        return True
    except FileExistsError:
        return False


def _actor_name() -> str:
    import ray

    worker = ray._private.worker.global_worker
    return str(worker.actor_name or "") + type(next(iter(worker.actors.values()), None)).__name__
