"""`explain CLASS|RULE`: what a failure class or a signature means, from the files that decide; `--all --markdown` is the docs page."""

from __future__ import annotations

import argparse
import os
import textwrap
from collections.abc import Iterator, Sequence

from ray_nccl_guard.classes import CLASSES, FailureClass
from ray_nccl_guard.diagnosis import experiments
from ray_nccl_guard.errors import UsageError
from ray_nccl_guard.policy import Policy
from ray_nccl_guard.rulebook import Rule, RuleRole, load_rules, packs_from_env

WIDTH = 100
_GLOO = {True: "yes", False: "no", None: "depends"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "exit codes: 0; 2 there is no such class or rule, or wrong usage."
    parser.add_argument("name", nargs="?", metavar="CLASS-or-RULE", help="e.g. shm_too_small or nccl-gpu-oom")
    parser.add_argument("--all", action="store_true", help="every class and rule")
    parser.add_argument("--markdown", action="store_true", help="as the page docs/classes.md")
    parser.add_argument("--json", action="store_true", help="print one object on stdout")


def run(args: argparse.Namespace) -> int:
    rules = load_rules(*packs_from_env(os.environ))
    if args.all:
        if args.name or args.json:
            raise UsageError("--all takes no name and has no --json.")
        print("\n".join(markdown(rules) if args.markdown else _every(rules)))
        return 0
    if not args.name:
        raise UsageError("explain takes the name of a class or of a rule, or --all.", help=("ray-nccl-guard rules",))
    if args.json:
        import json

        print(json.dumps(as_json(args.name, rules)))
    else:
        print("\n".join(explain(args.name, rules)))
    return 0


def explain(name: str, rules: Sequence[Rule]) -> list[str]:
    """The text about a class or a rule. Raises `UsageError` for a name that is neither, with the nearest ones."""
    found = _find(name, rules)
    return list(_rule_text(found)) if isinstance(found, Rule) else list(_class_text(found, rules))


def as_json(name: str, rules: Sequence[Rule]) -> dict[str, object]:
    found = _find(name, rules)
    if isinstance(found, Rule):
        return {
            "rule": found.id, "failure": found.failure.value, "role": found.role.value, "summary": found.summary,
            "patterns": [p.text for p in found.patterns], "caution": found.caution, "relief": dict(found.relief),
            "help": list(found.help), "references": list(found.references), "log": found.log, "speaks_for": found.speaks_for,
        }  # fmt: skip
    facts = CLASSES[found]
    return {
        "failure": found.value, "summary": facts.summary, "scope": facts.scope.value, "gloo_can_help": facts.gloo_can_help,
        "gloo_why": facts.gloo_why, "remedy": facts.remedy, "next": experiments.decides(found),
        "default_action": Policy().action_for(found).value, "rules": [r.id for r in rules if r.failure is found],
    }  # fmt: skip


def _find(name: str, rules: Sequence[Rule]) -> Rule | FailureClass:
    for rule in rules:
        if rule.id == name:
            return rule
    for failure in FailureClass:
        if failure.value == name.replace("-", "_"):
            return failure
    import difflib

    names = [failure.value for failure in FailureClass] + [rule.id for rule in rules]
    near = difflib.get_close_matches(name, names, n=3)
    raise UsageError(
        f"There is no class and no rule named {name!r}.",
        help=tuple(f"ray-nccl-guard explain {other}" for other in near) or ("ray-nccl-guard rules",),
    )


def _every(rules: Sequence[Rule]) -> Iterator[str]:
    for failure in FailureClass:
        yield from _class_text(failure, rules)
        yield ""
    for rule in rules:
        yield from _rule_text(rule)
        yield ""


def _class_text(failure: FailureClass, rules: Sequence[Rule]) -> Iterator[str]:
    facts = CLASSES[failure]
    yield f"{failure.value}: {facts.summary}"
    yield from _row("scope", facts.scope.value)
    yield from _row("gloo helps", f"{_GLOO[facts.gloo_can_help]}: {facts.gloo_why}")
    yield from _row("remedy", facts.remedy)
    if failure is not FailureClass.OK:
        yield from _row("to be sure", experiments.decides(failure))
        yield from _row("the guard", f"{Policy().action_for(failure).value} by default (docs/policy.md)")
    settings = dict.fromkeys(f"{k}={v}" for r in rules if r.failure is failure for k, v in r.relief.items())
    yield from _row("sidestep", ", or ".join(settings))
    for rule in rules:
        if rule.failure is failure and rule.role is not RuleRole.BOILERPLATE:
            yield from _row("signature", f"{rule.id} ({rule.role.value}): {rule.summary}")


def _rule_text(rule: Rule) -> Iterator[str]:
    yield f"{rule.id}: {rule.summary}"
    if rule.speaks_for:
        yield from _row("class", f"none: it speaks for the {rule.speaks_for}, as one thing that people write beside a log")
    elif rule.role is RuleRole.BOILERPLATE:
        yield from _row("class", "none: the line is known to carry no diagnosis")
    else:
        yield from _row("class", f"{rule.failure.value} ({rule.role.value}, {rule.certainty.value} at most)")
    for label, texts in (("caution", [rule.caution] if rule.caution else []), ("help", rule.help), ("see", rule.references)):
        for text in texts:
            yield from _row(label, text)
    if rule.relief:
        yield from _row("relief", " ".join(f"{name}={value}" for name, value in rule.relief.items()))
    if rule.log:
        yield "  for example"
        for line in rule.log.splitlines():
            yield f"    {line}"


def _row(label: str, text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=f"  {label:<12}", subsequent_indent=" " * 14)


def markdown(rules: Sequence[Rule]) -> Iterator[str]:
    """The page docs/classes.md: every class with its signatures, then the lines that carry no diagnosis."""
    yield "# Failure classes and their signatures"
    yield ""
    yield "Written by `ray-nccl-guard explain --all --markdown` from `ray_nccl_guard/classes.py` and `ray_nccl_guard/rules/`."
    for failure, facts in CLASSES.items():
        yield from ["", f"## {failure.value}", "", f"{facts.summary[0].upper()}{facts.summary[1:]}.", ""]
        yield f"Scope: {facts.scope.value}. Gloo helps: {_GLOO[facts.gloo_can_help]} ({facts.gloo_why}). First remedy: {facts.remedy}."
        if failure is not FailureClass.OK:
            yield f"To be sure: `{experiments.decides(failure)}`. By default the guard does: `{Policy().action_for(failure).value}`."
        mine = [rule for rule in rules if rule.failure is failure and rule.role is not RuleRole.BOILERPLATE]
        if mine:
            yield from ["", "| signature | role | what it says | sidestep |", "| --- | --- | --- | --- |"]
        for rule in mine:
            relief = " ".join(f"`{name}={value}`" for name, value in rule.relief.items())
            yield f"| {rule.id} | {rule.role.value} | {rule.summary}{'; ' + rule.caution if rule.caution else ''} | {relief} |"
    yield from ["", "## Lines that carry no diagnosis", ""]
    idle = [rule for rule in rules if rule.role is RuleRole.BOILERPLATE]
    yield from (f"- {rule.id}: {rule.summary}" for rule in idle if not rule.speaks_for)
    yield from ["", "## Remarks beside a log", ""]
    yield "They name no class. They say on which side to look first, and stand under `signals`."
    yield ""
    yield from (f"- {rule.id}: {rule.summary}; that speaks for the {rule.speaks_for}" for rule in idle if rule.speaks_for)
