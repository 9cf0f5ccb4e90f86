"""`classify FILE...`: name the failure in logs you already have. No GPU, no torch, no ray."""

from __future__ import annotations

import argparse
import json
import os
import re
import textwrap
from collections.abc import Iterator, Sequence

from ray_nccl_guard.classes import CLASSES, FailureClass, Scope
from ray_nccl_guard.diagnosis.gather import scanner_for
from ray_nccl_guard.logs.evidence import read_logs
from ray_nccl_guard.rulebook import load_rules, packs_from_env
from ray_nccl_guard.verdict import Certainty, Quote, Role, Verdict, classify

WIDTH = 100
EXIT_NAMED, EXIT_UNKNOWN = 0, 1
# What fits on a screen; --json has all of it.
MAX_SHOWN, MAX_SHOWN_RANKS, MAX_SHOWN_HOSTS = 4, 16, 4
_NUMBERS = re.compile(r"0x[0-9a-f]+|\d+")
_SCOPES = {
    Scope.PROGRAM: "program: the code or what it asks for, not the infrastructure",
    Scope.UNKNOWN: "not known: infrastructure or program, this class does not tell",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "exit codes: 0 the failure has a name; 1 it has none; 2 wrong usage."
    parser.add_argument("files", nargs="+", metavar="FILE", help="log of one rank or of many, plain or gzip; - reads stdin")
    parser.add_argument("--rank-from-name", action="store_true", help="the last number in a file's name is the rank")
    parser.add_argument(
        "--rules", action="append", default=[], metavar="DIR", help="a rule pack to use as well (repeatable)"
    )
    parser.add_argument("--json", action="store_true", help="print one object on stdout")


def run(args: argparse.Namespace) -> int:
    """Exit 0 if the failure has a name, 1 if it has none."""
    packs = [*args.rules, *packs_from_env(os.environ)]
    rules = load_rules(*packs) if packs else None
    evidence = read_logs(args.files, scanner_for(rules), trust_names=args.rank_from_name)
    verdict = classify(evidence, rules)
    if args.json:
        print(json.dumps(verdict.to_json()))
    else:
        print("\n".join(lines_of(verdict, evidence.world_size)))
    return EXIT_UNKNOWN if verdict.failure is FailureClass.UNKNOWN else EXIT_NAMED


def lines_of(verdict: Verdict, world_size: int) -> Iterator[str]:
    """The verdict as text, ASCII, `WIDTH` columns where the quoted lines allow it."""
    facts = CLASSES[verdict.failure]
    yield from _wrap(f"{verdict.failure.value}: {verdict.summary}", "")
    yield ""
    yield from _row("look at", _suspects(verdict, world_size))
    yield from _evidence(verdict)
    certainty = verdict.certainty.value
    others = [c.failure.value for c in verdict.candidates if c.failure is not verdict.failure]
    if verdict.certainty is Certainty.OPEN and others:
        certainty += f": it could also be {' or '.join(others)}"
    yield from _row("certainty", certainty)
    for text in verdict.against:
        yield from _row("against", text)
    yield from _row("caution", verdict.caution)
    if verdict.failure is not FailureClass.UNKNOWN:
        yield from _row("scope", _scope(verdict))
    for text in verdict.signals:
        yield from _row("signal", text.replace(os.getcwd() + os.sep, ""))
    if verdict.failure is not FailureClass.UNKNOWN:
        yield from _row("gloo", _gloo(verdict))
    yield ""
    if verdict.relief:
        yield from _help("sidestep it", " ".join(f"{name}={value}" for name, value in verdict.relief.items()))
    if verdict.failure is not FailureClass.UNKNOWN:
        yield from _help("remedy", facts.remedy)
    yield from _help("try next", verdict.next)
    if verdict.failure is not FailureClass.UNKNOWN:
        yield f"more: ray-nccl-guard explain {verdict.rule or verdict.failure.value}"


def _suspects(verdict: Verdict, world_size: int) -> str:
    """The ranks to look at first and where they run, or only where; empty if nothing singles anybody out."""
    hosts = ", ".join(verdict.culprit_hosts[:MAX_SHOWN_HOSTS]) + (
        ", ..." if len(verdict.culprit_hosts) > MAX_SHOWN_HOSTS else ""
    )
    on = f"host{'s' if len(verdict.culprit_hosts) > 1 else ''} {hosts}" if hosts else ""
    if not verdict.culprit_ranks:
        return on
    of = f" of {world_size}" if world_size > 1 else ""
    some = f"rank{'s' if len(verdict.culprit_ranks) > 1 else ''} {_ranks(verdict.culprit_ranks)}{of}"
    return (f"{some}, on {on}" if on else some) + (f": {verdict.silence}" if verdict.silence else "")


def _scope(verdict: Verdict) -> str:
    """Infrastructure or program; both, if the class is open between them."""
    scope = CLASSES[verdict.failure].scope
    if verdict.certainty is not Certainty.OPEN:
        return _SCOPES.get(scope, f"{scope.value}: the infrastructure, not the program")
    program = scope is Scope.PROGRAM
    other = [c.failure for c in verdict.candidates if (CLASSES[c.failure].scope is Scope.PROGRAM) is not program]
    return scope.value + "".join(f"; {CLASSES[f].scope.value} if it is {f.value}" for f in other)


def _gloo(verdict: Verdict) -> str:
    """Whether gloo would help here, and why; where the class itself is a guess, so is this."""
    facts = CLASSES[verdict.failure]
    if verdict.gloo_can_help is None and facts.gloo_can_help is not None:
        doubt = (
            "(the class is open); if it is this one"
            if verdict.certainty is Certainty.OPEN
            else "from a log; if the fault is NCCL's"
        )
        return f"not known {doubt}: {facts.gloo_why}"
    helps = {True: "yes", False: "no", None: "depends"}[verdict.gloo_can_help]
    return f"{helps}: {facts.gloo_why}"


def _evidence(verdict: Verdict) -> Iterator[str]:
    """The lines it rests on, then the others; one of those that differ only in numbers stands for all of them."""
    causes = [quote for quote in verdict.evidence if quote.role is Role.CAUSE]
    rest = [quote for quote in verdict.evidence if quote.role is not Role.CAUSE]
    for label, quotes in (("evidence", causes or rest), ("echoes", rest if causes else [])):
        alike: dict[str, list[Quote]] = {}
        for quote in quotes:
            alike.setdefault(_NUMBERS.sub("0", quote.text), []).append(quote)
        for index, (first, *others) in enumerate(list(alike.values())[:MAX_SHOWN]):
            also = sorted({q.rank for q in others if q.rank is not None and q.rank != first.rank})
            same = f", the like on rank{'s' * (len(also) > 1)} {_ranks(also)}" if also else ""
            yield from _row(label if index == 0 else "", _place(first) + same)
            yield from _wrap(first.text.strip(), " " * 15)


def _place(quote: Quote) -> str:
    near = os.path.relpath(quote.source) if os.path.isabs(quote.source) else quote.source
    where = f"{min(near, quote.source, key=len)}:{quote.line}"
    return where if quote.rank is None else f"{where} (rank {quote.rank})"


def _ranks(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:MAX_SHOWN_RANKS])) + (", ..." if len(ranks) > MAX_SHOWN_RANKS else "")


def _row(label: str, text: str) -> list[str]:
    """Nothing for an empty text: a line with nothing to say is left out."""
    return textwrap.wrap(
        text, WIDTH, initial_indent=f"  {label:<11}", subsequent_indent=" " * 13, break_on_hyphens=False
    )  # fmt: skip


def _help(label: str, text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=f"help: {label:<15}", subsequent_indent=" " * 21)


def _wrap(text: str, indent: str) -> list[str]:
    shown = text.encode("ascii", "replace").decode()
    return textwrap.wrap(shown, WIDTH, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False) or [""]
