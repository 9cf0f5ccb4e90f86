"""Where a probe's ranks come from without Ray: processes of our own on this host, or one process per rank from a launcher."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from ray_nccl_guard.classes import FailureClass
from ray_nccl_guard.errors import UsageError
from ray_nccl_guard.facts import RankFacts
from ray_nccl_guard.probe import from_env, serve
from ray_nccl_guard.probe.from_env import LaunchedRank
from ray_nccl_guard.probe.leader import Leader
from ray_nccl_guard.probe.local import LocalRanks, visible_gpus
from ray_nccl_guard.probe.serve import Place
from ray_nccl_guard.probe.workers import Answer, values
from ray_nccl_guard.prove.session import CannotProbe, Say, Session
from ray_nccl_guard.report import ranks_text

# Without a GPU there is no number of ranks that a host suggests; two are the fewest that have somebody to talk to.
_RANKS_ON_CPU = 2
_FORKED_JOIN_S = 60.0  # forked ranks have torch already; this is two hundred times what they need on an idle machine
# NVML and the files of the GPU libraries, which are read through once (as for Ray's workers, ray_train.run).
_FACTS_S = 150.0


@contextmanager
def on_this_host(ranks: int | None, backends: tuple[str, ...], say: Say) -> Iterator[Session]:
    """`ranks` processes here, one GPU each if there are any (default: as many as GPUs are visible).

    Raises:
        UsageError: there is no torch, or there are fewer GPUs than ranks.
        CannotProbe: a rank died before it could be asked.
    """
    say("importing torch")
    gpus = _import_torch()
    count = ranks or gpus or (1 if any("nccl" in name for name in backends) else _RANKS_ON_CPU)
    if count > gpus > 0 and any("nccl" in name for name in backends):
        raise UsageError(
            f"{count} ranks need {count} GPUs, and this host shows {gpus} (CUDA_VISIBLE_DEVICES counts)",
            help=(f"--ranks {gpus}", "for a probe on CPUs: --backend gloo"),
        )
    device = range(count) if gpus >= count else [None] * count
    places = [
        Place(rank=r, world_size=count, local_rank=r, store_host="127.0.0.1", store_port=0, device_index=device[r])
        for r in range(count)
    ]
    with LocalRanks(places) as own:
        store = _serve_store(0)
        own.connect(store.port)
        with _led(Leader(_room(store, "probe"), count, own.why_dead), _FORKED_JOIN_S, own, say) as session:
            session.store = ("127.0.0.1", store.port)
            yield session


@contextmanager
def as_launched(me: LaunchedRank, join_s: float, say: Say) -> Iterator[Session]:
    """Rank 0 of ranks that a launcher has started; the others run `follow`.

    Raises:
        CannotProbe: a rank did not come within `join_s`, two processes claim one, or the port is taken.
    """
    say("importing torch")
    place = _place(me, _import_torch(), join_s)
    with LocalRanks([place]) as own:
        try:
            store = _serve_store(me.port) if me.serves_store else _client(me, join_s)
        except RuntimeError as error:  # torch's DistNetworkError
            where = f"rank 0 cannot {'serve' if me.serves_store else 'reach'} the store on {me.host} port {me.port}"
            failure = FailureClass.PORT_IN_USE if me.serves_store else FailureClass.STORE_UNREACHABLE
            raise CannotProbe(
                f"{where}: {str(error).splitlines()[0]}", failure=failure, world_size=me.world_size, ranks=(0,)
            ) from error
        own.connect(store.port)
        with _led(Leader(_room(store, me.room), me.world_size, own.why_dead), join_s, own, say) as session:
            session.store = (me.host, store.port)
            yield session


def follow(me: LaunchedRank, join_s: float) -> int:
    """Any rank but 0: serve until rank 0 tells the exit code.

    Raises:
        GuardError: rank 0 is not reached, or was lost.
    """
    return serve.serve(_place(me, _import_torch(), join_s))


@contextmanager
def _led(leader: Leader, join_s: float, own: LocalRanks, say: Say) -> Iterator[Session]:
    session = Session(workers=leader, facts=())
    try:
        session.facts = _gather(leader, join_s, own, say)
        yield session
    finally:
        leader.end(session.exit_code)


def _gather(leader: Leader, join_s: float, own: LocalRanks, say: Say) -> tuple[RankFacts, ...]:
    size = len(leader)
    begin_s = time.monotonic()
    absent = tuple(leader.absent(join_s, lambda came: say(f"{came} of {size} ranks are there")))
    if absent:
        why = next((why for rank in absent if (why := own.why_dead(rank))), "")
        text = f"{_named(absent)} never came to the store within {time.monotonic() - begin_s:.0f} s; "
        text += f"{size - len(absent)} of {size} ranks did{': ' + why if why else ''}"
        raise CannotProbe(text, failure=FailureClass.MISSING_RANK, world_size=size, ranks=absent)
    if twice := tuple(leader.twice()):
        text = f"two processes call themselves {_named(twice)} of {size}: the launcher's RANK is not what it should be"
        raise CannotProbe(text, failure=FailureClass.MISSING_RANK, world_size=size, ranks=twice)
    say("what is true of each rank")
    answers = leader.ask(serve.describe, deadline_s=_FACTS_S)
    values(answers)
    if lost := [answer for answer in answers if not answer.ok]:
        text = f"{_named(tuple(a.rank for a in lost))} gave no answer: {_how(lost[0])}"
        raise CannotProbe(text, failure=FailureClass.PROCESS_CRASHED, world_size=size, ranks=tuple(a.rank for a in lost))
    return tuple(answer.value for answer in answers)


def _how(answer: Answer) -> str:
    return str(answer.died) if answer.died else f"silent for {_FACTS_S:g} s"


def _named(ranks: tuple[int, ...]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {ranks_text(ranks)}"


def _import_torch() -> int:
    """Import torch here, so that forks have it, and count the GPUs that CUDA shows."""
    # A probe's own waiting for a late rank is no news; what goes wrong is said in its sentence.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    try:
        import torch.distributed as dist
    except ImportError as error:
        raise UsageError(f"torch cannot be imported here, and the probe runs torch's own process groups: {error}") from error
    if not dist.is_available():
        raise UsageError("this build of torch has no torch.distributed")
    return visible_gpus()


def _place(me: LaunchedRank, gpus: int, join_s: float) -> Place:
    # A launcher that gives each process one GPU of its own makes it the first.
    index = me.local_rank if me.local_rank < gpus else (0 if gpus == 1 else None)
    return Place(
        rank=me.rank, world_size=me.world_size, local_rank=me.local_rank, store_host=me.host, store_port=me.port,
        device_index=index, join_s=join_s, room=me.room,
    )  # fmt: skip


def _serve_store(port: int) -> Any:
    import torch.distributed as dist

    return dist.TCPStore("127.0.0.1", port, None, True, timeout=timedelta(seconds=30), wait_for_workers=False)


def _client(me: LaunchedRank, join_s: float) -> Any:
    import torch.distributed as dist

    return dist.TCPStore(me.host, me.port, None, False, timeout=timedelta(seconds=join_s), wait_for_workers=False)


def _room(store: Any, name: str) -> Any:
    import torch.distributed as dist

    return dist.PrefixStore(name, store)


__all__ = ["CannotProbe", "Session", "as_launched", "follow", "from_env", "on_this_host"]
