"""Weighs what was seen: a cause beats a symptom, a symptom beats a cascade, hints tilt, boilerplate counts for nothing."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ray_nccl_guard.classes import FailureClass
from ray_nccl_guard.rulebook import Rule, RuleRole

# Without a rule that names a cause no class may score as high as one that has such a rule (the lightest shipped cause
# weighs 0.6); the order of roles in `RuleRole` then holds whatever the number of hints.
SOFT_CEILING = 0.59
# Agreement of several rules tells apart two causes of equal weight and must not overturn a heavier one.
AGREEMENT = 0.04


@dataclass(frozen=True, slots=True, kw_only=True)
class Sighting:
    """One line that one rule claims, and where it stood.

    Attributes:
        record: index of the rank's record in the evidence.
        order: position within the record.
    """

    record: int
    rank: int | None
    order: int
    source: str
    number: int
    text: str
    rule: Rule
    fields: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """A conclusion that no single line carries: ranks compared, outcomes read, a finding of another stage.

    Attributes:
        weight: as a rule's; 0.6 and above count as a cause.
        records: indices of the records it rests on.
    """

    failure: FailureClass
    weight: float
    summary: str
    decides: bool = False
    strength: int = 0
    culprits: tuple[int, ...] = ()
    relief: Mapping[str, str] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class Weighed:
    """One class's case: its score, the rules and reasons for it, strongest first."""

    failure: FailureClass
    score: float = 0.0
    rules: list[Rule] = field(default_factory=list)
    reasons: list[Reason] = field(default_factory=list)
    named: bool = False


def active(sightings: Iterable[Sighting]) -> list[Sighting]:
    """The sightings whose rule is not void: what it requires was seen, what voids it was not."""
    seen = list(sightings)
    ids = {s.rule.id for s in seen}
    return [s for s in seen if _holds(s.rule, ids)]


def _holds(rule: Rule, ids: Collection[str]) -> bool:
    if rule.requires and not any(other in ids for other in rule.requires):
        return False
    return not any(other in ids for other in rule.unless)


def weigh(sightings: Sequence[Sighting], reasons: Sequence[Reason] = ()) -> list[Weighed]:
    """Every class the evidence speaks for, best first. `sightings` are active ones (see `active`)."""
    rules = list({s.rule.id: s.rule for s in sightings}.values())
    if not any(r.role in (RuleRole.CAUSE, RuleRole.SYMPTOM, RuleRole.CASCADE) for r in rules) and not reasons:
        return []  # hints alone are no failure
    cases = {failure: _case(failure, rules, reasons) for failure in FailureClass}
    first_seen = _first_seen(sightings)
    found = [case for case in cases.values() if case.score > 0]
    found.sort(key=lambda c: (-round(c.score, 3), first_seen.get(c.failure, (1 << 30)), c.failure.value))
    return found


def _case(failure: FailureClass, rules: Sequence[Rule], reasons: Sequence[Reason]) -> Weighed:
    mine = [r for r in rules if r.failure is failure and r.role is not RuleRole.BOILERPLATE]
    causes = [r for r in mine if r.role is RuleRole.CAUSE]
    soft = max((r.weight for r in mine if r.role in (RuleRole.SYMPTOM, RuleRole.CASCADE)), default=0.0)
    soft = max(soft, max((r.also[failure] for r in rules if failure in r.also), default=0.0))
    soft += sum(r.weight for r in mine if r.role is RuleRole.HINT)
    because = [r for r in reasons if r.failure is failure]
    hard = max([r.weight for r in causes] + [r.weight for r in because if r.weight >= 0.6], default=0.0)
    soft += sum(r.weight for r in because if r.weight < 0.6)
    agreeing = len(causes) + len(because) - 1
    if hard:
        score = min(0.99, hard + AGREEMENT * min(1.0, soft + 0.5 * max(0, agreeing)))
    else:
        score = min(SOFT_CEILING, soft)
    supporters = mine + [r for r in rules if failure in r.also and r not in mine]
    order = list(RuleRole)
    supporters.sort(key=lambda r: (r.failure is not failure, order.index(r.role), -r.weight, r.id))
    because.sort(key=lambda r: -r.weight)
    return Weighed(failure=failure, score=score, rules=supporters, reasons=because, named=bool(hard))


def _first_seen(sightings: Sequence[Sighting]) -> dict[FailureClass, int]:
    """For equal scores: the class whose line stands first in its own rank's record (never across ranks' clocks)."""
    first: dict[FailureClass, int] = {}
    for s in sightings:
        if s.rule.role is not RuleRole.BOILERPLATE:
            first[s.rule.failure] = min(first.get(s.rule.failure, 1 << 30), s.order)
    return first
