"""Small worlds over a run's workers: the rounds that locate a fault, and the growing worlds of a sweep."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ray_nccl_guard.guard import GroupLost
from ray_nccl_guard.locate.result import Group, Trial
from ray_nccl_guard.probe import launch
from ray_nccl_guard.probe.spec import MIB, Outcome, ProbeResult, ProbeSpec, RankTask, Step
from ray_nccl_guard.prove.lost import lost_result
from ray_nccl_guard.prove.prover import Prover
from ray_nccl_guard.rung import Rung

# A communicator of a small world forms in a second or two; the first round, which has nothing to go by, waits this long.
_FIRST_INIT_S = 15.0
# Later rounds wait five times as long as the slowest world that has passed, this at least (two busy cores need it), and this
# at most: the budget of all rounds is a minute.
_LEAST_INIT_S, _MOST_S = 5.0, 20.0
_TIMES = 5
# A deadline says "hang" only if it is this many times what the slowest passing rank took; else the host may just be busy.
_SURE = 3
_BEFORE_NCCL = (Step.STORE, Step.PEERS, Step.IMPORT, Step.DEVICE)
# A sweep shows where latency ends and bandwidth begins. Above 64 MiB it is the CPU's check of the numbers that takes long:
# 256 MiB did not end within 10 s on one core.
SWEEP_SIZES = (4, 64 << 10, MIB, 16 * MIB, 64 * MIB)
_SWEEP_S = 60.0
_FAILURES = 2  # worlds that fail one after another; larger ones would only fail as well, each for its whole deadline


class Worlds:
    """Runs disjoint groups of ranks at the same time, each a world of its own in disposable children (a `RunRound`)."""

    def __init__(self, prover: Prover, rung: Rung, hangs: bool = False) -> None:
        self.prover, self.rung, self.hangs = prover, rung, hangs
        self.rounds = 0
        self._slowest_s: dict[Step, float] = {}

    def __call__(self, groups: Sequence[Group]) -> list[Trial]:
        self.rounds += 1
        sizes = ", ".join(sorted({str(len(group)) for group in groups}, key=int))
        self.prover.say(f"{self.rung.name}: locating, round {self.rounds}: {len(groups)} worlds of {sizes}")
        spec = self._spec()
        found = self.run(groups, spec)
        doubtful = [index for index, results in enumerate(found) if self._is_doubtful(results, spec)]
        if doubtful:
            self.prover.say(f"{self.rung.name}: {len(doubtful)} worlds once more, with more time: these hosts are slow")
            later = self.run([groups[index] for index in doubtful], self._spec())
            for index, results in zip(doubtful, later, strict=True):
                found[index] = results
        return [_trial(results) for results in found]

    def run(self, groups: Sequence[Group], spec: ProbeSpec) -> list[list[ProbeResult]]:
        """Each group's results, by the ranks of the whole run; a rank whose worker is gone has outcome DIED or MISSING."""
        prover = self.prover
        facts = {fact.rank: fact for fact in prover.facts}
        ranks = [rank for group in groups for rank in group]
        try:
            with prover.open_store() as (run_id, host, port):
                tasks = {
                    rank: replace(
                        prover.task(self.rung, facts[rank], f"{run_id}-{number}", host, port, world=group),
                        spec=spec,
                        within_s=math.inf,  # a world that is cut short would be taken for one that fails
                    )
                    for number, group in enumerate(groups)
                    for rank in group
                }
                answers = prover.workers.ask(
                    launch.run_rank, [(tasks[rank],) for rank in ranks], deadline_s=_longest_s(tasks[ranks[0]]), ranks=ranks
                )
        except GroupLost as lost:
            return [list(lost.results) for _ in groups]
        results = [replace(a.value, rank=a.rank) if a.ok else lost_result(a) for a in answers]
        settled = {result.rank: result for result in prover.settle(results)}
        self._learn(settled.values())
        return [[settled[rank] for rank in group] for group in groups]

    def _spec(self) -> ProbeSpec:
        given = self.prover.spec
        if not self.hangs:
            # The fault ends its worlds by itself; a deadline that a busy host runs into would be taken for it.
            patient = ProbeSpec()
            return replace(
                given,
                comm_init_s=max(given.comm_init_s, patient.comm_init_s),
                collective_s=max(given.collective_s, 2 * patient.collective_s),
            )
        slow_s = self._slowest_s.get(Step.COMM_INIT)
        first_s = min(given.comm_init_s, _FIRST_INIT_S)
        return replace(
            given,
            comm_init_s=first_s if slow_s is None else min(_MOST_S, max(_LEAST_INIT_S, _TIMES * slow_s)),
            collective_s=max(given.collective_s, min(_MOST_S, _TIMES * self._slowest_s.get(Step.COLLECTIVE, 0.0))),
        )

    def _is_doubtful(self, results: Sequence[ProbeResult], spec: ProbeSpec) -> bool:
        """Whether this world may have failed because its hosts are busy: many children start at once on few cores.

        It failed in a step that the whole world had passed, or its deadline is near to what passing ranks needed.
        """
        bad = [r for r in results if r.outcome in (Outcome.FAILED, Outcome.DIED, Outcome.TIMED_OUT) and r.step is not None]
        if any(r.step in _BEFORE_NCCL for r in bad):
            return True
        return any(
            r.outcome is Outcome.TIMED_OUT
            and r.step is not None
            and spec.deadline_s(r.step, len(results)) < _SURE * self._slowest_s.get(r.step, 0.0)
            for r in bad
        )

    def _learn(self, results: Iterable[ProbeResult]) -> None:
        for result in results:
            for done in result.steps:
                if done.outcome is Outcome.OK:
                    self._slowest_s[done.step] = max(self._slowest_s.get(done.step, 0.0), done.seconds)


