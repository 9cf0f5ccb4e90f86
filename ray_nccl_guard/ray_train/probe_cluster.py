"""Ranks of a probe on a Ray cluster: plain actors in a placement group, without Ray Train; given back when the probe ends."""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

import ray_nccl_guard
from ray_nccl_guard import facts
from ray_nccl_guard.classes import FailureClass
from ray_nccl_guard.errors import UsageError
from ray_nccl_guard.facts import RankFacts
from ray_nccl_guard.network.reach import connect
from ray_nccl_guard.prove.session import CannotProbe, Say, Session
from ray_nccl_guard.ray_train import on_worker
from ray_nccl_guard.ray_train.workers import Workers, values

# A GCS answers its port within milliseconds; what does not within this is no GCS, and ray.init would wait for minutes.
_GCS_S = 5.0
# Free resources are reserved in well under a second; what takes longer was taken by somebody else meanwhile.
_PLACE_S = 30.0
# As in ray_train.run: workers import torch for the first time there, and read the files of the GPU libraries once.
_IMPORT_S, _FACTS_S = 300.0, 150.0
# RFC 9113, 3.4: the preface of a client, and an empty SETTINGS frame; a server answers with a frame of type 4.
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
_SETTINGS = 4


@contextmanager
def over_cluster(address: str, count: int, gpus: float, say: Say) -> Iterator[Session]:
    """`count` ranks of one CPU and `gpus` GPUs each on the cluster at `address` (`auto`, or HOST:PORT of its head).

    Raises:
        UsageError: there is no Ray there, or the cluster has no room for so many.
        CannotProbe: a worker died before it could be asked.
    """
    # Ray prints what its nodes report on stdout, which is the report's.
    with redirect_stdout(sys.stderr), _connected(address, say):
        _check_room(count, gpus)
        say(f"placing {count} workers")
        bundle = {"CPU": 1.0, **({"GPU": gpus} if gpus else {})}
        group = placement_group([bundle] * count, strategy="PACK")
        try:
            if not group.wait(_PLACE_S):
                raise UsageError(
                    f"the cluster did not place {count} workers within {_PLACE_S:g} s: others took its resources"
                )
            ranks = _Ranks(group, count, gpus)
            described = _describe(ranks, say)
            yield Session(workers=Workers(ranks), facts=described, asked_gpus=gpus)
        finally:
            remove_placement_group(group)  # kills its actors, a stuck one too


@contextmanager
def _connected(address: str, say: Say) -> Iterator[None]:
    _connect(address, say)
    try:
        yield
    finally:
        ray.shutdown()


class _Ranks:
    """The actors, by rank, as `Workers` asks a worker group."""

    def __init__(self, group: Any, count: int, gpus: float) -> None:
        rank = ray.remote(num_cpus=1, num_gpus=gpus, max_restarts=0)(_Rank)
        placed = [PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=i) for i in range(count)]
        self.actors = [rank.options(scheduling_strategy=where).remote() for where in placed]

    def __len__(self) -> int:
        return len(self.actors)

    def execute_single_async(self, rank: int, function: Callable[..., Any], *args: Any) -> Any:
        return self.actors[rank].run.remote(function, args)


