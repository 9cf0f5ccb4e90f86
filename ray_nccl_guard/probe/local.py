"""Ranks of our own on this host: processes forked from one that has torch, which end with it however it ends."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import TracebackType

from ray_nccl_guard.errors import GuardError
from ray_nccl_guard.probe.journal import anonymous_file
from ray_nccl_guard.probe.process import PR_SET_PDEATHSIG
from ray_nccl_guard.probe.serve import Place, serve

# The driver's own answer to "how many GPUs" takes well under a second; a driver that hangs is a finding, not a wait.
_COUNT_S = 60.0
_END_S = 3.0  # ranks that were told to end do so within a look at the store
_TAIL_BYTES = 2000


class CountFailed(GuardError):
    """How many GPUs there are could not be asked."""


def visible_gpus() -> int:
    """GPUs that CUDA would show this process, asked in a fork, so that CUDA stays untouched here.

    Raises:
        CountFailed: torch or the driver died or hung over it.
    """
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            import torch

            os.write(write, str(torch.cuda.device_count()).encode())
        finally:
            os._exit(0)
    os.close(write)
    try:
        ready, _, _ = select.select([read], [], [], _COUNT_S)
        said = os.read(read, 16) if ready else b""
        if not said.isdigit():
            how = "gave no number" if ready else f"did not answer in {_COUNT_S:g} s"
            raise CountFailed(f"how many GPUs this host has could not be asked: torch.cuda.device_count() {how}")
        return int(said)
    finally:
        os.close(read)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


class LocalRanks:
    """Forks one serving process per place when entered; they wait until `connect` tells them the store's port.

    Enter it after `import torch` and before this process makes a store: the thread of a store's server may hold a lock of
    glibc's resolver at the moment of a fork (see `probe.child`).
    """

    def __init__(self, places: Sequence[Place]) -> None:
        self.places = places
        self._pids: dict[int, int] = {}
        self._ended: dict[int, str] = {}
        self._output: dict[int, int] = {}
        self._ports: dict[int, int] = {}

    def __enter__(self) -> LocalRanks:
        try:
            for place in self.places:
                self._fork(place)
        except BaseException:
            self.end(at_once=True)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.end(at_once=kind is not None)

    def connect(self, port: int) -> None:
        """Tell the ranks the store's port."""
        for fd in self._ports.values():
            os.write(fd, b"%d\n" % port)

    def why_dead(self, rank: int) -> str:
        """Why a rank's process has ended, with the end of what it printed; empty while it lives, or where it is not ours."""
        if rank in self._pids and rank not in self._ended:
            pid, status = os.waitpid(self._pids[rank], os.WNOHANG)
            if pid:
                code = os.waitstatus_to_exitcode(status)
                how = f"exit code {code}" if code >= 0 else f"signal {-code}"
                self._ended[rank] = f"its process ended by {how}; {self._tail(rank)}".rstrip("; ")
        return self._ended.get(rank, "")

    def end(self, *, at_once: bool = False) -> None:
        """End every rank's process: after a moment for those that were told to, by SIGKILL what is left."""
        end_s = time.monotonic() + (0.0 if at_once else _END_S)
        while any(not self.why_dead(rank) for rank in self._pids) and time.monotonic() < end_s:
            time.sleep(0.01)
        for rank, pid in self._pids.items():
            if not self.why_dead(rank):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                self._ended[rank] = "ended by the probe"
        for fd in (*self._output.values(), *self._ports.values()):
            os.close(fd)
        self._output, self._ports = {}, {}

    def _fork(self, place: Place) -> None:
        output = anonymous_file(f"nccl-guard-rank-{place.rank}")
        read, write = os.pipe()
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            for fd in self._ports.values():
                os.close(fd)  # or the other ranks would not see it when the leader has gone
            os.close(write)
            run_forked(parent, output, lambda: serve(replace(place, store_port=_port(read))))
        os.close(read)
        self._pids[place.rank], self._output[place.rank], self._ports[place.rank] = pid, output, write

    def _tail(self, rank: int) -> str:
        size = os.fstat(self._output[rank]).st_size
        text = os.pread(self._output[rank], _TAIL_BYTES, max(0, size - _TAIL_BYTES)).decode("utf-8", "replace")
        return text.strip().splitlines()[-1] if text.strip() else ""


def run_forked(parent: int, output_fd: int, work: Callable[[], int]) -> None:
    """The forked side: dead with its parent, deaf to Ctrl-C (the leader decides), printing into its own file. Never returns."""
    code = 1
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.dup2(output_fd, 1)
        os.dup2(output_fd, 2)
        code = work()
    except BaseException as error:  # the outermost frame of a forked process: the file carries it to the leader
        os.write(2, f"{type(error).__name__}: {error}\n".encode())
    finally:
        os._exit(code)


def _port(read: int) -> int:
    line = os.read(read, 16)
    if not line:
        os._exit(1)  # the leader has gone
    return int(line)
