"""What no log may do to a verdict, whatever is in it."""

from __future__ import annotations

import random
import re
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from ray_nccl_guard.evidence import Evidence, Origin, RankEvidence
from ray_nccl_guard.probe.spec import LogLine, Outcome, Step
from ray_nccl_guard.rulebook import RuleRole, shipped_rules
from ray_nccl_guard.verdict import Certainty, classify

LOGS = {rule.id: rule.log.splitlines()[1:] for rule in shipped_rules()}
LINES = [line for log in LOGS.values() for line in log]
BOILERPLATE = [line for rule in shipped_rules() if rule.role is RuleRole.BOILERPLATE for line in LOGS[rule.id]]
# A boilerplate line may be what another rule asks for (`requires`, `unless`): those are no mere noise.
NEEDED = {other for rule in shipped_rules() for other in (*rule.requires, *rule.unless)}
NOISE = [
    line
    for rule in shipped_rules()
    if rule.role is RuleRole.BOILERPLATE and rule.id not in NEEDED and not set(rule.shares)
    for line in LOGS[rule.id]
]

texts = st.lists(st.one_of(st.sampled_from(LINES), st.text(max_size=200)), max_size=6)
worlds = st.lists(texts, min_size=1, max_size=5)


def log(ranks: list[list[str]], origin: Origin = Origin.LOG) -> Evidence:
    return Evidence(
        origin=origin, backend="nccl", world_size=len(ranks),
        ranks=tuple(
            RankEvidence(rank=rank, outcome=Outcome.NOT_RUN, lines=tuple(
                LogLine(source="x", number=i + 1, text=text) for i, text in enumerate(lines)
            )) for rank, lines in enumerate(ranks)
        ),
    )  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(worlds, st.sampled_from(list(Origin)))
def test_classification_never_raises_and_always_gives_a_whole_verdict(ranks: list[list[str]], origin: Origin):
    verdict = classify(log(ranks, origin))
    assert verdict.summary
    assert verdict.next
    assert len(verdict.candidates) <= 3
    scores = [c.score for c in verdict.candidates]
    assert scores == sorted(scores, reverse=True)
    assert all(0 <= score <= 1 for score in scores)
    verdict.to_json()


@settings(max_examples=100, deadline=None)
@given(worlds, st.randoms(use_true_random=False))
def test_the_order_of_the_records_does_not_matter(ranks: list[list[str]], order: random.Random):
    evidence = log(ranks)
    shuffled = list(evidence.ranks)
    order.shuffle(shuffled)
    first, second = classify(evidence), classify(replace(evidence, ranks=tuple(shuffled)))
    assert (first.failure, first.certainty, first.candidates) == (second.failure, second.certainty, second.candidates)


@settings(max_examples=100, deadline=None)
@given(worlds, st.sampled_from(NOISE), st.integers(0, 4))
def test_a_line_of_boilerplate_changes_no_class(ranks: list[list[str]], line: str, where: int):
    noisy = [list(lines) for lines in ranks]
    noisy[where % len(noisy)].insert(0, line)
    assert classify(log(noisy)).failure is classify(log(ranks)).failure


@settings(max_examples=100, deadline=None)
@given(worlds, st.integers(0, 4))
def test_the_same_record_twice_changes_no_class(ranks: list[list[str]], which: int):
    evidence = log(ranks)
    copy = replace(evidence.ranks[which % len(ranks)], rank=None)
    assert classify(replace(evidence, ranks=(*evidence.ranks, copy))).failure is classify(evidence).failure


outcomes = st.builds(
    RankEvidence,
    rank=st.just(0),
    outcome=st.sampled_from(list(Outcome)),
    step=st.one_of(st.none(), st.sampled_from(list(Step))),
    text=st.one_of(st.just(""), st.sampled_from(LINES), st.text(max_size=80)),
    signal=st.one_of(st.none(), st.integers(1, 64)),
    exit_code=st.one_of(st.none(), st.integers(-64, 255)),
    silent_s=st.floats(0, 1e6),
    process_state=st.sampled_from(["", "S", "T", "D", "Z", "R"]),
    kernel_lines=st.lists(st.sampled_from(LINES), max_size=2).map(tuple),
    stuck=st.booleans(),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(outcomes, min_size=1, max_size=6), st.sampled_from([Origin.PROBE, Origin.TRAINING_GROUP]))
def test_any_mix_of_outcomes_gives_a_verdict_that_accuses_only_ranks_of_this_world(
    records: list[RankEvidence], origin: Origin
):
    ranks = tuple(replace(record, rank=index) for index, record in enumerate(records))
    verdict = classify(Evidence(origin=origin, backend="nccl", world_size=len(ranks), ranks=ranks))
    assert verdict.summary
    if all(record.outcome is Outcome.TIMED_OUT and not record.text and not record.kernel_lines for record in records):
        assert verdict.certainty is not Certainty.ESTABLISHED
    spoken = {int(n) for line in LINES for n in re.findall(r"\d{1,6}", line)}
    assert set(verdict.culprit_ranks) <= set(range(len(ranks))) | spoken
