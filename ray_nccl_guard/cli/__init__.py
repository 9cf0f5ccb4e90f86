"""The command line: finds the verb, imports only that verb's module, and turns a usage error into exit 2."""

from __future__ import annotations

import argparse
import difflib
import importlib
import sys
from collections.abc import Sequence

# verb -> what `--help` says of it. Each verb is the module of the same name beside this file, with
# `add_arguments(parser)` and `run(args) -> int`; only the module of the verb that is called gets imported, since an image
# build calls `compat` and must not pay for the rest.
VERBS = {
    "compat": "can this libnccl run on these GPUs?",
    "probe": "prove a backend on this host, over a Ray cluster, or on ranks that a launcher starts",
    "run": "run a Ray Train script, unchanged, with the guard on",
    "classify": "name the failure in logs you already have",
    "flight": "read Flight Recorder dumps: how far each rank got, and who holds up the others",
    "explain": "look up a failure class or a rule",
    "rules": "list the rules, or validate a rule pack",
    "report": "render a saved report again",
    "drill": "rehearse on a healthy host or cluster what happens when NCCL breaks",
}

_EPILOG = """where to begin:
  a log of a job that failed     ray-nccl-guard classify worker-*.log
  a node                         ray-nccl-guard compat, then ray-nccl-guard probe
  a Ray cluster                  ray-nccl-guard probe --address auto --num-workers 16
  a script of somebody else's    ray-nccl-guard run train.py --its-own-args
`ray-nccl-guard VERB --help` says the rest."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb and return its exit code (2 on wrong usage)."""
    from ray_nccl_guard.errors import UsageError

    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="ray-nccl-guard",
        description="Proves NCCL before training starts, and names what failed.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=_version())
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    wanted = next((word for word in arguments if not word.startswith("-")), None)
    if wanted is not None and wanted not in VERBS:
        nearest = difflib.get_close_matches(wanted, VERBS, n=1)
        parser.error(f"there is no verb {wanted!r}" + (f", did you mean {nearest[0]!r}?" if nearest else ""))
    for name, summary in VERBS.items():
        verb = verbs.add_parser(name, help=summary, description=summary)
        if name == wanted:
            module = importlib.import_module(f"{__name__}.{name}")
            module.add_arguments(verb)
            verb.set_defaults(run=module.run)
    args, unknown = parser.parse_known_args(arguments)
    if unknown:  # said with the usage of the verb; argparse would show the verbs again
        verbs.choices[args.verb].error(f"unrecognized arguments: {' '.join(unknown)}")
    try:
        return int(args.run(args))
    except UsageError as error:
        print(f"ray-nccl-guard {args.verb}: {error}", file=sys.stderr)
        for line in error.help:
            print(f"help: {line}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # `... | head` closed our stdout; the interpreter would complain again when it flushes at exit.
        sys.stderr.close()
        return 1


def _version() -> str:
    from ray_nccl_guard._version import __version__

    return f"ray-nccl-guard {__version__}"
