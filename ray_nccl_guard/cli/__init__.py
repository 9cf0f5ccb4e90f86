"""The command line: finds the verb, imports only that verb's module, and turns a usage error into exit 2."""

from __future__ import annotations

import argparse
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
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb and return its exit code (2 on wrong usage)."""
    from ray_nccl_guard.errors import UsageError

    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(prog="ray-nccl-guard", description="Proves NCCL before training starts.")
    parser.add_argument("--version", action="version", version=_version())
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    wanted = next((word for word in arguments if not word.startswith("-")), None)
    for name, summary in VERBS.items():
        verb = verbs.add_parser(name, help=summary, description=summary)
        if name == wanted:
            module = importlib.import_module(f"{__name__}.{name}")
            module.add_arguments(verb)
            verb.set_defaults(run=module.run)
    args = parser.parse_args(arguments)
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
