"""The pre-flight: probe a rung, name what failed, decide, and prove the next rung, until a backend is proved or none is left."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ray_nccl_guard.classes import FailureClass
from ray_nccl_guard.evidence import Origin, align
from ray_nccl_guard.facts import Finding, RankFacts
from ray_nccl_guard.ladder import Ladder
from ray_nccl_guard.locate import meaning
from ray_nccl_guard.locate.locate import locate
from ray_nccl_guard.locate.result import RunRound
from ray_nccl_guard.network.findings import Host, NetworkFinding
from ray_nccl_guard.network.grid import Matrix
from ray_nccl_guard.network.slow_start import slow_start
from ray_nccl_guard.network.steadiness import slow_ranks
from ray_nccl_guard.probe.spec import Outcome, ProbeResult, Step
from ray_nccl_guard.report import Attempt, Report
from ray_nccl_guard.rung import Decision, Rung
from ray_nccl_guard.verdict import Certainty, Verdict, classify


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """What came of proving one rung: a result for every rank that gave one, and what the network stages saw.

    Attributes:
        drill: the faults that were acted out; empty if it was a real probe.
    """

    results: tuple[ProbeResult, ...]
    findings: tuple[Finding, ...] = ()
    matrix: Matrix | None = None
    drill: str = ""


# Proves one rung on every rank within the seconds that are left for it.
Runner = Callable[[Rung, float], Proof]
# Gives the means to run small worlds of one rung on the same workers, and is told whether the fault is a hang: then only a
# deadline ends each, else no deadline has to be short.
Explorer = Callable[[Rung, bool], RunRound]


class GroupLost(Exception):
    """A worker died or stopped answering: these workers can prove nothing more, the next rung needs fresh ones."""

    def __init__(
        self, results: Sequence[ProbeResult], findings: Sequence[Finding] = (), matrix: Matrix | None = None
    ) -> None:
        super().__init__("a worker was lost during the probe")
        self.proof = Proof(results=tuple(results), findings=tuple(findings), matrix=matrix)

    @property
    def results(self) -> tuple[ProbeResult, ...]:
        return self.proof.results


@dataclass(slots=True, kw_only=True)
class Preflight:
    """What a pre-flight works on: the facts of the workers at hand, and the ladder that lives across attempts.

    Attributes:
        findings: what the facts (and the network) say before any collective.
        rules: the rule book; None for the one that is shipped.
        attempts: rungs tried so far, those of earlier worker groups included.
        drill: the faults of the drill that this is; empty if it is none.
        locate_always: locate whatever the backend, and also where the evidence already names ranks.
    """

    facts: tuple[RankFacts, ...]
    ladder: Ladder
    findings: tuple[Finding, ...] = ()
    rules: Sequence[Any] | None = None
    attempts: list[Attempt] = field(default_factory=list)
    group_attempt: int = 1
    locate_always: bool = False
    drill: str = ""
    located_s: float = 0.0
    started_s: float = field(default_factory=time.monotonic)

    def run(self, prove: Runner, explore: Explorer | None = None) -> Report:
        """Prove rungs until one passes on every rank or the ladder ends.

        Args:
            explore: with it, a failure of NCCL that names no rank is located by small worlds (`Policy.locate_s`).

        Raises:
            GroupLost: a worker is gone; `attempts` holds what was seen and the ladder stands on the next rung, or, if
                the ladder has ended, the decision is returned as a report in the usual way.
        """
        decision: Decision | None = None
        while decision is None:
            decision = self._try(self.ladder.rung, prove, explore)
        return self.report(decision)

    def _try(self, rung: Rung, prove: Runner, explore: Explorer | None) -> Decision | None:
        verdict, proof, lost = self._prove(rung, prove)
        if self.attempts[-1].evidence.ok:
            # What the network stages remarked of a network that carries the backend all the same: it explains a slow job.
            told = (*(found.text for found in proof.findings), *self._slow(self.attempts[-1]))
            self.ladder.notes += [note for note in dict.fromkeys(told) if note not in self.ladder.notes]
            self._minimise(prove)
            return self.ladder.after_pass()
        if explore is not None and lost is None and self._worth_locating(rung, verdict, proof):
            hangs = any(r.outcome is Outcome.TIMED_OUT for r in proof.results)
            verdict = self._locate(verdict, explore(rung, hangs))
        ended = (r.detail for r in proof.results if r.outcome in (Outcome.FAILED, Outcome.DIED, Outcome.TIMED_OUT))
        during = next(filter(None, ended), "")
        following = self.ladder.after_failure(verdict, budget_left_s=self._budget_left_s(), during=during)
        if isinstance(following, Decision):
            return following
        if any(r.stuck for r in proof.results):
            return self.ladder.refuse("a process of the probe cannot be ended: it sits in the GPU driver on that node")
        if lost is not None:
            raise lost
        return None

    def _prove(self, rung: Rung, prove: Runner) -> tuple[Verdict, Proof, GroupLost | None]:
        started_s = time.monotonic()
        lost: GroupLost | None = None
        if self._decided_by_facts(rung):
            proof = Proof(results=tuple(ProbeResult(rank=f.rank, outcome=Outcome.NOT_RUN) for f in self.facts))
        else:
            try:
                proof = prove(rung, self._budget_left_s())
            except GroupLost as error:
                lost, proof = error, error.proof
        seconds = time.monotonic() - started_s
        verdict = self.judge(rung, proof.results, Origin.PROBE, seconds, proof.findings, acted=bool(proof.drill))
        self.attempts[-1] = replace(self.attempts[-1], matrix=proof.matrix, drill=proof.drill)
        return verdict, proof, lost

    def _slow(self, attempt: Attempt) -> list[str]:
        """Ranks whose passing steps took far longer than the others'."""
        on: dict[str, list[RankFacts]] = {}
        for fact in self.facts:
            on.setdefault(fact.node, []).append(fact)
        hosts = [Host(rank=f[0].rank, name=f[0].host, ranks=tuple(one.rank for one in f)) for f in on.values()]
        found: list[NetworkFinding | None] = []
        for step in Step:
            took = {
                r.rank: s.seconds for r in attempt.results for s in r.steps if s.step is step and s.outcome is Outcome.OK
            }
            phases = slow_start({r.rank: r.nccl_s for r in attempt.results}, took, hosts) if step is Step.COMM_INIT else ()
            found += phases or (slow_ranks(step.value, took, hosts),)
        return [one.text for one in found if one is not None]

    def _worth_locating(self, rung: Rung, verdict: Verdict, proof: Proof) -> bool:
        world_size = len(self.facts)
        if not meaning.can_help(verdict, world_size) or any(a.located for a in self.attempts):
            return False
        if self._locate_budget_s() < meaning.LEAST_S or any(r.stuck for r in proof.results):
            return False
        if self.locate_always:
            return True
        if self.ladder.policy.report_only or self.ladder.would_retry(verdict):
            return False
        return "nccl" in rung.backend and meaning.names_nobody(verdict, world_size)

    def _locate_budget_s(self) -> float:
        # The rungs that may follow need their part of what is left.
        return min(self.ladder.policy.locate_s, self._budget_left_s() / 2)

    def _locate(self, verdict: Verdict, run_round: RunRound) -> Verdict:
        nodes: dict[str, list[int]] = {}
        for fact in self.facts:
            nodes.setdefault(fact.node, []).append(fact.rank)
        hosts = {fact.node: fact.host for fact in self.facts}
        # By host names where they tell the nodes apart: they are what people know.
        names = hosts if len(set(hosts.values())) == len(hosts) else {node: node for node in nodes}
        started_s = time.monotonic()
        found = locate({names[node]: ranks for node, ranks in nodes.items()}, run_round, budget_s=self._locate_budget_s())
        self.located_s += time.monotonic() - started_s
        verdict = meaning.with_place(verdict, found)
        self.attempts[-1] = replace(self.attempts[-1], verdict=verdict, located=found)
        return verdict

    def _minimise(self, prove: Runner) -> None:
        """Leave out the settings that the rung which passed does not need, one at a time by the same probe."""
        # A fault that has cost workers before may cost them again, and the count of restarts: then the set stays whole.
        lost_before = any(a.group_attempt != self.group_attempt for a in self.attempts)
        # What failed once may fail again, and takes as long.
        needs_s = max(a.seconds for a in self.attempts)
        while (trial := self.ladder.smaller()) is not None:
            if lost_before or self._budget_left_s() < needs_s:
                why = "the fault has cost workers before" if lost_before else "no time is left for it"
                self.ladder.notes.append(f"whether {self.ladder.rung.name} needs all of them was not asked: {why}")
                return
            _, proof, lost = self._prove(trial, prove)
            self.ladder.after_smaller(trial, self.attempts[-1].evidence.ok)
            if lost is not None:
                raise lost
            if any(r.stuck for r in proof.results):
                return

    def judge(
        self,
        rung: Rung,
        results: Sequence[ProbeResult],
        origin: Origin,
        seconds: float,
        findings: Sequence[Finding] = (),
        *,
        acted: bool = False,
    ) -> Verdict:
        """Classify one rung's results and keep them as an attempt. What was acted out says nothing of this machine's facts."""
        evidence = align(
            results,
            world_size=len(self.facts),
            backend=rung.backend,
            origin=origin,
            findings=(*(self.findings if "nccl" in rung.backend and not acted else ()), *findings),
            hosts={f.rank: f.host for f in self.facts},
        )
        verdict = classify(evidence, self.rules)
        self.attempts.append(
            Attempt(
                rung=rung,
                evidence=evidence,
                verdict=verdict,
                results=tuple(sorted(results, key=lambda r: r.rank)),
                seconds=seconds,
                group_attempt=self.group_attempt,
            )
        )
        return verdict

    def report(self, decision: Decision) -> Report:
        """The report of this pre-flight, with the verdict of the rung that failed first (if any did)."""
        ok = Verdict(failure=FailureClass.OK, certainty=Certainty.ESTABLISHED)
        return Report(
            world_size=len(self.facts),
            backend_wanted=self.ladder.wanted.backend,
            decision=decision,
            verdict=self.ladder.primary or ok,
            policy=self.ladder.policy,
            facts=self.facts,
            attempts=tuple(self.attempts),
            drill=self.drill,
            timings_s={
                "probe": sum(a.seconds for a in self.attempts),
                **({"locate": self.located_s} if self.located_s else {}),
                "guard": time.monotonic() - self.started_s,
            },
        )

    def _decided_by_facts(self, rung: Rung) -> bool:
        # A worker without a GPU still lets torch say so in its own words, which costs no collective and no CUDA.
        return "nccl" in rung.backend and any(
            f.decides and f.failure != FailureClass.NO_GPU_VISIBLE.value for f in self.findings
        )

    def _budget_left_s(self) -> float:
        return self.ladder.policy.budget_s - (time.monotonic() - self.started_s)
