"""The verdict: from every rank's record to the cause, the culprit, and the one next experiment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from ray_nccl_guard.classes import CLASSES, FailureClass, Scope
from ray_nccl_guard.diagnosis import culprits, experiments, outcomes, signals
from ray_nccl_guard.diagnosis.gather import Diagnosis, diagnose
from ray_nccl_guard.diagnosis.weigh import Weighed, certainty_of
from ray_nccl_guard.evidence import Evidence, Origin
from ray_nccl_guard.probe.spec import Step
from ray_nccl_guard.rulebook import Certainty, Rule, RuleRole

__all__ = ["Candidate", "Certainty", "Quote", "Role", "Verdict", "classify"]

MAX_CANDIDATES = 3
# Gloo avoids NCCL's kernels, not the program's own, and a log does not say whose kernel it was. The probe runs no other.
NOT_TOLD_BY_LOGS = (FailureClass.ILLEGAL_MEMORY_ACCESS,)
# A report quotes a dozen lines and not a page; longer lines are cut where no terminal would show them either.
MAX_QUOTES, MAX_QUOTE = 12, 500


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
        signals: remarks in the logs that speak for the infrastructure or for the program; none of them proves it.
        hosts: the host of each rank, as far as the evidence knows them.
        hosts_of_the_cause: hosts whose own lines name the cause; for logs that do not say whose rank a line is.
        silence: of culprits that say nothing themselves: whether there is no record of them, or one without a complaint.
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
    signals: tuple[str, ...] = ()
    hosts: Mapping[int, str] = field(default_factory=dict, repr=False)
    hosts_of_the_cause: tuple[str, ...] = ()
    silence: str = ""

    @property
    def culprit_hosts(self) -> tuple[str, ...]:
        """The hosts of the ranks to look at first, each once, in the order of the ranks; else those that name the cause."""
        if not self.culprit_ranks:
            return self.hosts_of_the_cause
        return tuple(dict.fromkeys(host for rank in self.culprit_ranks if (host := self.hosts.get(rank, ""))))

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
            "signals": list(self.signals),
            "culprit_hosts": list(self.culprit_hosts),
            "silence": self.silence,
        }


def classify(evidence: Evidence, rules: Sequence[Rule] | None = None) -> Verdict:
    """Name the failure. `rules` defaults to the shipped rule book; never raises on what ranks printed."""
    # A log that names no failure is no proof that there was none.
    passed = evidence.ok and evidence.origin is not Origin.LOG
    if passed and not any(finding.decides for finding in evidence.findings):
        return Verdict(failure=FailureClass.OK, summary="nothing failed", certainty=Certainty.ESTABLISHED)
    diagnosis = diagnose(evidence, rules)
    unknown = not diagnosis.cases or diagnosis.cases[0].failure is FailureClass.UNKNOWN or _only_echoes(evidence, diagnosis)
    verdict = _unknown(evidence, diagnosis) if unknown else _named(evidence, diagnosis)
    return replace(verdict, hosts={r.rank: r.host for r in evidence.ranks if r.rank is not None and r.host})


def _named(evidence: Evidence, diagnosis: Diagnosis) -> Verdict:
    top, certainty = diagnosis.cases[0], certainty_of(diagnosis.cases)
    rule, reason = top.rule, top.reason
    gloo = rule.gloo if rule is not None and rule.gloo is not None else CLASSES[top.failure].gloo_can_help
    if gloo and evidence.origin is Origin.LOG and (certainty is Certainty.OPEN or top.failure in NOT_TOLD_BY_LOGS):
        gloo = None  # an open class is a guess, and so would be what helps
    summary = (reason.summary if reason else rule.summary if rule else "") or CLASSES[top.failure].summary
    suspects = culprits.name(evidence, diagnosis.sightings, top)
    return Verdict(
        failure=top.failure,
        summary=summary,
        rule=rule.id if rule is not None and reason is None else None,
        certainty=certainty,
        candidates=_candidates(diagnosis),
        culprit_ranks=suspects,
        silence=culprits.silence(evidence, diagnosis.sightings, suspects) if suspects else "",
        hosts_of_the_cause=culprits.hosts_of_the_cause(evidence, diagnosis.sightings, top),
        gloo_can_help=gloo,
        evidence=_quotes(diagnosis, top),
        against=tuple(f"{c.failure.value} is named too: {c.why}" for c in diagnosis.cases[1:MAX_CANDIDATES] if c.named),
        ruled_out=outcomes.ruled_out(evidence),
        relief=dict(next((r.relief for r in top.reasons if r.relief), rule.relief if rule else {})),
        step=outcomes.failed_step(evidence, suspects),
        next=experiments.next_experiment(evidence, diagnosis.cases),
        caution=rule.caution if rule is not None else "",
        signals=signals.remarks(diagnosis.sightings),
    )


def _only_echoes(evidence: Evidence, diagnosis: Diagnosis) -> bool:
    """Whether a lost peer is all that is named, and there is one whose own error nobody knows: that error has come first."""
    top = diagnosis.cases[0]
    echo = top.failure is FailureClass.REMOTE_PEER_DIED and not top.named and evidence.origin is not Origin.LOG
    return echo and bool(outcomes.failed_unexplained(evidence, diagnosis.sightings))


def _unknown(evidence: Evidence, diagnosis: Diagnosis) -> Verdict:
    failed = outcomes.failed_unexplained(evidence, diagnosis.sightings)
    ranks = tuple(r.rank for r in failed if r.rank is not None)
    suspects = ranks if len(ranks) < evidence.world_size else ()
    told = (s.text for s in diagnosis.sightings if s.rule.alarms and s.rank in ranks)
    said = next((r.text for r in failed or evidence.ranks if r.text.strip()), None) or next(told, "")
    hint = next((s.rule.summary for s in diagnosis.sightings if s.rule.role is RuleRole.HINT), "")
    summary = "no line names a known failure" + (f"; seen: {hint}" if hint else "")
    if said:
        summary = f"an error that no rule knows: {said.strip().splitlines()[0][:200]}"
    return Verdict(
        failure=FailureClass.UNKNOWN,
        summary=summary,
        candidates=_candidates(diagnosis),
        culprit_ranks=suspects,
        evidence=_quotes(diagnosis, None),
        ruled_out=outcomes.ruled_out(evidence),
        step=outcomes.failed_step(evidence, suspects),
        next=experiments.WITHOUT_A_CLUE,
        signals=signals.remarks(diagnosis.sightings),
    )


def _candidates(diagnosis: Diagnosis) -> tuple[Candidate, ...]:
    return tuple(
        Candidate(failure=c.failure, score=c.score, rules=tuple(r.id for r in c.rules))
        for c in diagnosis.cases[:MAX_CANDIDATES]
        if c.failure is not FailureClass.UNKNOWN
    )


def _quotes(diagnosis: Diagnosis, top: Weighed | None) -> tuple[Quote, ...]:
    """The lines it rests on: one for each rule and rank, those of the class first, echoes after."""
    quotes: dict[tuple[int | None, str, int], Quote] = {}
    seen: set[tuple[int | None, str]] = set()
    for s in diagnosis.sightings:
        if s.rule.role is RuleRole.BOILERPLATE or (s.rank, s.rule.id) in seen:
            continue
        seen.add((s.rank, s.rule.id))
        supports = top is not None and s.failure is top.failure and s.rule.role is not RuleRole.CASCADE
        role = Role.CAUSE if supports else Role.CASCADE
        key = (s.rank, s.source, s.number)
        if key not in quotes or role is Role.CAUSE:
            quotes[key] = Quote(rank=s.rank, line=s.number, text=s.text[:MAX_QUOTE], role=role, source=s.source)
    ordered = sorted(quotes.values(), key=lambda quote: quote.role is Role.CASCADE)
    return tuple(ordered[:MAX_QUOTES])
