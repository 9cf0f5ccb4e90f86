"""Removes a child's shared memory also where the launcher itself is killed: then nobody else is left to do it."""

from __future__ import annotations

import subprocess
import sys
import time

from ray_nccl_guard.probe import process

# NCCL unlinks its files once all ranks have them; a healthy communicator has done so long before the first look.
_FIRST_LOOK_S, _LOOK_S = 1.0, 1.0
# Waits for the end of the pipe, which only the launcher's process holds, then unlinks. A grandchild of the worker: its
# children Ray kills on the way out (kill_child_processes_on_worker_exit, 2.60).
_PROGRAM = """
import os, sys
if os.fork():
    os._exit(0)
sys.stdin.read()
for path in sys.argv[1:]:
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass
"""


class Sweep:
    """Looks now and then which of NCCL's files a child holds, and starts a process that unlinks them when this one ends.

    SIGKILL takes the launcher and its child together, and their names with them: so somebody has to know them before.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._next_s = time.monotonic() + _FIRST_LOOK_S
        self._known: set[str] = set()
        self._started: list[subprocess.Popen[bytes]] = []

    def look(self, now_s: float) -> None:
        """Call it often; most calls cost nothing."""
        if now_s < self._next_s:
            return
        self._next_s = now_s + _LOOK_S
        new = process.shared_memory_in([self.pid]) - self._known
        if not new:
            return
        self._known |= new
        # Isolated and without site-packages it starts in hundredths of a second, and it inherits no socket of the worker's.
        command = [sys.executable, "-I", "-S", "-c", _PROGRAM, *sorted(new)]
        quiet = subprocess.DEVNULL
        self._started.append(
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=quiet, stderr=quiet, start_new_session=True)
        )

    def end(self) -> None:
        """The child has ended: unlink now what it had. Waits for nothing, since others wait for the launcher."""
        process.unlink(self._known)
        for started in self._started:
            started.kill()  # it has long handed over to its child, which ends with the pipe
            started.communicate()
        self._started = []
