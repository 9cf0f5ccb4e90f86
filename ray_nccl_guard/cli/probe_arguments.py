"""What the `probe` verb can be asked, and what a command line asked of it."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass, replace

from ray_nccl_guard import policy_file
from ray_nccl_guard.errors import UsageError
from ray_nccl_guard.policy import Policy
from ray_nccl_guard.probe.drill import Fault
from ray_nccl_guard.probe.operations import expand
from ray_nccl_guard.probe.spec import ProbeSpec

_EPILOG = """exit codes: 0 proceed, 10 fall back (only gloo, or a setting, works), 20 refuse, 2 wrong usage, 130 interrupted.
Without --from-env and --address, ranks are processes on this host: one per visible GPU. With --backend given several
times each is probed once and compared: 0 if the first passes, 10 if another does."""

BACKENDS = ("nccl", "nccl2", "nccl-legacy", "gloo", "cpu:gloo,cuda:nccl")
# Pods of one job may start minutes apart (images are pulled); what is longer is missing.
WAIT_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The command line, resolved."""

    backends: tuple[str, ...]
    policy: Policy
    spec: ProbeSpec
    collectives: tuple[str, ...]
    locate: bool
    sweep: bool
    drill: tuple[Fault, ...] = ()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's options."""
    parser.epilog = _EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--ranks", type=_ranks, metavar="N", help="processes on this host (default: one per GPU)")
    add("--backend", action="append", choices=BACKENDS, metavar="B", help=f"one of {', '.join(BACKENDS)}; default nccl")
    add(
        "--from-env",
        action="store_true",
        help="this is one rank of torchrun, PyTorchJob, mpirun or a pod, by its environment",
    )
    add("--wait", type=_seconds, metavar="S", help=f"--from-env: how long ranks may be late (default {WAIT_S:g})")
    add("--address", metavar="A", help="over a Ray cluster: auto, or HOST:PORT of its head")
    add("--num-workers", type=_ranks, metavar="N", help="--address: the ranks")
    add("--gpus-per-worker", type=_gpus, metavar="G", help="--address: GPUs of each (default 1; 0 for CPUs and gloo)")
    add("--sweep", action="store_true", help="worlds of 1, 2, 4 .. N as well, with all_reduce up to 64 MiB on NCCL")
    add(
        "--locate", action="store_true", help="after a failure find the rank, node, link or size, also where ranks are named"
    )
    add("--policy", metavar="P", help="default, fallback, strict, observe or a TOML file")
    add("--collectives", metavar="NAMES", help="presets and operations, by comma (default ddp,syncbn)")
    add("--timeout", type=_seconds, metavar="S", help="deadline of the store, the peers, comm_init and the collectives each")
    add("--json", action="store_true", help="print one JSON object")


def resolve(args: argparse.Namespace) -> Asked:
    """The command line, resolved with what the environment says.

    Raises:
        UsageError: a value cannot be, or two options exclude each other.
    """
    _check_places(args)
    on_cpu = args.gpus_per_worker == 0
    backends = tuple(dict.fromkeys(args.backend or (["gloo"] if on_cpu else ["nccl"])))
    try:
        policy = policy_file.resolve(args.policy, os.environ)
        collectives = expand(None if args.collectives is None else [n.strip() for n in args.collectives.split(",")])
    except ValueError as error:
        raise UsageError(str(error)) from error
    spec = ProbeSpec()
    if args.timeout is not None:
        t = args.timeout
        spec = replace(spec, store_s=t, peers_s=t, comm_init_s=t, comm_init_per_rank_s=0.0, collective_s=t)
    return Asked(backends=backends, policy=policy, spec=spec, collectives=collectives, locate=args.locate, sweep=args.sweep)


def _check_places(args: argparse.Namespace) -> None:
    where = [name for name, given in (("--from-env", args.from_env), ("--address", args.address)) if given]
    where += ["--ranks"] if args.ranks is not None else []
    if len(where) > 1:
        raise UsageError(f"{' and '.join(where)} exclude each other: they say where the ranks come from")
    if args.address and args.num_workers is None:
        raise UsageError("--address needs --num-workers: how many ranks to place on the cluster")
    if not args.address and (args.num_workers is not None or args.gpus_per_worker is not None):
        raise UsageError("--num-workers and --gpus-per-worker go with --address", help=("on this host: --ranks N",))
    if args.wait is not None and not args.from_env:
        raise UsageError("--wait goes with --from-env")


def _ranks(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} ranks prove nothing: give a whole number of 1 or more")
    return int(text)


def _gpus(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"give a number of GPUs, not {text!r}") from None
    if not value >= 0 or (value > 1 and value != int(value)):
        raise argparse.ArgumentTypeError("Ray takes fractions of a GPU up to 1 and whole numbers above")
    return value


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"give a number of seconds, not {text!r}") from None
    if not 0 < value <= 3600:
        raise argparse.ArgumentTypeError("give a number of seconds above 0 and up to 3600")
    return value