def _longest_s(task: RankTask) -> float:
    return 2 * sum(task.deadline_s(step) for step in Step) + launch.GRACE_S


def _trial(results: Sequence[ProbeResult]) -> Trial:
    """A world whose worker was lost says nothing of the fault."""
    if any(r.outcome is Outcome.MISSING or (r.outcome is Outcome.DIED and r.step is None) for r in results):
        return Trial.NOT_RUN
    return Trial.PASSED if all(r.outcome is Outcome.OK for r in results) else Trial.FAILED


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepLine:
    """One world of a sweep.

    Attributes:
        failed_in: the step in which it failed, None if it passed.
        comm_init_s: seconds of the slowest rank's communicator; 0 where none formed.
        all_reduce_s: median seconds over the ranks by size in bytes.
    """

    world_size: int
    trial: Trial
    failed_in: Step | None = None
    error: str = ""
    comm_init_s: float = 0.0
    all_reduce_s: dict[int, float]

    def to_json(self) -> dict[str, Any]:
        return {
            "world_size": self.world_size,
            "outcome": self.trial.value,
            "failed_in": self.failed_in.value if self.failed_in else None,
            "error": self.error,
            "comm_init_s": round(self.comm_init_s, 4),
            "all_reduce_s": {str(size): round(seconds, 6) for size, seconds in sorted(self.all_reduce_s.items())},
        }


def sweep(prover: Prover, rung: Rung) -> tuple[SweepLine, ...]:
    """Worlds of 1, 2, 4 .. all ranks, one after another, each with the sizes of `SWEEP_SIZES`.

    It ends early after two failures in a row, and where a worker is lost.
    """
    everyone = [fact.rank for fact in prover.facts]
    spec = replace(prover.spec, sizes_bytes=SWEEP_SIZES, collective_s=max(_SWEEP_S, prover.spec.collective_s))
    lines: list[SweepLine] = []
    size = 1
    while not lines or lines[-1].world_size < len(everyone):
        group = tuple(everyone[: min(size, len(everyone))])
        prover.say(f"{rung.name}: a world of {len(group)}")
        lines.append(_line(Worlds(prover, rung).run([group], spec)[0]))
        failed = [line.trial is Trial.FAILED for line in lines[-_FAILURES:]]
        if lines[-1].trial is Trial.NOT_RUN or failed == [True] * _FAILURES:
            break
        size *= 2
    return tuple(lines)


def _line(results: Sequence[ProbeResult]) -> SweepLine:
    bad = [r for r in results if r.outcome not in (Outcome.OK, Outcome.WAITING)]
    first = min(bad, key=lambda r: r.step.position if r.step else 0, default=None)
    took = [s.seconds for r in results for s in r.steps if s.step is Step.COMM_INIT and s.outcome is Outcome.OK]
    sizes = sorted({size for r in results for size in r.all_reduce_s})
    return SweepLine(
        world_size=len(results),
        trial=_trial(results),
        failed_in=first.step if first else None,
        error=(first.error if first else "")[:300],
        comm_init_s=max(took, default=0.0),
        all_reduce_s={s: sorted(r.all_reduce_s[s] for r in results if s in r.all_reduce_s)[len(results) // 2] for s in sizes}
        if not bad
        else {},
    )
