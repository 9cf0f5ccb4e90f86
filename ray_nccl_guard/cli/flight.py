"""`ray-nccl-guard flight`: from dumps, or from a live run, names the rank that holds up the others."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

EXIT_CONSISTENT, EXIT_FOUND, EXIT_UNREADABLE = 0, 10, 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "exit codes: 0 no rank is out of step; 10 something is found; 20 no dump could be read; 2 wrong usage."
    parser.add_argument("paths", nargs="*", metavar="PATH", help="dump files, or folders to search for them")
    parser.add_argument("--run", dest="run_name", metavar="NAME", help="ask the ranks of a guarded run that trains now")
    parser.add_argument("--address", metavar="A", help="--run: its cluster: auto (default), or HOST:PORT of the head")
    parser.add_argument("--out", metavar="DIR", help="--run: keep the dumps and stacks there")
    parser.add_argument(
        "--world-size", type=int, metavar="N", help="how many ranks the job had; default: as far as the dumps tell"
    )
    parser.add_argument("--all-groups", action="store_true", help="show the groups in which nothing is odd as well")
    parser.add_argument("--sheet", action="store_true", help="print a record of the hang to file with the run")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Exit 0 if no rank is out of step, 10 if something is found, 20 if no dump could be had, 2 on wrong usage."""
    from ray_nccl_guard import flight
    from ray_nccl_guard.errors import UsageError
    from ray_nccl_guard.flight import render
    from ray_nccl_guard.flight.sheet import sheet

    if args.run_name is not None:
        return _ask(args)
    if not args.paths or args.address or args.out:
        raise UsageError(
            "give the dumps to read, or --run NAME (with --address and --out)",
            help=("ray-nccl-guard flight PATH...", "ray-nccl-guard flight --run NAME"),
        )
    if args.world_size is not None and args.world_size < 1:
        raise UsageError(f"--world-size must be at least 1, not {args.world_size}")
    dumps = flight.load(args.paths, world_size=args.world_size)
    verdict = flight.diagnose(dumps)
    if args.json:
        print(json.dumps(verdict.to_json()))
    elif not dumps.by_rank:
        print("error[unreadable]: no Flight Recorder dump could be read", file=sys.stderr)
        for skipped in dumps.skipped[:20]:
            print(f"  {render.clean(skipped.source)}: {render.clean(skipped.reason)}", file=sys.stderr)
    else:
        _show(sheet(verdict) if args.sheet else render.text(verdict, all_groups=args.all_groups))
    if not dumps.by_rank:
        return EXIT_UNREADABLE
    return EXIT_CONSISTENT if verdict.kind is flight.Kind.NONE else EXIT_FOUND


def _ask(args: argparse.Namespace) -> int:
    """Ask a live run. It is not stopped: its ranks dump from memory beside what they do."""
    from ray_nccl_guard import flight
    from ray_nccl_guard.errors import UsageError
    from ray_nccl_guard.flight import render
    from ray_nccl_guard.flight.sheet import sheet

    if args.paths or args.world_size is not None:
        raise UsageError("--run asks the ranks themselves: it takes neither dumps nor --world-size")
    try:
        from ray_nccl_guard.ray_train import flight_ask
    except ImportError as error:
        raise UsageError(f"--run needs Ray, which cannot be imported here: {error}") from error
    asked = flight_ask.ask_run(args.run_name, args.address or "auto", lambda words: print(words, file=sys.stderr))
    verdict, collected = asked.verdict, asked.collected
    if args.out:
        flight_ask.save(collected, Path(args.out))
    if args.json:
        print(json.dumps(collected.to_json() | verdict.to_json() | {"moved": {str(r): n for r, n in asked.moved.items()}}))
    elif args.sheet:
        _show(sheet(verdict, asked.about))
    else:
        _show(render.text(verdict, all_groups=args.all_groups) + collected.places())
    if not collected.recorder:
        return EXIT_UNREADABLE
    return EXIT_CONSISTENT if verdict.kind is flight.Kind.NONE else EXIT_FOUND


def _show(text: str) -> None:
    """Plain text, or with the odd cells in colour where a person reads it and `rich` is there."""
    if sys.stdout.isatty():
        try:
            from rich.console import Console
        except ImportError:
            pass
        else:
            console = Console(highlight=False, soft_wrap=True)
            for line in text.splitlines():
                style = "bold red" if line.endswith("<--") or line.startswith("error[") else None
                console.print(line, style=style, markup=False)
            return
    sys.stdout.write(text)
