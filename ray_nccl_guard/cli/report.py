"""`ray-nccl-guard report`: renders a saved report again, as text, as JSON or as a page."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

# As `probe`: what the report says was decided.
EXITS = {"proceed": 0, "retry": 10, "fall_back": 10, "refuse": 20}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "exit codes: 0 training went on as asked; 10 it fell back or was tried again; 20 refused; 2 wrong usage."
    parser.add_argument("file", metavar="FILE", help="the report.json of a run: <storage>/<run>/nccl_guard/report.json")
    parser.add_argument("--html", metavar="PAGE", help="write one self-contained page there (needs jinja2)")
    parser.add_argument("--json", action="store_true", help="print one JSON object, in this version's schema")


def run(args: argparse.Namespace) -> int:
    """Exit 0 if training went on as asked, 10 if it fell back or was tried again, 20 if refused, 2 on wrong usage."""
    from ray_nccl_guard import render, saved

    report = saved.load(args.file)
    if args.html:
        _write_page(args.html, report)
    if args.json:
        print(json.dumps(report.to_json()))
    else:
        sys.stdout.write(render.render(report) + "\n")
        if report.flight:
            sys.stdout.write(f"\nwhen training ended: {report.flight.get('summary', '')}\n")
    return EXITS[report.decision.action.value]


def _write_page(path: str, report: object) -> None:
    from ray_nccl_guard import html
    from ray_nccl_guard.errors import UsageError
    from ray_nccl_guard.report import Report

    assert isinstance(report, Report)
    try:
        page = html.page(report)
    except html.NoTemplates as error:
        raise UsageError(str(error), help=error.help) from None
    try:
        Path(path).write_text(page, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from None
