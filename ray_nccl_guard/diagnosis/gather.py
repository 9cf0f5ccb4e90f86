"""From evidence to weighed classes: scan every rank's record, hear the other stages' findings, weigh it all."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from ray_nccl_guard.classes import FailureClass
from ray_nccl_guard.diagnosis import collectives, outcomes
from ray_nccl_guard.diagnosis.scan import Scanner
from ray_nccl_guard.diagnosis.weigh import Reason, Sighting, Weighed, active, weigh
from ray_nccl_guard.evidence import Evidence, Finding, Origin, RankEvidence
from ray_nccl_guard.probe.spec import LogLine
from ray_nccl_guard.rulebook import Rule, RuleRole, shipped_rules

_F = FailureClass
# The live probe runs our own program, the same on every rank: these classes are not open to it (DESIGN D7). Two ranks of
# one program that disagree about a message run different libraries.
NOT_FROM_OUR_PROGRAM = {
    _F.COLLECTIVE_TIMEOUT_DESYNC: _F.INIT_TIMEOUT_HANG,
    _F.SHAPE_OR_DTYPE_MISMATCH: _F.VERSION_MISMATCH,
    _F.USER_CODE_NOT_INFRA: _F.UNKNOWN,
}
# A finding that does not decide explains a failure whose lines name no cause: just above a symptom, below every cause.
# Where the lines do name a cause, it only tilts.
EXPLAINS, TILTS = 0.64, 0.2
# Lines looked at in one go: enough to make the scan's fixed cost vanish, little enough to keep a second copy of them cheap.
BATCH = 50_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """Every class the evidence speaks for, best first, and the lines it rests on."""

    cases: tuple[Weighed, ...]
    sightings: tuple[Sighting, ...]


@lru_cache(maxsize=1)
def _shipped_scanner() -> Scanner:
    return Scanner(shipped_rules())


def scanner_for(rules: Sequence[Rule] | None) -> Scanner:
    """The scanner of a rule book; that of the shipped one is made once."""
    return _shipped_scanner() if rules is None else Scanner(rules)


def diagnose(evidence: Evidence, rules: Sequence[Rule] | None = None) -> Diagnosis:
    """Weigh the evidence. `rules` defaults to the shipped rule book."""
    sightings = active(_sightings(evidence, scanner_for(rules)))
    reasons = [*collectives.compare(sightings), *outcomes.read_outcomes(evidence, sightings)]
    closed = () if evidence.origin is Origin.LOG else tuple(NOT_FROM_OUR_PROGRAM)
    if not closed:
        reasons += collectives.ended_by_itself(sightings)
    if closed:
        sightings = [_our_program(s) for s in sightings]
        reasons = [replace(r, failure=NOT_FROM_OUR_PROGRAM.get(r.failure, r.failure)) for r in reasons]
    reasons += _findings(evidence, sightings, reasons)
    return Diagnosis(cases=tuple(weigh(sightings, reasons, closed)), sightings=tuple(sightings))


def _our_program(sighting: Sighting) -> Sighting:
    """The same line seen as what it can mean in a program of ours."""
    return replace(sighting, failure=NOT_FROM_OUR_PROGRAM.get(sighting.failure, sighting.failure))


def _sightings(evidence: Evidence, scanner: Scanner) -> list[Sighting]:
    found: list[Sighting] = []
    lines: list[LogLine] = []
    starts: list[int] = []
    first = 0
    for index, record in enumerate(evidence.ranks):
        starts.append(len(lines))
        lines += _record_lines(record)
        if len(lines) >= BATCH:
            found += _seen(evidence, first, starts, lines, scanner)
            first, starts, lines = index + 1, [], []
    return found + _seen(evidence, first, starts, lines, scanner)


def _seen(
    evidence: Evidence, first: int, starts: Sequence[int], lines: Sequence[LogLine], scanner: Scanner
) -> list[Sighting]:
    """What the rules see in the lines of consecutive records; `starts` says where each record's begin, from `first` on."""
    found: list[Sighting] = []
    for at in scanner.suspects([line.text for line in lines]):
        line = lines[at]
        own = bisect_right(starts, at) - 1
        index, order = first + own, at - starts[own]
        for hit in scanner.hits(line.text):
            found.append(
                Sighting(
                    record=index,
                    rank=evidence.ranks[index].rank,
                    order=order,
                    source=line.source,
                    number=line.number,
                    text=line.text,
                    rule=hit.rule,
                    failure=hit.rule.failure,
                    fields=hit.fields,
                )
            )
    return found


def _record_lines(record: RankEvidence) -> Sequence[LogLine]:
    """What the rank printed, then its exception, then what the kernel said, as lines without line feeds."""
    printed: Sequence[LogLine] = record.lines
    joined = "".join([line.text for line in printed])
    if "\n" in joined or "\r" in joined:
        printed = [
            LogLine(source=line.source, number=line.number, text=part) for line in printed for part in line.text.splitlines()
        ]
    if not record.text and not record.kernel_lines:
        return printed
    more = [LogLine(source="error", number=i + 1, text=text) for i, text in enumerate(record.text.splitlines())]
    for i, text in enumerate(record.kernel_lines):
        more.append(LogLine(source="kernel", number=i + 1, text=" ".join(text.splitlines())))
    return [*printed, *more]


def _findings(evidence: Evidence, sightings: Sequence[Sighting], reasons: Sequence[Reason]) -> list[Reason]:
    """Other stages' findings as reasons: one that decides is a cause by itself, the others explain what has failed."""
    named = any(s.rule.role is RuleRole.CAUSE for s in sightings) or any(r.decides for r in reasons)
    found = []
    for finding in evidence.findings:
        if _class_of(finding) in (_F.UNKNOWN, _F.OK):
            continue
        weight = 0.99 if finding.decides else (TILTS if named else EXPLAINS)
        found.append(Reason(
            failure=_class_of(finding), weight=weight, summary=finding.text, decides=finding.decides,
            strength=2 if finding.decides else 0, culprits=finding.culprit_ranks, relief=finding.relief,
        ))  # fmt: skip
    return found


def _class_of(finding: Finding) -> FailureClass:
    try:
        return FailureClass(finding.failure)
    except ValueError:
        return _F.UNKNOWN
