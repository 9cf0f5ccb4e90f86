"""Small worlds on busy hosts: a deadline that healthy ranks nearly meet as well is not taken for the fault."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from ray_nccl_guard.facts import RankFacts
from ray_nccl_guard.locate.result import Trial
from ray_nccl_guard.probe import launch
from ray_nccl_guard.probe.spec import Outcome, ProbeResult, ProbeSpec, RankTask, Start, Step, StepRecord
from ray_nccl_guard.probe.workers import Answer
from ray_nccl_guard.prove.prover import Prover
from ray_nccl_guard.prove.worlds import Worlds
from ray_nccl_guard.rung import Rung

RANKS = 4
SPEC = ProbeSpec(comm_init_s=5, comm_init_per_rank_s=0, collective_s=6)
# Seconds that a rank needs for a step; above the step's deadline it is timed out there.
Needs = Callable[[int, RankTask], dict[Step, float]]


class Hosts:
    """Four workers whose launchers answer by the clock that `needs` tells, without waiting for it."""

    def __init__(self, needs: Needs) -> None:
        self.needs = needs
        self.asked: list[tuple[int, ...]] = []

    def __len__(self) -> int:
        return RANKS

    def ask(
        self, function: Callable[..., Any], arguments: Sequence[Any] | None = None, *, deadline_s: float,
        patience_s: Any = None, ranks: Sequence[int] | None = None,
    ) -> list[Answer]:  # fmt: skip
        assert ranks is not None and arguments is not None
        if function is launch.settle:
            return [Answer(rank=rank, ok=True, value=(False, "")) for rank in ranks]
        assert function is launch.run_rank
        self.asked.append(tuple(ranks))
        return [Answer(rank=r, ok=True, value=self.result(r, task)) for r, (task,) in zip(ranks, arguments, strict=True)]

    def ask_one(self, rank: int, function: Callable[..., Any], *args: Any, deadline_s: float) -> Answer:
        raise AssertionError("the store is given")

    def result(self, rank: int, task: RankTask) -> ProbeResult:
        steps = []
        for step, seconds in self.needs(rank, task).items():
            if seconds > task.deadline_s(step):
                return ProbeResult(rank=task.rank, outcome=Outcome.TIMED_OUT, step=step, steps=tuple(steps))
            steps.append(StepRecord(step=step, outcome=Outcome.OK, seconds=seconds))
        return ProbeResult(rank=task.rank, outcome=Outcome.OK, step=Step.TEARDOWN, steps=tuple(steps), start=Start.FORK)


def alone(needs: Needs, *, hangs: bool = True) -> tuple[list[Trial], list[tuple[int, ...]]]:
    """The round in which every rank is a world of its own, and the ranks that were asked."""
    facts = tuple(RankFacts(rank=rank, host="h0", node="n0") for rank in range(RANKS))
    hosts = Hosts(needs)
    prover = Prover(hosts, facts, ("all_reduce",), SPEC, store=("127.0.0.1", 1))
    return Worlds(prover, Rung(backend="nccl"), hangs)([(rank,) for rank in range(RANKS)]), hosts.asked


NEVER = 1e6


def quick(rank: int, task: RankTask) -> dict[Step, float]:
    return {Step.COMM_INIT: 0.2, Step.COLLECTIVE: NEVER if rank == 3 else 0.1}


@pytest.mark.parametrize("step", [Step.COMM_INIT, Step.COLLECTIVE])
def test_a_rank_that_is_only_slower_than_its_deadline_is_tried_once_more_with_more_time(step: Step):
    def busy(rank: int, task: RankTask) -> dict[Step, float]:
        slow = {Step.COMM_INIT: 2.5, Step.COLLECTIVE: 2.5}
        return {**slow, **({step: 7.0} if rank == 1 else {}), **({Step.COLLECTIVE: NEVER} if rank == 3 else {})}

    trials, asked = alone(busy)
    assert trials == [Trial.PASSED, Trial.PASSED, Trial.PASSED, Trial.FAILED]
    assert asked == [(0, 1, 2, 3), (1, 3)]


def test_on_quiet_hosts_a_hang_is_waited_for_once():
    trials, asked = alone(quick)
    assert trials == [Trial.PASSED] * 3 + [Trial.FAILED] and asked == [(0, 1, 2, 3)]


def test_a_step_that_the_whole_world_had_passed_is_no_answer_the_first_time():
    seen: list[int] = []

    def late(rank: int, task: RankTask) -> dict[Step, float]:
        seen.append(rank)
        return {Step.DEVICE: NEVER if rank == 2 and seen.count(2) == 1 else 0.1, **quick(rank, task)}

    trials, asked = alone(late, hangs=False)
    assert trials == [Trial.PASSED] * 3 + [Trial.FAILED] and asked[1:] == [(2,)]


def test_a_device_that_fails_twice_is_a_failure():
    trials, _ = alone(lambda rank, task: {Step.DEVICE: NEVER if rank == 2 else 0.1})
    assert trials == [Trial.PASSED, Trial.PASSED, Trial.FAILED, Trial.PASSED]
