"""`rules`: list the signatures, or hold a rule pack of your own to the same tests as the shipped ones."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from ray_nccl_guard.diagnosis.scan import Scanner
from ray_nccl_guard.errors import UsageError
from ray_nccl_guard.rulebook import Rule, load_rules, packs_from_env, shipped_rules

EXIT_BROKEN = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "exit codes: 0; 1 the pack under --check fails a test; 2 wrong usage."
    parser.add_argument("--check", metavar="DIR", help="test the rule pack in DIR together with the shipped rules")
    parser.add_argument("--json", action="store_true", help="print one object on stdout")


def run(args: argparse.Namespace) -> int:
    """Exit 0, or 1 if the pack under `--check` fails a test."""
    if args.check:
        return _check(Path(args.check), as_json=args.json)
    rules = load_rules(*packs_from_env(os.environ))
    if args.json:
        print(json.dumps({"rules": [
            {"rule": r.id, "failure": r.failure.value, "role": r.role.value, "summary": r.summary} for r in rules
        ]}))  # fmt: skip
        return 0
    width = max(len(rule.id) for rule in rules)
    for rule in sorted(rules, key=lambda rule: (rule.failure.value, rule.id)):
        print(f"{rule.id:<{width}}  {rule.role.value:<11}  {rule.failure.value:<25}  {rule.summary}")
    return 0


def _check(folder: Path, *, as_json: bool) -> int:
    rules = load_rules(folder)
    mine = {rule.id for rule in rules} - {rule.id for rule in shipped_rules()}
    if not mine:
        raise UsageError(f"There is no rule in {folder}.", help=("a rule is two files there: NAME.toml and NAME.log",))
    faults = [fault for fault in faults_of(rules) if fault[0] in mine]
    if as_json:
        print(json.dumps({"rules": sorted(mine), "faults": [{"rule": rule, "fault": text} for rule, text in faults]}))
    else:
        for rule, text in faults:
            print(f"{rule}: {text}")
        print(f"{len(mine)} rules, {len(faults)} faults")
    return EXIT_BROKEN if faults else 0


def faults_of(rules: Sequence[Rule]) -> Iterator[tuple[str, str]]:
    """(rule, what is wrong with it): the tests that every rule, shipped or not, has to pass."""
    scanner = Scanner(rules)
    known = {rule.id for rule in rules}
    for rule in rules:
        log = rule.log.splitlines()[1:]  # the first line says where it comes from
        if not log:
            yield rule.id, f"has no log: put a captured one beside it as {rule.id}.log"
        claimed = {hit.rule.id for line in log for hit in scanner.hits(line)}
        if log and rule.id not in claimed:
            yield rule.id, "does not match its own log"
        strangers = sorted(claimed - {rule.id} - set(rule.shares))
        if strangers:
            yield rule.id, f"its log is claimed by {', '.join(strangers)} too; declare it in `shares` or narrow a pattern"
        for line in rule.near_misses:
            if any(hit.rule is rule for hit in scanner.hits(line)):
                yield rule.id, f"matches its near miss {line!r}"
        for other in (*rule.requires, *rule.unless, *rule.shares):
            if other not in known:
                yield rule.id, f"names the rule {other}, which does not exist"
