"""Asks every rank of a worker group for its recorder and its stacks, and the nodes of those that do not answer for their files."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ray_nccl_guard.ray_train import flight_pull
from ray_nccl_guard.ray_train.flight_pull import Gathered, Pulled
from ray_nccl_guard.ray_train.recorder import Armed
from ray_nccl_guard.ray_train.workers import Answer, Workers


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadlines:
    """Seconds: until the first rank has answered, then for the others, then for the nodes of those that have not (0: not asked).

    The first dump of a process costs 1.3 CPU seconds of imports (torch 2.15, measured), and the workers of a node share its
    cores: with twenty runnable processes per core, none of three ranks had answered after 30 s. The first answer tells that
    the others are not far, unless they never will. A task needs a worker process first, which Ray starts in seconds, on a
    crowded node in tens; py-spy has a deadline of its own.
    """

    first_s: float = 90.0
    patience_s: float = 15.0
    nodes_s: float = 45.0


def gather(workers: Workers, armed: Sequence[Armed], *, at_end: bool, within: Deadlines = Deadlines()) -> Gathered:
    """Ask all ranks, then the nodes of those without an answer.

    `at_end`: the group is about to be shut down, and a node without an answering rank has no use for its folder any more.
    """
    started_s = time.monotonic()
    answers = workers.ask(
        flight_pull.pull, deadline_s=within.first_s, patience_s=lambda a: within.patience_s if a.ok else None
    )
    answered = {a.rank: a.value for a in answers if a.ok}
    notes = [f"rank {a.rank} could not be asked: {a.raised!r}" for a in answers if a.raised is not None]
    without = [a for a in answers if not a.ok]
    left = _ask_nodes(without, armed, notes, at_end, within.nodes_s) if without and within.nodes_s else {}
    return Gathered(
        answered=answered,
        left=left,
        died={a.rank: _why_dead(a.died) for a in answers if a.died is not None},
        silent=tuple(a.rank for a in answers if a.silent),
        notes=tuple(notes),
        seconds=time.monotonic() - started_s,
    )


def _ask_nodes(
    without: Sequence[Answer], armed: Sequence[Armed], notes: list[str], at_end: bool, within_s: float
) -> dict[int, Pulled]:
    alive = {a.rank for a in without if a.died is None}
    answering = {worker.node for worker in armed if worker.rank not in {a.rank for a in without}}
    by_node: dict[str, list[Armed]] = {}
    for worker in armed:
        if worker.rank in {a.rank for a in without}:
            by_node.setdefault(worker.node, []).append(worker)
    refs = {}
    for node, ranks in by_node.items():
        pinned = NodeAffinitySchedulingStrategy(node_id=node, soft=False)
        task: Any = ray.remote(num_cpus=0, max_retries=0, scheduling_strategy=pinned)(flight_pull.left_on_node)
        refs[task.remote(ranks, [r.rank for r in ranks if r.rank in alive], at_end and node not in answering)] = node
    done, late = ray.wait(list(refs), num_returns=len(refs), timeout=within_s)
    found: dict[int, Pulled] = {}
    for ref in done:
        try:
            found.update(ray.get(ref, timeout=10))
        except RayError as error:  # the node went with its worker, or the task failed there
            notes.append(f"node {refs[ref][:12]} gave no files: {_first_line(error)}")
    for ref in late:
        ray.cancel(ref, force=True)
        notes.append(f"node {refs[ref][:12]} gave no files within {within_s:g} s")
    return found


def _why_dead(error: Exception) -> str:
    """Ray tells the exit of the process, if it saw it, in a later line than that the actor died."""
    detail = next((line.strip() for line in str(error).splitlines() if "exit detail:" in line), "")
    return detail.partition("exit detail:")[2].strip() or _first_line(error)


def _first_line(error: Exception) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__).strip()
