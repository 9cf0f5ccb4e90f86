"""`ray-nccl-guard drill`: the `probe` verb with faults that its processes act out, so that nothing of NCCL is touched."""

from __future__ import annotations

import argparse

from ray_nccl_guard.cli import probe
from ray_nccl_guard.errors import UsageError
from ray_nccl_guard.probe.drill import parse

_EPILOG = """A fault is point:action[@condition]..., several are separated by commas; docs/drills.md has the language.
  init:hang@rank1                                 rank 1 hangs in ncclCommInitRank
  allreduce:cuda700@world>=4@bytes>=512K          an illegal memory access, from 4 ranks and 512 KiB on
  init:preset=p2p@without=NCCL_P2P_DISABLE=1      what a setting cures
exit codes: 0 rehearsed, whatever was decided; 20 a real failure came before; 2 wrong usage, also faults that strike
nobody. The JSON's "exit" is what `probe` would have ended with."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's options: those of `probe`, and the faults."""
    probe.add_arguments(parser)
    parser.epilog = _EPILOG
    parser.add_argument("--fault", action="append", required=True, metavar="F", help="what is to break; may be repeated")


def run(args: argparse.Namespace) -> int:
    """Rehearse; 0 if a fault was acted out."""
    try:
        faults = parse(args.fault)
    except ValueError as error:
        raise UsageError(str(error), help=("ray-nccl-guard drill --help has examples",)) from None
    if args.sweep:
        raise UsageError("--sweep measures, and a drill has nothing to measure: use `ray-nccl-guard probe --sweep`")
    return probe.run(args, faults)
