"""The stages before any child: one worker's way to the store, who is absent there, and its host's connections to the others."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from ray_nccl_guard.network.addresses import AddressChoice
from ray_nccl_guard.network.reach import ConnectResult, connect
from ray_nccl_guard.network.stage import PeersRow, peers_stage
from ray_nccl_guard.probe.exchange import Exchange
from ray_nccl_guard.probe.spec import RankTask, Step
from ray_nccl_guard.probe.store import Link, arrive


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """What one rank saw of the network.

    Attributes:
        reach: its connection to the store.
        error: torch's own exception where its client failed although the connection stood.
        absent: ranks that had not come to the store by the deadline.
        row: its host's row of the matrix; None for ranks that do not speak for their host.
    """

    rank: int
    reach: ConnectResult
    error: str = ""
    absent: tuple[int, ...] = ()
    row: PeersRow | None = None
    seconds: float = 0.0


def meet(task: RankTask, speakers: Sequence[int], choice: AddressChoice) -> Meeting:
    """Meet the other ranks at the store and, if this rank speaks for its host, connect to the other hosts."""
    started_s = time.monotonic()
    reach = connect(task.store_host, task.store_port, task.deadline_s(Step.STORE))
    if not reach.ok:
        return Meeting(rank=task.rank, reach=reach, seconds=time.monotonic() - started_s)
    try:
        store = Link(task).connect(task.deadline_s(Step.STORE), "meet")
        absent = tuple(arrive(store, task, task.deadline_s(Step.STORE)))
    except RuntimeError as error:  # torch's DistError family
        error_text = f"{type(error).__name__}: {error}"
        return Meeting(rank=task.rank, reach=reach, error=error_text, seconds=time.monotonic() - started_s)
    row = None
    if task.rank in speakers and len(speakers) > 1:
        row = peers_stage(
            rank=task.rank,
            speakers=speakers,
            choice=choice,
            backend="gloo" if task.backend == "gloo" else "nccl",
            run_id=task.run_id,
            exchange=Exchange(store, task.rank, [s for s in speakers if s not in absent]),
            deadline_s=task.deadline_s(Step.PEERS),
        )
    return Meeting(rank=task.rank, reach=reach, absent=absent, row=row, seconds=time.monotonic() - started_s)
