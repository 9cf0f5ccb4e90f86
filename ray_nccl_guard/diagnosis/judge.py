"""Puts a verdict together: scan every rank's record, weigh the classes, name culprits, say how sure and what to try next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

from ray_nccl_guard.classes import CLASSES, FailureClass
from ray_nccl_guard.diagnosis import collectives, culprits, experiments, outcomes
from ray_nccl_guard.diagnosis.scan import Scanner
from ray_nccl_guard.diagnosis.weigh import Reason, Sighting, Weighed, active, weigh
from ray_nccl_guard.evidence import Evidence, Finding, Origin, RankEvidence
from ray_nccl_guard.probe.spec import LogLine, Outcome, Step
from ray_nccl_guard.rulebook import Certainty, Rule, RuleRole, shipped_rules
from ray_nccl_guard.verdict import Candidate, Quote, Role, Verdict

_F = FailureClass
# The live probe runs our own program, the same on every rank: these classes are not open to it (DESIGN D7).
NOT_FROM_OUR_PROGRAM = {
    _F.COLLECTIVE_TIMEOUT_DESYNC: _F.INIT_TIMEOUT_HANG,
    _F.SHAPE_OR_DTYPE_MISMATCH: _F.VERSION_MISMATCH,
    _F.USER_CODE_NOT_INFRA: _F.UNKNOWN,
}
MAX_CANDIDATES = 3
MAX_QUOTES = 12
# Two causes closer than this are both on the table: the verdict is open (most shipped causes lie within 0.85 to 0.95).
CLOSE = 0.05


@lru_cache(maxsize=4)
def _scanner(rules: tuple[Rule, ...]) -> Scanner:
    return Scanner(rules)


def scanner_for(rules: Sequence[Rule] | None) -> Scanner:
    """The scanner of a rule book; the shipped one is made once."""
    return _scanner(shipped_rules()) if rules is None else Scanner(rules)


def judge(evidence: Evidence, rules: Sequence[Rule] | None = None) -> Verdict:
    """See `verdict.classify`."""
    if evidence.ok and not any(f.decides for f in evidence.findings):
        return Verdict(failure=_F.OK, summary=CLASSES[_F.OK].summary, certainty=Certainty.ESTABLISHED)
    sightings = active(_sightings(evidence, scanner_for(rules)))
    reasons = [*outcomes.read_outcomes(evidence), *collectives.compare(sightings), *_findings(evidence, sightings)]
    cases = weigh(sightings, reasons)
    if evidence.origin is not Origin.LOG:
        cases = _our_program(cases)
    if not cases or cases[0].failure is _F.UNKNOWN:
        return _unknown(evidence, sightings, cases)
    return _verdict(evidence, sightings, cases)


def _sightings(evidence: Evidence, scanner: Scanner) -> list[Sighting]:
    found: list[Sighting] = []
    for index, record in enumerate(evidence.ranks):
        lines = _record_lines(record)
        if not lines:
            continue
        text = "\n".join(line.text.replace("\n", " ") for line in lines)
        starts = _starts(lines)
        for start, end in scanner.suspects(text):
            order = starts[start]
            line = lines[order]
            found.extend(
                Sighting(
                    record=index, rank=record.rank, order=order, source=line.source, number=line.number,
                    text=line.text, rule=hit.rule, fields=hit.fields,
                )
                for hit in scanner.hits(text[start:end])
            )  # fmt: skip
    return found


def _starts(lines: Sequence[LogLine]) -> dict[int, int]:
    starts, at = {}, 0
    for order, line in enumerate(lines):
        starts[at] = order
        at += len(line.text) + 1
    return starts


def _record_lines(record: RankEvidence) -> list[LogLine]:
    """What the rank printed, then its exception, then what the kernel said, as single lines."""
    lines: list[LogLine] = []
    for line in record.lines:
        parts = line.text.splitlines() or [""]
        lines.extend(LogLine(source=line.source, number=line.number + i, text=part) for i, part in enumerate(parts))
    for source, texts in (("error", record.text.splitlines()), ("kernel", record.kernel_lines)):
        lines.extend(LogLine(source=source, number=i + 1, text=text) for i, text in enumerate(texts))
    return lines


def _findings(evidence: Evidence, sightings: Sequence[Sighting]) -> list[Reason]:
    """Other stages' findings as reasons: one that decides is a cause by itself, the others only speak for a class."""
    reasons = []
    for finding in evidence.findings:
        failure = _class_of(finding)
        seen = any(s.rule.failure is failure and s.rule.role is RuleRole.CAUSE for s in sightings)
        weight = 0.99 if finding.decides else (0.95 if seen else 0.4)
        reasons.append(Reason(
            failure=failure, weight=weight, summary=finding.text, decides=finding.decides,
            strength=2 if finding.decides else int(seen), culprits=finding.culprit_ranks, relief=finding.relief,
        ))  # fmt: skip
    return reasons


def _class_of(finding: Finding) -> FailureClass:
    try:
        return FailureClass(finding.failure)
    except ValueError:
        return _F.UNKNOWN


def _our_program(cases: Sequence[Weighed]) -> list[Weighed]:
    merged: dict[FailureClass, Weighed] = {}
    for case in cases:
        case.failure = NOT_FROM_OUR_PROGRAM.get(case.failure, case.failure)
        other = merged.get(case.failure)
        if other is None or other.score < case.score:
            merged[case.failure] = case
    return sorted(merged.values(), key=lambda c: (-c.score, c.failure.value))


