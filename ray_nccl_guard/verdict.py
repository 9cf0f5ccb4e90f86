"""The verdict: from every rank's record to the cause, the culprit, and the one next experiment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from ray_nccl_guard.classes import CLASSES, FailureClass, Scope
from ray_nccl_guard.evidence import Evidence
from ray_nccl_guard.probe.spec import Step
from ray_nccl_guard.rulebook import Certainty, Rule

__all__ = ["Candidate", "Certainty", "Quote", "Role", "Verdict", "classify"]


class Role(Enum):
    """A line that names a cause, or one that only echoes another rank's."""

    CAUSE = "cause"
    CASCADE = "cascade"


@dataclass(frozen=True, slots=True, kw_only=True)
class Quote:
    """One evidence line, as it stood. `line` counts from 1 in `source`."""

    rank: int | None
    line: int
    text: str
    role: Role
    source: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A class the evidence speaks for, with a score in 0..1 and the rules that matched."""

    failure: FailureClass
    score: float
    rules: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What failed, on whom, and how sure that is.

    Attributes:
        failure: the class.
        summary: one clause that says what happened, for the first line of the message.
        rule: the rule that decided, None if reasoning over the ranks did.
        candidates: up to three, best first.
        culprit_ranks: ranks to look at first; empty if the evidence names none.
        gloo_can_help: None if not known.
        evidence: the lines it rests on, causes first.
        against: what speaks against it.
        ruled_out: what was seen to work.
        relief: the smallest setting known to sidestep this failure.
        step: the step that failed.
        next: the one experiment that would tell the top two candidates apart, as a command.
        caution: what the deciding signature is known to be mistaken for, empty if nothing.
    """

    failure: FailureClass
    summary: str = ""
    rule: str | None = None
    certainty: Certainty = Certainty.OPEN
    candidates: tuple[Candidate, ...] = ()
    culprit_ranks: tuple[int, ...] = ()
    gloo_can_help: bool | None = None
    evidence: tuple[Quote, ...] = ()
    against: tuple[str, ...] = ()
    ruled_out: tuple[str, ...] = ()
    relief: Mapping[str, str] = field(default_factory=dict)
    step: Step | None = None
    next: str = ""
    caution: str = ""

    @property
    def scope(self) -> Scope:
        return CLASSES[self.failure].scope

    def to_json(self) -> dict[str, Any]:
        """The contract of `classify --json` and of a report's `verdict` (keys are added, never renamed)."""
        return {
            "failure": self.failure.value,
            "certainty": self.certainty.value,
            "candidates": [
                {"failure": c.failure.value, "score": round(c.score, 3), "rules": list(c.rules)} for c in self.candidates
            ],
            "culprit_ranks": list(self.culprit_ranks),
            "scope": self.scope.value,
            "gloo_can_help": self.gloo_can_help,
            "evidence": [
                {"rank": q.rank, "line": q.line, "text": q.text, "role": q.role.value, "source": q.source}
                for q in self.evidence
            ],
            "next": self.next,
            "summary": self.summary,
            "rule": self.rule,
            "step": self.step.value if self.step else None,
            "against": list(self.against),
            "ruled_out": list(self.ruled_out),
            "relief": dict(self.relief),
            "caution": self.caution,
        }


def classify(evidence: Evidence, rules: Sequence[Rule] | None = None) -> Verdict:
    """Name the failure. `rules` defaults to the shipped rule book; never raises on what ranks printed."""
    from ray_nccl_guard.diagnosis.judge import judge

    return judge(evidence, rules)
