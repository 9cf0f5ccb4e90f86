"""`classify FILE...`: name the failure in logs you already have. No GPU, no torch, no ray."""

from __future__ import annotations

import argparse
import json
import os
import textwrap
from collections.abc import Iterator, Sequence

from ray_nccl_guard.classes import CLASSES, FailureClass
from ray_nccl_guard.diagnosis.gather import scanner_for
from ray_nccl_guard.logs.evidence import read_logs
from ray_nccl_guard.rulebook import load_rules, packs_from_env
from ray_nccl_guard.verdict import Certainty, Quote, Role, Verdict, classify

WIDTH = 100
EXIT_NAMED, EXIT_UNKNOWN = 0, 1
# What fits on a screen; --json has all of it.
MAX_SHOWN, MAX_SHOWN_RANKS = 4, 16


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
    if verdict.culprit_ranks:
        of = f" of {world_size}" if world_size > 1 else ""
        yield from _row("look at", f"rank {_ranks(verdict.culprit_ranks)}{of}")
    for label, role in (("evidence", Role.CAUSE), ("echoes", Role.CASCADE)):
        quotes = [quote for quote in verdict.evidence if quote.role is role][:MAX_SHOWN]
        for index, quote in enumerate(quotes):
            yield from _row(label if index == 0 else "", _place(quote))
            yield from _wrap(quote.text.strip(), " " * 15)
    certainty = verdict.certainty.value
    others = [c.failure.value for c in verdict.candidates if c.failure is not verdict.failure]
    if verdict.certainty is Certainty.OPEN and others:
        certainty += f": it could also be {' or '.join(others)}"
    yield from _row("certainty", certainty)
    for text in verdict.against:
        yield from _row("against", text)
    if verdict.caution:
        yield from _row("caution", verdict.caution)
    if verdict.failure is not FailureClass.UNKNOWN:
        yield from _row("scope", facts.scope.value)
        helps = {True: "yes", False: "no", None: "not known"}[verdict.gloo_can_help]
        yield from _row("gloo", f"{helps}: {facts.gloo_why}")
    yield ""
    if verdict.relief:
        yield from _help("sidestep it", " ".join(f"{name}={value}" for name, value in verdict.relief.items()))
    if verdict.failure is not FailureClass.UNKNOWN:
        yield from _help("remedy", facts.remedy)
    yield from _help("try next", verdict.next)
    if verdict.failure is not FailureClass.UNKNOWN:
        yield f"more: ray-nccl-guard explain {verdict.rule or verdict.failure.value}"


def _place(quote: Quote) -> str:
    where = f"{quote.source}:{quote.line}"
    return where if quote.rank is None else f"{where} (rank {quote.rank})"


def _ranks(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:MAX_SHOWN_RANKS])) + (", ..." if len(ranks) > MAX_SHOWN_RANKS else "")


def _row(label: str, text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=f"  {label:<11}", subsequent_indent=" " * 13) or [f"  {label}"]


def _help(label: str, text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=f"help: {label:<15}", subsequent_indent=" " * 21)


def _wrap(text: str, indent: str) -> list[str]:
    shown = text.encode("ascii", "replace").decode()
    return textwrap.wrap(shown, WIDTH, initial_indent=indent, subsequent_indent=indent) or [""]
