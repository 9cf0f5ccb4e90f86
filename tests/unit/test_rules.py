"""Every rule holds what a rule must: it claims its own log, nobody else's undeclared, and not its near misses."""

from __future__ import annotations

import re
import time

import pytest

from ray_nccl_guard.classes import FailureClass
from ray_nccl_guard.cli.rules import faults_of
from ray_nccl_guard.diagnosis.patterns import Pattern, PatternError
from ray_nccl_guard.diagnosis.scan import Scanner
from ray_nccl_guard.rulebook import SHIPPED_DIR, Rule, RuleRole, read_rule, shipped_rules

RULES = shipped_rules()


def test_no_shipped_rule_has_a_fault():
    assert list(faults_of(RULES)) == []


def test_every_log_belongs_to_a_rule():
    assert {path.stem for path in SHIPPED_DIR.glob("*.log")} == {rule.id for rule in RULES}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.id)
def test_a_pattern_names_no_source_line_and_no_time_of_day(rule: Rule):
    for pattern in rule.patterns:
        assert not re.search(r"\.(cc|cpp|hpp|h|py):\d", pattern.text), f"{pattern.text}: line numbers drift between versions"
        assert not re.search(r"\d\d:\d\d", pattern.text)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.id)
def test_a_relief_is_a_setting_of_nccl_or_torch(rule: Rule):
    for name in rule.relief:
        assert name.startswith(("NCCL_", "TORCH_"))
    assert not (rule.relief and rule.role is RuleRole.BOILERPLATE)


def test_every_class_that_prints_anything_has_a_signature():
    silent = {FailureClass.OK, FailureClass.UNKNOWN}
    assert set(FailureClass) - {rule.failure for rule in RULES} <= silent


@pytest.mark.parametrize("text", [r"(a+)+b more", r"(x*){2,}yes", r"(?:foo(?:bar)*)* baz"])
def test_a_repetition_inside_a_repetition_is_refused(text: str):
    with pytest.raises(PatternError, match="exponential"):
        Pattern(text)


@pytest.mark.parametrize("text", [r"\d+ \w+", r"a|b", r".*"])
def test_a_pattern_without_fixed_text_is_refused(text: str):
    with pytest.raises(PatternError, match="no fixed text"):
        Pattern(text)


@pytest.mark.parametrize(
    "text", ["a" * 8192, "NCCL WARN " * 800, "(" * 8000, "0x" * 4000, "error: " * 1100, "rank 1 " * 1100]
)
def test_no_pattern_is_slow_on_a_hostile_line(text: str):
    started_s = time.process_time()
    for rule in RULES:
        for pattern in rule.patterns:
            pattern.search(text)
    # A pattern that backtracks without bound takes minutes on 8 KiB; all of them together take well under a second.
    assert time.process_time() - started_s < 20


def test_a_scan_finds_what_every_pattern_alone_finds():
    logs = [line for rule in RULES for line in rule.log.splitlines()[1:]]
    scanner = Scanner(RULES)
    suspects = set(scanner.suspects(logs))
    for index, line in enumerate(logs):
        alone = {rule.id for rule in RULES if rule.matches(line)}
        assert {hit.rule.id for hit in scanner.hits(line)} == alone
        assert not alone or index in suspects
    assert set(scanner.suspects(logs)) == suspects, "what the scanner remembers must not change what it finds"


def test_a_malformed_rule_is_refused_with_its_name_and_reason(tmp_path):
    from ray_nccl_guard.errors import UsageError

    for text, reason in (
        ("not toml", "Expected"),
        ('failure = "no_such_class"\nrole = "cause"\nsummary = "s"\npatterns = ["text here"]', "no_such_class"),
        ('failure = "port_in_use"\nrole = "cause"\nsummary = "s"\npatterns = []', "patterns is empty"),
        ('failure = "port_in_use"\nrole = "cause"\nsummary = "s"\npatterns = "text"', "list of strings"),
        ('failure = "port_in_use"\nrole = "cause"\npatterns = ["text here"]', "summary"),
        ('failure = "port_in_use"\nrole = "cause"\nsummary = "s"\npatterns = ["text here"]\naction = "refuse"', "action"),
    ):
        path = tmp_path / "mine.toml"
        path.write_text(text)
        with pytest.raises(UsageError, match=reason) as caught:
            read_rule(path)
        assert "mine.toml" in str(caught.value)


def test_rules_travel_by_pickle():
    import pickle

    from ray_nccl_guard.evidence import Evidence, Origin, RankEvidence
    from ray_nccl_guard.probe.spec import LogLine, Outcome
    from ray_nccl_guard.verdict import classify

    rules = pickle.loads(pickle.dumps(RULES))
    line = LogLine(source="x", number=1, text="NCCL WARN Bootstrap : no socket interface found")
    record = RankEvidence(rank=0, outcome=Outcome.FAILED, lines=(line,))
    evidence = Evidence(origin=Origin.PROBE, backend="nccl", world_size=1, ranks=(record,))
    assert classify(evidence, rules) == classify(evidence)
