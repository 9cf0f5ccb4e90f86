"""A live run's workers, found by name from another driver: the controller leaves their handles in Ray's own key-value store."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray import cloudpickle
from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_get, _internal_kv_list, _internal_kv_put

from ray_nccl_guard.flight.sheet import About
from ray_nccl_guard.ray_train.recorder import Armed
from ray_nccl_guard.ray_train.workers import is_v2

log = logging.getLogger("ray.train.nccl_guard")

# The handles are pickled outside of a task, so Ray does not count them: they keep no worker alive. Neither the state API
# (it gives no handle) nor a named actor (one more process per run) does as well.
_NAMESPACE = b"ray_nccl_guard"
_PREFIX = "flight/"


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveRun:
    """A worker group as it was announced.

    Attributes:
        actors: the workers' handles, by rank.
        method: the method of a worker that executes a function on its main thread.
        about: what the run knows of itself.
        since: the controller's clock when the group started (Unix seconds), to tell runs of one name apart.
    """

    run_name: str
    actors: tuple[Any, ...]
    method: str
    armed: tuple[Armed, ...]
    about: About
    since: float

    def __len__(self) -> int:
        return len(self.actors)

    def execute_single_async(self, rank: int, function: Callable[..., Any], *args: Any) -> Any:
        """The one call that `Workers.ask` needs of a worker group."""
        return getattr(self.actors[rank], self.method).remote(function, *args)


def announce(group: Any, armed: Sequence[Armed], run_name: str, unique: str, about: About) -> str:
    """Leave the group's handles; returns the key, empty if they could not be left (the run goes on without)."""
    key = f"{_PREFIX}{run_name}/{unique}"
    try:
        workers = group.get_workers() if is_v2(group) else group.workers
        run = LiveRun(
            run_name=run_name,
            actors=tuple(worker.actor for worker in workers),
            method="execute" if is_v2(group) else "_RayTrainWorker__execute",
            armed=tuple(armed),
            about=about,
            since=time.time(),
        )
        _internal_kv_put(key, cloudpickle.dumps(run), overwrite=True, namespace=_NAMESPACE)
    except Exception as error:  # Ray's store, private since ever: what it raises in some release must not end a start
        log.debug("nccl_guard: flight --run will not find this run: %r", error)
        return ""
    return key


def withdraw(key: str) -> None:
    """Forget a group. A controller that is killed leaves its key; `find` tells that the workers are dead."""
    if key:
        try:
            _internal_kv_del(key, namespace=_NAMESPACE)
        except Exception as error:  # as in `announce`
            log.debug("nccl_guard: %s stays in Ray's store: %r", key, error)


def names() -> list[str]:
    """The runs that have announced themselves and not ended."""
    return sorted({key.decode()[len(_PREFIX) :].rpartition("/")[0] for key in _keys(_PREFIX)})


def find(run_name: str) -> LiveRun | None:
    """The newest group of that name, None if there is none. Needs `ray.init`."""
    found = []
    for key in _keys(f"{_PREFIX}{run_name}/"):
        data = _internal_kv_get(key, namespace=_NAMESPACE)
        if data:
            found.append(cloudpickle.loads(data))
    return max(found, key=lambda run: run.since, default=None)


def _keys(prefix: str) -> list[bytes]:
    assert ray.is_initialized()
    return list(_internal_kv_list(prefix, namespace=_NAMESPACE))
