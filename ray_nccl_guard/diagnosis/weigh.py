"""Weighs what was seen: a cause beats a symptom, a symptom beats a cascade, hints tilt, boilerplate counts for nothing."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ray_nccl_guard.classes import FailureClass
from ray_nccl_guard.rulebook import Certainty, Rule, RuleRole

# Weights from here on name a cause. Without one no class may score as high as a class that has one: the order of roles in
# `RuleRole` then holds whatever the number of hints.
HARD = 0.6
SOFT_CEILING = 0.59
# Agreement of several rules tells apart two causes of equal weight and must not overturn a heavier one.
AGREEMENT = 0.04
# Two causes closer than CLOSE are both on the table, closer than TIED the verdict is open between them.
CLOSE, TIED = 0.05, 0.03
FAILURES = (RuleRole.CAUSE, RuleRole.SYMPTOM, RuleRole.CASCADE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sighting:
    """One line that one rule claims, and where it stood.

    Attributes:
        record: index of the rank's record in the evidence.
        order: position within the record.
        failure: the class it speaks for here: the rule's, or what that class can mean in a program of ours.
    """

    record: int
    rank: int | None
    order: int
    source: str
    number: int
    text: str
    rule: Rule
    failure: FailureClass
    fields: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """A conclusion that no single line carries: ranks compared, outcomes read, a finding of another stage.

    Attributes:
        weight: as a rule's; `HARD` and above count as a cause.
        decides: it is a verdict by itself, whatever the lines say.
        strength: the certainty it can carry, as `Certainty.strength`.
    """

    failure: FailureClass
    weight: float
    summary: str
    decides: bool = False
    strength: int = 0
    culprits: tuple[int, ...] = ()
    relief: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Weighed:
    """One class's case: its score, the rules and reasons for it, strongest first.

    Attributes:
        named: something names it as a cause; False if symptoms, echoes and hints are all there is.
    """

    failure: FailureClass
    score: float
    rules: tuple[Rule, ...] = ()
    reasons: tuple[Reason, ...] = ()
    named: bool = False

    @property
    def rule(self) -> Rule | None:
        """The strongest rule that is about this class, not merely explained by it."""
        return next((r for r in self.rules if r.role is not RuleRole.HINT), None)

    @property
    def reason(self) -> Reason | None:
        """The strongest reason, if it carries more than the strongest rule."""
        best = self.reasons[0] if self.reasons else None
        if best is None or (self.rule is not None and self.rule.role is RuleRole.CAUSE and self.rule.weight > best.weight):
            return None
        return best

    @property
    def why(self) -> str:
        return self.reason.summary if self.reason else self.rule.summary if self.rule else ""


def active(sightings: Iterable[Sighting]) -> list[Sighting]:
    """The sightings whose rule is not void: what it requires was seen, and nothing that voids it stands.

    A rule that is void itself voids nobody. Two rules that void each other are both void.
    """
    seen = list(sightings)
    ids = {s.rule.id for s in seen}
    rules = {s.rule.id: s.rule for s in seen if not s.rule.requires or not ids.isdisjoint(s.rule.requires)}
    standing = _standing(rules, set(rules))
    while True:
        following = _standing(rules, _standing(rules, standing))
        if following == standing:
            return [s for s in seen if s.rule.id in standing]
        standing = following


def _standing(rules: Mapping[str, Rule], voiding: Collection[str]) -> set[str]:
    """The rules that none of `voiding` voids."""
    return {name for name, rule in rules.items() if not any(other in voiding for other in rule.unless)}


def weigh(
    sightings: Sequence[Sighting], reasons: Sequence[Reason] = (), closed: Collection[FailureClass] = ()
) -> list[Weighed]:
    """Every class the evidence speaks for, best first. `sightings` are active ones (see `active`); `closed` cannot be."""
    rules = list({(s.rule.id, s.failure): (s.rule, s.failure) for s in sightings}.values())
    if not any(r.role in FAILURES or r.alarms for r, _ in rules) and not reasons:
        return []  # hints alone are no failure
    cases = [_case(failure, rules, reasons) for failure in FailureClass if failure not in closed]
    first_seen = _first_seen(sightings)
    found = [case for case in cases if case.score > 0]
    found.sort(key=lambda c: (-c.score, first_seen.get(c.failure, 1 << 30), c.failure.value))
    return found


def _case(failure: FailureClass, rules: Sequence[tuple[Rule, FailureClass]], reasons: Sequence[Reason]) -> Weighed:
    mine = [r for r, meant in rules if meant is failure and r.role is not RuleRole.BOILERPLATE]
    others = [r for r, _ in rules if failure in r.also and r not in mine]
    because = [r for r in reasons if r.failure is failure]
    hard = [r.weight for r in mine if r.role is RuleRole.CAUSE] + [r.weight for r in because if r.weight >= HARD]
    softs = [r.weight for r in mine if r.role in (RuleRole.SYMPTOM, RuleRole.CASCADE)] + [r.also[failure] for r in others]
    soft = max(softs + [r.weight for r in because if r.weight < HARD], default=0.0)
    soft += sum(r.weight for r in mine if r.role is RuleRole.HINT)
    agreement = AGREEMENT * min(1.0, soft + 0.5 * (len(hard) - 1))
    score = round(min(0.99, max(hard) + agreement) if hard else min(SOFT_CEILING, soft), 3)
    order = list(RuleRole)
    mine.sort(key=lambda r: (order.index(r.role), -r.weight, r.id))
    return Weighed(
        failure=failure, score=score, rules=tuple(mine), named=bool(hard),
        reasons=tuple(sorted(because, key=lambda r: -r.weight)),
    )  # fmt: skip


def certainty_of(cases: Sequence[Weighed]) -> Certainty:
    """How far the best case carries: as far as its strongest signature can, and less if another class is as well named."""
    top = cases[0]
    if not top.named:
        return Certainty.OPEN
    strengths = [r.certainty.strength for r in top.rules if r.role is RuleRole.CAUSE]
    strength = max(strengths + [r.strength for r in top.reasons if r.weight >= HARD], default=0)
    rival = cases[1] if len(cases) > 1 else None
    if rival is not None and rival.named and rival.score > top.score - CLOSE:
        strength = min(strength, 0 if rival.score > top.score - TIED else 1)
    return next(c for c in Certainty if c.strength == strength)


def _first_seen(sightings: Sequence[Sighting]) -> dict[FailureClass, int]:
    """For equal scores: how many other classes were seen before this one in its own record, at best.

    Never by positions in two records: ranks share no clock, and a line that means nothing must not move anything.
    """
    seen: dict[int, dict[FailureClass, int]] = {}
    for s in sorted(sightings, key=lambda s: (s.record, s.order)):
        if s.rule.role is not RuleRole.BOILERPLATE:
            own = seen.setdefault(s.record, {})
            own.setdefault(s.failure, len(own))
    first: dict[FailureClass, int] = {}
    for own in seen.values():
        for failure, place in own.items():
            first[failure] = min(first.get(failure, place), place)
    return first
