"""`--nccl-guard[=POLICY]` for training scripts that have an argparse parser of their own."""

from __future__ import annotations

import argparse
import os
from typing import Any

from ray_nccl_guard.errors import UsageError
from ray_nccl_guard.policy_file import resolve

_NOT_GIVEN = "off"
_NOT_NAMED = ""


def add_argument(parser: argparse.ArgumentParser, flag: str = "--nccl-guard") -> argparse.Action:
    """Add the flag to `parser`; its value is for `from_args`.

    Without a value (`--nccl-guard`) the environment and the default table decide on the policy; `=off` is as if the flag
    were not there. Write the policy with `=`, or it takes the next argument of the line.
    """
    return parser.add_argument(
        flag,
        dest="nccl_guard",
        nargs="?",
        const=_NOT_NAMED,
        default=_NOT_GIVEN,
        type=_policy,
        metavar="POLICY",
        help="prove NCCL before training starts; POLICY is default, fallback, strict, observe, off, or a TOML file",
    )


def from_args(args: argparse.Namespace, **options: Any) -> Any:
    """The `torch_config` for a TorchTrainer: a `GuardedTorchConfig(**options)` if the flag was given, else Ray's `TorchConfig`.

    Options that only the guard knows (`probe`, `collectives`, ...) are left out of the latter.
    """
    from ray_nccl_guard.ray_train.config import GuardedTorchConfig, plain

    if args.nccl_guard == _NOT_GIVEN:
        return plain(**options)
    return GuardedTorchConfig(**{**options, **({"policy": args.nccl_guard} if args.nccl_guard else {})})


def _policy(value: str) -> str:
    if value not in (_NOT_GIVEN, _NOT_NAMED):
        try:
            resolve(value, os.environ)
        except (ValueError, UsageError) as error:
            raise argparse.ArgumentTypeError(str(error)) from error
    return value
