"""The report: everything one run's guard saw and decided, as one value and as the JSON that others rely on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ray_nccl_guard import differences, excerpts
from ray_nccl_guard.attempt import Attempt, sized
from ray_nccl_guard.classes import FailureClass
from ray_nccl_guard.compat.skew import Difference
from ray_nccl_guard.excerpts import Excerpt
from ray_nccl_guard.facts import RankFacts
from ray_nccl_guard.locate.result import Located
from ray_nccl_guard.policy import Policy
from ray_nccl_guard.probe.spec import Outcome, ProbeResult, Step
from ray_nccl_guard.rung import Decision
from ray_nccl_guard.verdict import Certainty, Verdict

# Raised when a key is added; keys are never renamed or taken away.
SCHEMA_VERSION = 1

__all__ = ["SCHEMA_VERSION", "Attempt", "Report", "outcomes", "ranks_text", "step_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What the guard saw and decided.

    Attributes:
        verdict: of the first rung, if it failed; of the last attempt otherwise.
        attempts: every rung in order, over all worker groups of the run so far.
        guard_error: the traceback of the guard's own failure, None if it had none.
        timings_s: seconds by name; `guard` is all that the guard added to the start.
        flight: what the Flight Recorder said when training ended badly (`Collected.to_json`); None if it did not.
        drill: the faults of the drill that this was, empty if it was none. Attempts say in which of them any was acted out.
        run_name: the run's name as Ray Train knows it, empty if there is none.
        path: where the JSON lies, empty if it was not written.
    """

    world_size: int
    backend_wanted: str
    decision: Decision
    verdict: Verdict = Verdict(failure=FailureClass.OK, certainty=Certainty.ESTABLISHED)
    policy: Policy = Policy()
    facts: tuple[RankFacts, ...] = ()
    attempts: tuple[Attempt, ...] = ()
    guard_error: str | None = None
    timings_s: Mapping[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    flight: Mapping[str, Any] | None = None
    drill: str = ""
    run_name: str = ""
    path: str = ""

    @property
    def chosen(self) -> Attempt | None:
        """The attempt that passed and is trained on, None if none did. Later ones may only have asked for less (`trial`)."""
        wanted = (self.decision.backend, dict(self.decision.relief))
        passed = [a for a in self.attempts if a.evidence.ok and (a.rung.backend, dict(a.rung.env)) == wanted]
        return passed[-1] if passed else None

    @property
    def located(self) -> Located | None:
        """Where small worlds found the fault, None if none were run."""
        return next((a.located for a in self.attempts if a.located), None)

    @property
    def skew(self) -> tuple[Difference, ...]:
        """The facts on which the ranks differ."""
        return differences.between(self.facts)

    @property
    def all_notes(self) -> tuple[str, ...]:
        """What is worth a line and explains no failure: of the decision, of the run, of the ranks' facts."""
        return (*self.decision.notes, *self.notes, *differences.sentences(self.skew))

    @property
    def failed(self) -> Attempt | None:
        """The attempt that the verdict is about."""
        return next((a for a in self.attempts if a.verdict is self.verdict), self.attempts[0] if self.attempts else None)

    @property
    def context(self) -> tuple[Excerpt, ...]:
        """The lines around those that the verdict quotes."""
        return excerpts.around(self.verdict.evidence, self.failed.results if self.failed else ())

    @property
    def collectives_proved(self) -> tuple[str, ...]:
        """Operations that every rank completed with right values on the backend that was chosen."""
        chosen = self.chosen
        if chosen is None or not chosen.results:
            return ()
        common = set.intersection(*(set(r.proved) for r in chosen.results))
        return tuple(name for name in chosen.results[0].proved if name in common)

    def with_changes(self, **changes: Any) -> Report:
        return replace(self, **changes)

    def to_json(self) -> dict[str, Any]:
        """The contract of `<run>/nccl_guard/report.json` and of `probe --json`."""
        return {
            "schema_version": SCHEMA_VERSION,
            "world_size": self.world_size,
            "backend_wanted": self.backend_wanted,
            "backend_chosen": self.decision.backend,
            "action": self.decision.action.value,
            "because": self.decision.because,
            "verdict": self.verdict.to_json(),
            "relief": dict(self.decision.relief),
            "policy": self.policy.to_json(),
            "guard_error": self.guard_error,
            "collectives_proved": list(self.collectives_proved),
            "attempts": [a.to_json() for a in self.attempts],
            "ranks": self._ranks(),
            "timings_s": {k: round(v, 4) for k, v in {**self.timings_s, **self.stage_s}.items()},
            "notes": list(self.all_notes),
            "verdict_attempt": next((i for i, a in enumerate(self.attempts) if a.verdict is self.verdict), None),
            "context": [excerpt.to_json() for excerpt in self.context],
            "run_name": self.run_name,
            "drill": self.drill,
            "flight": None if self.flight is None else dict(self.flight),
            "located": self.located.to_json() if self.located else None,
            "all_reduce_s": sized(self.chosen.all_reduce_s if self.chosen else {}),
            "skew": [
                {
                    "name": d.name,
                    "majority": d.majority,
                    "tied": d.tied,
                    "others": [{"value": value, "ranks": list(ranks)} for value, ranks in d.others.items()],
                }
                for d in self.skew
            ],
        }

    def _ranks(self) -> list[dict[str, Any]]:
        last = {r.rank: r for a in self.attempts for r in a.results}
        failed = {r.rank: r for r in (self.failed.results if self.failed else ())}
        return [_rank(fact, last.get(fact.rank), failed.get(fact.rank)) for fact in self.facts]

    @property
    def stage_s(self) -> dict[str, float]:
        """The slowest rank's seconds of each step of the chosen rung: a slow stage that passed is a finding too."""
        results = self.chosen.results if self.chosen else ()
        slowest: dict[str, float] = {}
        for result in results:
            for record in result.steps:
                slowest[record.step.value] = max(slowest.get(record.step.value, 0.0), record.seconds)
        return slowest


def _rank(facts: RankFacts, last: ProbeResult | None, failed: ProbeResult | None) -> dict[str, Any]:
    chosen = facts.addresses
    return {
        "rank": facts.rank,
        "host": facts.host,
        "node": facts.node,
        "address": facts.address,
        "local_rank": facts.local_rank,
        "device": last.device if last else None,
        "gpu_ids": list(facts.gpu_ids),
        "gpu": None if facts.gpu is None else asdict(facts.gpu),
        "driver_version": facts.driver_version,
        "torch_version": facts.torch_version,
        "python_version": facts.python_version,
        "interface": None if chosen is None else {"nccl": chosen.nccl.interface, "gloo": chosen.gloo.interface},
        "limits": dict(facts.limits),
        "libnccl": dict(facts.libnccl),
        "settings": dict(facts.settings),
        "not_run": dict(facts.not_run),
        "shm_total_bytes": facts.shm_total_bytes,
        "shm_free_bytes": facts.shm_free_bytes,
        "free_before_bytes": last.free_before_bytes if last else None,
        "free_after_bytes": last.free_after_bytes if last else None,
        "outcome": failed.outcome.value if failed else None,
        "steps": [
            {"step": s.step.value, "outcome": s.outcome.value, "seconds": round(s.seconds, 4), "detail": s.detail}
            for s in (failed.steps if failed else ())
        ],
    }


def ranks_text(ranks: tuple[int, ...] | list[int]) -> str:
    """Ranks as people write them: `0-2, 5`."""
    parts: list[str] = []
    run: list[int] = []
    for rank in [*sorted(ranks), None]:
        if run and rank == run[-1] + 1:
            run.append(rank)
            continue
        if run:
            parts.append(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}")
        run = [] if rank is None else [rank]
    return ", ".join(parts)


def outcomes(attempt: Attempt, *wanted: Outcome) -> tuple[int, ...]:
    """The ranks of `attempt` that ended in one of `wanted`."""
    return tuple(r.rank for r in attempt.evidence.ranks if r.outcome in wanted and r.rank is not None)


def step_of(attempt: Attempt) -> Step | None:
    """The step that `attempt` failed in: the verdict's, or the earliest among the ranks that failed."""
    if attempt.verdict.step is not None:
        return attempt.verdict.step
    bad = [r.step for r in attempt.evidence.ranks if r.outcome not in (Outcome.OK, Outcome.WAITING) and r.step]
    return min(bad, key=lambda step: step.position) if bad else None
