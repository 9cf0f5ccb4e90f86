"""Who reaches whom where the store itself is not reached: whoever leads the ranks carries the ports from host to host."""

from __future__ import annotations

import time
from collections.abc import Sequence

from ray_nccl_guard.network.addresses import AddressChoice, Library
from ray_nccl_guard.network.cells import Target
from ray_nccl_guard.network.listener import Listener
from ray_nccl_guard.network.peers import probe
from ray_nccl_guard.network.stage import PeersRow
from ray_nccl_guard.probe.spec import RankTask, Step

# Listening has to outlive a round and two questions of the leader; `stop` ends it, and this if the leader is gone.
_LISTEN_S = 60.0

_listening: dict[str, Listener] = {}


def listen(task: RankTask, choice: AddressChoice) -> Target | None:
    """Listen where the backend would, and say where; None where this host takes no address, or cannot listen on it."""
    library = Library.GLOO if task.backend == "gloo" else Library.NCCL
    address = choice.of(library).address
    if not address:
        return None
    try:
        listener = Listener(address, rank=task.rank, run_id=task.run_id, deadline_s=_LISTEN_S)
    except OSError:
        return None  # an address that is none of this host's has its own finding (network.across)
    _listening[task.run_id] = listener.__enter__()
    return Target(rank=task.rank, address=address, port=listener.port)


def look(task: RankTask, choice: AddressChoice, targets: Sequence[Target]) -> PeersRow:
    """One round of connections to the other hosts."""
    started_s = time.monotonic()
    cells = probe(task.rank, targets, run_id=task.run_id, deadline_s=task.deadline_s(Step.PEERS))
    return PeersRow(rank=task.rank, choice=choice, rounds=(cells,), seconds=time.monotonic() - started_s)


def stop() -> None:
    """End what `listen` began, before anything forks."""
    for listener in _listening.values():
        listener.close()
    _listening.clear()