class _Rank:
    """Runs functions on its main thread, one at a time."""

    def run(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        return function(*args)


def _describe(ranks: _Ranks, say: Say) -> tuple[RankFacts, ...]:
    """Every rank's facts, numbered as Ray Train numbers them: ranks of one node one after another."""
    workers = Workers(ranks)
    say("importing torch in the workers")
    _all_there(workers.ask(on_worker.import_torch, deadline_s=_IMPORT_S), len(ranks))
    say("what is true of each rank")
    answers = workers.ask(on_worker.describe, [(rank,) for rank in range(len(ranks))], deadline_s=_FACTS_S)
    _all_there(answers, len(ranks))
    found: list[RankFacts] = [answer.value for answer in answers]
    nodes = list(dict.fromkeys(fact.node for fact in found))
    order = sorted(found, key=lambda fact: (nodes.index(fact.node), fact.gpu_ids, fact.rank))
    ranks.actors = [ranks.actors[fact.rank] for fact in order]
    seen: dict[str, int] = dict.fromkeys(nodes, 0)
    described = []
    for rank, fact in enumerate(order):
        findings = tuple(replace(one, culprit_ranks=(rank,)) for one in fact.findings)
        described.append(replace(fact, rank=rank, local_rank=seen[fact.node], findings=findings))
        seen[fact.node] += 1
    return tuple(described)


def _all_there(answers: Sequence[Any], count: int) -> None:
    if lost := tuple(answer.rank for answer in answers if answer.died or answer.silent):
        how = next((str(answer.died).strip().splitlines()[0] for answer in answers if answer.died), "no answer")
        raise CannotProbe(
            f"{len(lost)} of {count} workers were lost before they could be asked: {how}",
            failure=FailureClass.PROCESS_CRASHED,
            world_size=count,
            ranks=lost,
        )
    values(answers)


def _connect(address: str, say: Say) -> None:
    if address != "auto":
        _check_address(address)
    say(f"connecting to Ray at {address}")
    logging.getLogger("ray").setLevel(logging.ERROR)
    # What was set for this command is meant for the ranks, wherever they run; devices are Ray's to give.
    settings = {k: v for k, v in facts.settings(os.environ).items() if not k.startswith("CUDA_VISIBLE")}
    package = str(Path(ray_nccl_guard.__file__).parent)
    try:
        ray.init(
            address=address,
            log_to_driver=False,
            logging_level=logging.ERROR,
            runtime_env={"py_modules": [package], "env_vars": settings},
        )
    except (ConnectionError, RuntimeError, ValueError) as error:
        said = str(error).strip().splitlines()
        raise UsageError(f"no Ray cluster at {address}: {said[0] if said else type(error).__name__}", help=_HELP) from error


_HELP = (
    "run it on a node of the cluster with --address auto, or as a job: ray job submit -- ray-nccl-guard probe --address auto ...",
)


def _check_address(address: str) -> None:
    """That a gRPC server answers there: ray.init waits for minutes, and then blames a time-out."""
    host, _, port = address.rpartition(":")
    if "://" in address or not host or not port.isdigit():
        raise UsageError(f"--address takes auto, or HOST:PORT of the cluster's head, not {address!r}", help=_HELP)
    host = host.strip("[]")
    reach = connect(host, int(port), _GCS_S)
    if not reach.ok:
        raise UsageError(f"no Ray cluster at {address}: {reach.text}", help=_HELP)
    if os.environ.get("RAY_USE_TLS", "0") not in ("0", ""):
        return  # only Ray has the keys to ask
    answer = b""
    try:
        with socket.create_connection((reach.address, int(port)), timeout=_GCS_S) as sock:
            sock.sendall(_PREFACE)
            answer = sock.recv(9)
    except OSError:
        pass  # closed or silent: no gRPC server does that
    if len(answer) < 4 or answer[3] != _SETTINGS:
        raise UsageError(f"what listens at {address} is not Ray: it does not speak gRPC", help=_HELP)


def _check_room(count: int, gpus: float) -> None:
    """Say at once what Ray would wait for without end."""
    nodes = [node for node in ray.nodes() if node["Alive"]]
    has = sum(_fits(node["Resources"], gpus) for node in nodes)
    each = f"1 CPU and {gpus:g} GPU" if gpus else "1 CPU"
    if has < count:
        where = "; ".join(f"{n['NodeManagerHostname']}: {_resources(n['Resources'], gpus)}" for n in nodes[:8])
        raise UsageError(
            f"the cluster has room for {has} workers of {each}, not for {count} ({where})",
            help=(f"--num-workers {has}",) if has else (),
        )
    free = ray.available_resources()
    if free.get("CPU", 0) < count or free.get("GPU", 0) < gpus * count:
        raise UsageError(
            f"{count} workers of {each} do not fit beside what runs on the cluster now: free are {_resources(free, gpus)}",
            help=("wait for the running jobs, or ask for fewer",),
        )


def _fits(resources: dict[str, float], gpus: float) -> int:
    on_cpus = int(resources.get("CPU", 0))
    return min(on_cpus, int(resources.get("GPU", 0) / gpus)) if gpus else on_cpus


def _resources(resources: dict[str, float], gpus: float) -> str:
    return f"{resources.get('CPU', 0):g} CPU" + (f", {resources.get('GPU', 0):g} GPU" if gpus else "")