def _verdict(evidence: Evidence, sightings: Sequence[Sighting], cases: Sequence[Weighed]) -> Verdict:
    top = cases[0]
    facts = CLASSES[top.failure]
    rule = next((r for r in top.rules if r.failure is top.failure or r.role is RuleRole.SYMPTOM), None)
    reason = top.reasons[0] if top.reasons else None
    by_reason = reason is not None and (rule is None or reason.weight >= rule.weight or rule.role is not RuleRole.CAUSE)
    certainty = _certainty(cases)
    relief: Mapping[str, str] = next((r.relief for r in top.reasons if r.relief), {}) or (rule.relief if rule else {})
    gloo = rule.gloo if rule is not None and rule.gloo is not None else facts.gloo_can_help
    if gloo and certainty is Certainty.OPEN and evidence.origin is Origin.LOG:
        gloo = None  # an open class is a guess, and so is what would help
    summary = facts.summary
    if by_reason and reason is not None:
        summary = reason.summary
    elif rule is not None and rule.failure is top.failure:
        summary = rule.summary
    return Verdict(
        failure=top.failure,
        summary=summary,
        rule=rule.id if rule is not None and not by_reason else None,
        certainty=certainty,
        candidates=tuple(
            Candidate(failure=c.failure, score=c.score, rules=tuple(r.id for r in c.rules)) for c in cases[:MAX_CANDIDATES]
        ),
        culprit_ranks=culprits.name(evidence, sightings, top),
        gloo_can_help=gloo,
        evidence=_quotes(sightings, top),
        against=_against(cases),
        ruled_out=_ruled_out(evidence),
        relief=dict(relief),
        step=_step(evidence),
        next=experiments.next_experiment(evidence, cases, rule),
        caution=rule.caution if rule is not None else "",
    )


def _certainty(cases: Sequence[Weighed]) -> Certainty:
    top = cases[0]
    strength = max([r.certainty.strength for r in top.rules if r.failure is top.failure and r.role is RuleRole.CAUSE]
                   + [r.strength for r in top.reasons], default=0)  # fmt: skip
    if not top.named:
        strength = 0
    rival = cases[1] if len(cases) > 1 else None
    if rival and rival.named and rival.score > top.score - CLOSE:
        strength = min(strength, 0 if rival.score >= top.score - 0.02 else 1)
    return next(c for c in Certainty if c.strength == strength)


def _against(cases: Sequence[Weighed]) -> tuple[str, ...]:
    texts = []
    for case in cases[1:MAX_CANDIDATES]:
        if case.named:
            why = case.reasons[0].summary if case.reasons else case.rules[0].summary
            texts.append(f"{case.failure.value} is also named: {why}")
    return tuple(texts)


def _quotes(sightings: Sequence[Sighting], top: Weighed) -> tuple[Quote, ...]:
    """The lines it rests on, one for each rule and rank, causes first; echoes after."""
    mine, echoes, seen = [], [], set()
    for s in sightings:
        key = (s.rank, s.rule.id)
        if key in seen or s.rule.role is RuleRole.BOILERPLATE:
            continue
        seen.add(key)
        cause = s.rule in top.rules and s.rule.role is not RuleRole.CASCADE
        quote = Quote(rank=s.rank, line=s.number, text=s.text[:500], role=Role.CAUSE if cause else Role.CASCADE, source=s.source)
        (mine if cause else echoes).append(quote)
    return tuple(_distinct(mine + echoes))[:MAX_QUOTES]


def _distinct(quotes: Sequence[Quote]) -> list[Quote]:
    seen: dict[tuple[int | None, str, int], Quote] = {}
    for quote in quotes:
        seen.setdefault((quote.rank, quote.source, quote.line), quote)
    return list(seen.values())


def _ruled_out(evidence: Evidence) -> tuple[str, ...]:
    """Steps that every rank of a probe has behind it."""
    if evidence.origin is Origin.LOG or not evidence.ranks:
        return ()
    reached = [r.step.position for r in evidence.ranks if r.step is not None and r.outcome is not Outcome.OK]
    if not reached:
        return ()
    done = [s.value for s in Step if s.position < min(reached)]
    return (f"{', '.join(done)} ok on every rank that answered",) if done else ()


def _step(evidence: Evidence) -> Step | None:
    steps = [r.step for r in evidence.ranks if r.step and r.outcome not in (Outcome.OK, Outcome.WAITING)]
    return min(steps, key=lambda s: s.position, default=None)


def _unknown(evidence: Evidence, sightings: Sequence[Sighting], cases: Sequence[Weighed]) -> Verdict:
    said = next((r for r in evidence.ranks if r.text), None)
    summary = "no line names a known failure"
    if said is not None:
        summary = f"an error that no rule knows: {said.text.splitlines()[0][:200]}"
    failed = tuple(r.rank for r in evidence.with_outcome(Outcome.FAILED) if r.rank is not None)
    return Verdict(
        failure=_F.UNKNOWN,
        summary=summary,
        candidates=tuple(Candidate(failure=c.failure, score=c.score) for c in cases[1 : MAX_CANDIDATES + 1]),
        culprit_ranks=failed if len(failed) < evidence.world_size else (),
        evidence=_quotes(sightings, Weighed(failure=_F.UNKNOWN)),
        ruled_out=_ruled_out(evidence),
        step=_step(evidence),
        next="NCCL_DEBUG=INFO ray-nccl-guard probe --locate",
    )
