"""When the guard locates a failure, with what budget, and what the place does to the verdict and the report."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

from ray_nccl_guard import render, saved
from ray_nccl_guard.classes import FailureClass
from ray_nccl_guard.facts import Finding, RankFacts
from ray_nccl_guard.guard import Preflight, Proof
from ray_nccl_guard.ladder import Ladder
from ray_nccl_guard.locate.result import Group, Trial
from ray_nccl_guard.policy import Policy
from ray_nccl_guard.probe.spec import Outcome, ProbeResult, Step, StepRecord
from ray_nccl_guard.report import Report
from ray_nccl_guard.rung import Rung, Wanted
from tests.unit.locate_oracle import Fault, bad_link, bad_rank, threshold

WORLD = 8


def results(outcome: Outcome, step: Step, error: str, ranks: Sequence[int] = range(WORLD)) -> list[ProbeResult]:
    return [
        ProbeResult(rank=r, outcome=outcome if r in ranks else Outcome.WAITING, step=step, error=error if r in ranks else "")
        for r in range(WORLD)
    ]


def everybody_fails() -> list[ProbeResult]:
    return results(Outcome.FAILED, Step.COLLECTIVE, "RuntimeError: NCCL error: unhandled cuda error, NCCL version 2.28.9")


def passes() -> list[ProbeResult]:
    return [ProbeResult(rank=r, outcome=Outcome.OK, step=Step.TEARDOWN, proved=("all_reduce",)) for r in range(WORLD)]


class Cluster:
    """Eight ranks on two nodes whose NCCL fails and whose gloo works; its small worlds fail by `fault`."""

    def __init__(self, fault: Fault, failing: list[ProbeResult]) -> None:
        self.fault, self.failing = fault, failing
        self.asked: list[str] = []
        self.findings: tuple[Finding, ...] = ()

    def prove(self, rung: Rung, within_s: float) -> Proof:
        return Proof(results=tuple(passes() if rung.backend == "gloo" else self.failing), findings=self.findings)

    def explore(self, rung: Rung, hangs: bool):
        self.asked.append(f"{rung.backend} {'hangs' if hangs else 'fails'}")

        def run_round(groups: Sequence[Group]) -> list[Trial]:
            return [Trial.FAILED if self.fault(group) else Trial.PASSED for group in groups]

        return run_round

    def run(self, policy: Policy | None = None, backend: str = "nccl", **options: bool) -> Report:
        facts = tuple(RankFacts(rank=r, host=f"h{r // 4}", node=f"id-{r // 4}", device_index=r % 4) for r in range(WORLD))
        ladder = Ladder(Wanted(backend=backend, world_size=WORLD), policy or Policy())
        return Preflight(facts=facts, ladder=ladder, **options).run(self.prove, self.explore)


def test_a_failure_on_every_rank_is_located_and_the_verdict_names_the_place():
    cluster = Cluster(bad_rank(5), everybody_fails())
    report = cluster.run()
    assert cluster.asked == ["nccl fails"]
    assert report.located is not None and report.located.ranks == (5,)
    assert report.verdict.culprit_ranks == (5,)
    assert report.decision.backend == "gloo", "the ladder goes on"
    assert report.timings_s["locate"] >= 0


def test_the_place_is_in_the_message_and_in_a_saved_report():
    report = Cluster(bad_link(1, 6), everybody_fails()).run()
    text = render.render(report)
    assert "located    the link between ranks 1 and 6 (h0 and h1)" in text
    again = saved.from_json(json.loads(json.dumps(report.to_json())))
    assert again.located == report.located


def test_a_threshold_names_no_rank():
    report = Cluster(threshold(4), everybody_fails()).run()
    assert report.located is not None and (report.located.largest_ok, report.located.smallest) == (3, 4)
    assert len(report.verdict.culprit_ranks) in (0, WORLD)


@pytest.mark.parametrize(
    "policy",
    [Policy(locate_s=0), Policy(budget_s=15), Policy.observe()],
    ids=["switched off", "no time for a round", "observe"],
)
def test_it_is_not_located_where_the_policy_leaves_no_time_for_it(policy: Policy):
    cluster = Cluster(bad_rank(5), everybody_fails())
    assert cluster.run(policy).located is None and cluster.asked == []


def test_what_names_its_rank_is_located_only_when_asked_for():
    named = results(Outcome.FAILED, Step.COLLECTIVE, "RuntimeError: Cuda failure 700 'an illegal memory access'", ranks=[3])
    assert Cluster(bad_rank(3), named).run().located is None
    located = Cluster(bad_rank(3), named).run(locate_always=True).located
    assert located is not None and located.ranks == (3,)


def test_what_fails_before_the_communicator_is_not_located():
    early = results(Outcome.FAILED, Step.DEVICE, "RuntimeError: CUDA error: out of memory")
    assert Cluster(bad_rank(5), early).run(locate_always=True).located is None


def test_a_hang_is_told_so_that_its_worlds_have_deadlines():
    hang = results(Outcome.TIMED_OUT, Step.COMM_INIT, "no end after 30 s")
    cluster = Cluster(bad_rank(2), hang)
    cluster.run()
    assert cluster.asked == ["nccl hangs"]


def test_what_is_tried_once_more_is_not_located_before_that():
    died = [
        ProbeResult(rank=r, outcome=Outcome.DIED, step=Step.COLLECTIVE, signal=11, error="") for r in range(WORLD)
    ]  # process_crashed: retry
    report = Cluster(bad_rank(5), died).run()
    tried = [(a.rung.retry, a.located is not None) for a in report.attempts if a.rung.backend == "nccl" and not a.rung.env]
    assert tried[0] == (False, False), tried


def test_a_rank_whose_passing_step_took_far_longer_is_a_note_of_the_report():
    def took(rank: int, seconds: float) -> ProbeResult:
        steps = (StepRecord(step=Step.DEVICE, outcome=Outcome.OK, seconds=seconds),)
        return ProbeResult(rank=rank, outcome=Outcome.OK, step=Step.TEARDOWN, steps=steps)

    cluster = Cluster(bad_rank(0), [took(r, 10.0 if r == 6 else 0.2) for r in range(WORLD)])
    report = cluster.run()
    assert report.decision.backend == "nccl"
    assert any(
        "device passed but took 10.0 s on rank 6 on h1, where the median is 0.2 s" in note for note in report.all_notes
    )


def test_of_a_slow_communicator_that_all_left_together_the_rank_that_they_waited_for_is_a_note():
    def took(rank: int) -> ProbeResult:
        nccl_s = {"total": 10.1, "kernels": 10.0, "bootstrap": 0.1} if rank == 6 else {"total": 10.1, "bootstrap": 10.0}
        steps = (StepRecord(step=Step.COMM_INIT, outcome=Outcome.OK, seconds=10.2),)
        return ProbeResult(rank=rank, outcome=Outcome.OK, step=Step.TEARDOWN, steps=steps, nccl_s={"kernels": 0.1} | nccl_s)

    report = Cluster(bad_rank(0), [took(r) for r in range(WORLD)]).run()
    wanted = (
        "comm_init passed, but rank 6 on h1 spent 10.0 s loading NCCL's kernels, where the median of the others is 0.1 s"
    )
    assert [note for note in report.all_notes if note.startswith("comm_init")] == [wanted]
    again = saved.from_json(report.to_json())
    assert wanted in again.all_notes and again.attempts[0].results[6].nccl_s["kernels"] == 10.0


def test_what_the_network_remarked_of_a_backend_that_passed_is_a_note_of_the_report():
    lossy = Finding(failure="nccl_bootstrap_network", text="h1: lossy, 4 of 12 connections had to send again")
    cluster = Cluster(bad_rank(0), passes())
    cluster.findings = (lossy,)
    report = cluster.run()
    assert report.verdict.failure is FailureClass.OK and report.decision.backend == "nccl"
    assert lossy.text in report.all_notes and lossy.text in render.render(report)
