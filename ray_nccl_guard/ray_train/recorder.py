"""Torch's Flight Recorder in a worker: on before the training group is made, its files where no other job writes any."""

from __future__ import annotations

import faulthandler
import os
import re
import shutil
import signal
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

# torch's own default since it records unasked (2.13 and 2.15, measured), and what its tutorial recommends for before.
_RECORDS = "2000"
# Each setting: its present name and the release that has it, then the old name. torch 2.15 prints a deprecation warning in
# every process that has an old one set; names as in the libraries of 2.14.1 and 2.15.0, and in use with 2.11 (pytorch#192233).
_BUFFER = ("TORCH_FR_BUFFER_SIZE", (2, 11), "TORCH_NCCL_TRACE_BUFFER_SIZE")
_FILE = ("TORCH_FR_DUMP_TEMP_FILE", (2, 11), "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
_ON_TIMEOUT = ("TORCH_FR_DUMP_ON_TIMEOUT", (2, 15), "TORCH_NCCL_DUMP_ON_TIMEOUT")

# For a worker that answers nothing: faulthandler writes its stacks when this comes. Real-time signals are nobody's habit,
# and it is sent to nobody who has not said that it is caught, since its default is to end the process.
STACKS_SIGNAL = signal.SIGRTMIN + 11

_stack_files: list[Any] = []  # faulthandler needs its file open for as long as the process lives


@dataclass(frozen=True, slots=True, kw_only=True)
class Armed:
    """One worker with the recorder on, and where on its node its files will lie.

    Attributes:
        folder: of this run on this node; empty if there is none.
        prefix: what torch appends the rank to when it writes a dump by itself; the user's own if they set one.
        stack_file: where `STACKS_SIGNAL` writes the stacks, empty if the signal is not caught.
        since: the node's clock when the recorder was switched on, to tell this run's files from older ones (Unix seconds).
    """

    rank: int
    pid: int
    node: str
    host: str
    folder: str = ""
    prefix: str = ""
    stack_file: str = ""
    since: float = 0.0


def settings_for(torch_version: str, folder: str, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that switch the recorder on, without those that the user has set under either name.

    Python stacks are recorded with every call, which is torch's own default. C++ stacks are left off: walking them has
    crashed and stalled dumps (pytorch#114651, pytorch#133490). Making a Python stack readable needs the GIL: a dump that
    torch writes by itself while another thread keeps the GIL comes late and without stacks, or not at all
    (pytorch#167023); the guard's own pull runs on a thread that has it.
    """
    wanted = {_BUFFER: _RECORDS, _FILE: f"{folder}/rank_" if folder else "", _ON_TIMEOUT: "1"}
    made: dict[str, str] = {}
    for (name, since, old_name), value in wanted.items():
        if not value or name in environ or old_name in environ:
            continue
        made[name] = value
        if _release(torch_version) < since:
            made[old_name] = value
    return made


def _release(version: str) -> tuple[int, int]:
    numbers = re.match(r"(\d+)\.(\d+)", version)
    return (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)  # an unknown one gets both names


def arm(rank: int, node: str, name: str | None) -> Armed:
    """Runs in the worker, before any process group. `name` is unique to the worker group; None changes nothing here."""
    import torch

    folder = _folder(name) if name is not None else ""
    if name is not None:
        os.environ.update(settings_for(torch.__version__, folder, os.environ))
    return Armed(
        rank=rank,
        pid=os.getpid(),
        node=node,
        host=os.uname().nodename,
        folder=folder,
        prefix=_prefix(),
        since=time.time(),
    )


def _folder(name: str) -> str:
    try:
        return os.path.join(tempfile.gettempdir(), f"nccl_guard-{name}")
    except FileNotFoundError:  # it tries each place by writing to it, and a full disk takes nothing
        return ""


def make_room(armed: Armed) -> Armed:
    """Runs in the worker once its process group stands, so that a start that fails leaves no folder behind.

    Without a writable folder for temporary files the recorder stays in memory, from where it is asked.
    """
    try:
        os.mkdir(armed.folder, mode=0o700)
    except FileExistsError:
        pass  # another rank of the node came first
    except OSError:
        return replace(armed, folder="")
    return replace(armed, stack_file=_catch_stacks_signal(f"{armed.folder}/stacks_{armed.rank}"))


def _prefix() -> str:
    return os.environ.get(_FILE[0]) or os.environ.get(_FILE[2]) or ""


def _catch_stacks_signal(path: str) -> str:
    if signal.getsignal(STACKS_SIGNAL) is not signal.SIG_DFL:
        return ""
    try:
        file = open(path, "w")  # noqa: SIM115 - it stays open
        faulthandler.register(STACKS_SIGNAL, file=file, all_threads=True)
    except (OSError, ValueError, RuntimeError):
        return ""
    _stack_files.append(file)
    return path


def remove(folder: str) -> None:
    """Remove the run's folder on this node. Several workers of a node may be asked at once."""
    if os.path.basename(folder).startswith("nccl_guard-"):
        shutil.rmtree(folder, ignore_errors=True)
