"""A rank without Ray: joins the store, and runs on its main thread what the leading process asks of it, until told to end."""

from __future__ import annotations

import os
import pickle
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from ray_nccl_guard import facts
from ray_nccl_guard.errors import GuardError
from ray_nccl_guard.network import addresses
from ray_nccl_guard.network.cells import Code
from ray_nccl_guard.network.reach import connect
from ray_nccl_guard.probe import launch, look_around, meet, parcel

# One store request by each rank per look; all together stay below 10,000 a second (see probe.store).
LOOK_S = 0.02
_REQUESTS_PER_S = 10_000.0
# A leader that asks nothing for this long is gone: its longest wait of its own is for ranks that join, see `Place.join_s`.
IDLE_S = 600.0
_NAME_S = 5.0  # as for Ray's workers (ray_train.on_worker)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where one rank stands, and where its leader's store is.

    Attributes:
        device_index: its GPU among those its process sees; None for the CPU.
        join_s: how long the store may take to come up and the other ranks to join.
        room: prefix of the keys, so that two runs in one store (torchrun's survives a restart) do not meet.
    """

    rank: int
    world_size: int
    local_rank: int
    store_host: str
    store_port: int
    device_index: int | None = None
    join_s: float = 60.0
    room: str = "probe"


# What a leader may ask for; the functions of `look_around` come with the store's stage.
_ASKED = (launch.run_rank, launch.settle, meet.meet, look_around.listen, look_around.look, look_around.stop)


class LeaderLost(GuardError):
    """The leading process, or the way to it, is gone: nothing can be said but that."""


class CannotJoin(GuardError):
    """This rank does not reach the store, or another process has taken its rank."""


def look_s(world_size: int) -> float:
    """Seconds between two looks into the store."""
    return max(LOOK_S, 2 * world_size / _REQUESTS_PER_S)


def serve(place: Place) -> int:
    """Join and serve; returns the exit code that the leader tells.

    Raises:
        CannotJoin: the store is not reached within `place.join_s`.
        LeaderLost: the store has gone, or nothing was asked for `IDLE_S`.
    """
    store, address = join(place)
    try:
        return _serve(store, place, address)
    except RuntimeError as error:  # torch's DistError family
        raise LeaderLost(
            f"rank {place.rank}: the store of the probe at {place.store_host} port {place.store_port} has gone: "
            f"rank 0 ended, or the network between broke ({type(error).__name__})"
        ) from error


def join(place: Place) -> tuple[Any, str]:
    """A client of the store with this rank's claim in it, and this host's own address on the way there."""
    import torch.distributed as dist

    end_s = time.monotonic() + place.join_s
    while True:
        left_s = end_s - time.monotonic()
        reach = connect(place.store_host, place.store_port, min(5.0, max(0.1, left_s)), until_it_listens=True)
        if reach.ok:
            break
        if time.monotonic() + 0.5 >= end_s:
            raise CannotJoin(f"rank {place.rank} does not reach the store within {place.join_s:g} s: {reach.text}")
        # A pod's name may not resolve yet, and its network may not be up.
        time.sleep(0.5 if reach.code in (Code.NO_ADDRESS, Code.ECONNREFUSED) else 0.1)
    try:
        left = timedelta(seconds=max(1.0, end_s - time.monotonic()))
        tcp = dist.TCPStore(place.store_host, place.store_port, None, False, timeout=left, wait_for_workers=False)
        store = dist.PrefixStore(place.room, tcp)
        claims = store.add(f"claim/{place.rank}", 1)
    except RuntimeError as error:
        where = f"{place.store_host} port {place.store_port}"
        raise CannotJoin(f"rank {place.rank}: what listens at {where} is no store of torch ({error})") from error
    if claims > 1:
        raise CannotJoin(f"two processes call themselves rank {place.rank} of {place.world_size}")
    return store, reach.source


def _serve(store: Any, place: Place, address: str) -> int:
    functions: dict[str, Callable[..., Any]] = {
        "describe": lambda: describe(place, address),
        **{function.__name__: function for function in _ASKED},
    }
    pause_s = look_s(place.world_size)
    number = 0
    end_s = time.monotonic() + IDLE_S
    while time.monotonic() < end_s:
        key = f"ask/{place.rank}/{number}"
        if not store.check([key]):
            time.sleep(pause_s)
            continue
        name, arguments = _read(store.get(key))
        if name == "end":
            store.add("left", 1)
            return int(arguments[0])
        store.set(f"answer/{place.rank}/{number}", parcel.pack(_call(functions, name, arguments)))
        number += 1
        end_s = time.monotonic() + IDLE_S
    raise LeaderLost(f"rank {place.rank}: nothing was asked for {IDLE_S:g} s: rank 0 hangs")


def _read(data: bytes) -> tuple[str, tuple[Any, ...]]:
    try:
        name, arguments = parcel.unpack(data)
        return str(name), tuple(arguments)
    except (pickle.UnpicklingError, ValueError, TypeError, EOFError) as error:
        raise LeaderLost(f"what stands in the store is no question of the probe: {error}") from error


def _call(functions: dict[str, Callable[..., Any]], name: str, arguments: tuple[Any, ...]) -> tuple[str, Any]:
    try:
        return "ok", functions[name](*arguments)
    except Exception as error:  # what a function raises is the answer; the leader decides what it means
        return "raised", f"{type(error).__name__}: {error}"[:4000]


def describe(place: Place, address: str) -> facts.RankFacts:
    """This rank's facts. Its node is its host name and its address: two pods may have one name, and none has both."""
    index = place.device_index
    loopback = address.startswith("127.") or address == "::1"
    known: dict[str, Any] = {
        "node": f"{socket.gethostname()}/{address}",
        "address": address,
        "addresses": addresses.gather(os.environ, node_ip="" if loopback else address, deadline_s=_NAME_S),
        "local_rank": place.local_rank,
        "device_index": index,
        "gpu_ids": () if index is None else (_gpu_id(index),),
    }
    return facts.collect(place.rank, **known)


def _gpu_id(index: int) -> str:
    seen = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return seen[index].strip() if index < len(seen) and seen[index].strip() else str(index)
