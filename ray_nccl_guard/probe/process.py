"""Starting, ending and reaping one child process: by fork or by spawn, in its own session, dead with its parent."""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import glob
import logging
import os
import pickle
import re
import resource
import signal
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass

from ray_nccl_guard.probe.journal import Journal
from ray_nccl_guard.probe.spec import RankTask, Start

# A killed process that is not reaped by then sits in the driver (D state), and no signal ends it (DESIGN, issue "main job").
REAP_S = 5.0

PR_SET_PDEATHSIG = 1  # linux/prctl.h


@dataclass(slots=True)
class Child:
    """A running child. `status` is its wait status once it has been reaped."""

    pid: int
    start: Start
    started_s: float
    status: int | None = None

    def reaped(self) -> bool:
        """Whether the child has ended; reaps it without waiting."""
        if self.status is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:
                # Somebody else in this worker reaped it (a user's SIGCHLD handler): the status is lost, the end is not.
                pid, status = self.pid, 0
            if pid:
                self.status = status
        return self.status is not None

    def ask_stack(self) -> None:
        """Let the child print where its Python stands (a C-level handler: it works while something keeps the GIL)."""
        try:
            os.kill(self.pid, signal.SIGUSR1)
            time.sleep(0.05)  # the handler writes a few hundred bytes to a memory file
        except ProcessLookupError:
            pass

    def kill(self, within_s: float = REAP_S) -> bool:
        """SIGKILL the child's whole session and wait at most `within_s`; False if it cannot be reaped."""
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # it ended by itself in between; the wait below tells
        except PermissionError:
            os.kill(self.pid, signal.SIGKILL)
        end_s = time.monotonic() + within_s
        while not self.reaped():
            if time.monotonic() > end_s:
                return False
            time.sleep(0.002)
        return True


def start(task: RankTask, how: Start, fds: Iterable[int], env: dict[str, str]) -> Child:
    """Start the probe of `task`. `fds` are the journal, pulse, output and NCCL log, in this order.

    Call it from the worker's main thread only: PR_SET_PDEATHSIG fires when the *thread* that forked ends.
    """
    journal_fd, pulse_fd, output_fd, nccl_fd = fds
    env = {**env, "NCCL_DEBUG_FILE": f"/proc/self/fd/{nccl_fd}"}
    started_s = time.monotonic()
    if how is Start.SPAWN:
        pid = _spawn(task, (journal_fd, pulse_fd, output_fd, nccl_fd), env)
    else:
        pid = _fork(task, (journal_fd, pulse_fd, output_fd, nccl_fd), env)
    return Child(pid=pid, start=how, started_s=started_s)


def _fork(task: RankTask, fds: tuple[int, int, int, int], env: dict[str, str]) -> int:
    parent = os.getpid()
    from ray_nccl_guard.probe import child  # what both sides need is loaded once, before

    if "torch.distributed" in sys.modules:
        from ray_nccl_guard.probe import collectives  # noqa: F401
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        gc.disable()  # a collection could run finalisers of objects whose threads did not come along
        detach(parent, keep=fds, output_fd=fds[2])
        _apply(env, task.unset_env)
        child.run(task, Start.FORK, Journal(fds[0]), fds[1])
    except BaseException as error:  # nothing may climb into the worker's stack; the journal carries it to the launcher
        Journal(fds[0]).write("import", "failed", f"{type(error).__name__}: {error}")
    finally:
        os._exit(code)


def _spawn(task: RankTask, fds: tuple[int, int, int, int], env: dict[str, str]) -> int:
    # The child finds this package wherever the worker found it: site-packages, py_modules or the working directory. The
    # program is started by posix_spawn, since a fork of this process is just what may not be safe.
    payload_fd, write_fd = os.pipe()
    program = (
        "import sys,pickle,os\nsys.path[:] = %r\nfrom ray_nccl_guard.probe.process import spawned\nspawned(%r, %r, %r)\n"
    )
    arguments = [sys.executable, "-c", program % (sys.path, fds, payload_fd, os.getpid())]
    for fd in (*fds, payload_fd):
        os.set_inheritable(fd, True)
    environment = {k: v for k, v in {**os.environ, **env}.items() if k not in task.unset_env}
    try:
        pid = os.posix_spawn(
            sys.executable,
            arguments,
            environment,
            file_actions=[(os.POSIX_SPAWN_DUP2, fds[2], 1), (os.POSIX_SPAWN_DUP2, fds[2], 2)],
            setsid=True,
        )
    finally:
        os.close(payload_fd)
        for fd in fds:
            os.set_inheritable(fd, False)
    with os.fdopen(write_fd, "wb") as pipe:
        try:
            pickle.dump(task, pipe)
        except BrokenPipeError:
            pass  # it died at once: reaping it will tell
    return pid


def spawned(fds: tuple[int, int, int, int], payload_fd: int, parent: int) -> None:
    """Entry of a spawned child: read the task, then run like a forked one."""
    with os.fdopen(payload_fd, "rb") as pipe:
        task = pickle.load(pipe)  # from our own parent, over a pipe nobody else has
    detach(parent, keep=fds, output_fd=fds[2], new_session=False)
    from ray_nccl_guard.probe import child

    child.run(task, Start.SPAWN, Journal(fds[0]), fds[1])


def detach(parent: int, keep: Iterable[int], output_fd: int, new_session: bool = True) -> None:
    """Make this process disposable: own session, dies with its parent, no core file, no inherited signals or sockets."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)  # the parent died before the line above took effect
    if new_session:
        os.setsid()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_DFL)  # Ray's handlers raise SystemExit into a stack that is not ours
    os.dup2(output_fd, 1)
    os.dup2(output_fd, 2)
    _silence_all_but({1, 2, *keep})
    # Where Python stood, in C and without the GIL: after a crash by itself, before our SIGKILL on SIGUSR1.
    # Of the crashing thread alone: while torch's watchdog aborts, the others run on, and a walk over their frames has crashed
    # in its turn (seen with torch 2.15.0: SIGABRT became SIGSEGV), which would be taken for the cause.
    faulthandler.enable(file=2, all_threads=False)
    faulthandler.register(signal.SIGUSR1, file=2)
    # Ray replaces sys.stdout and sys.stderr by objects of its own.
    sys.stdout = os.fdopen(os.dup(1), "w", buffering=1, errors="replace")
    sys.stderr = os.fdopen(os.dup(2), "w", buffering=1, errors="replace")
    logging.getLogger().handlers = [logging.StreamHandler(sys.stderr)]  # Ray Train sends even print() through logging


def _silence_all_but(keep: set[int]) -> None:
    """Point every inherited descriptor at /dev/null.

    Sockets to the raylet would keep it from noticing the worker's death while this child lives. Closing is not enough: a
    log handler that still knows the number of a closed file would write into whatever socket gets that number next.
    """
    null = os.open("/dev/null", os.O_RDWR)
    for name in os.listdir("/proc/self/fd"):
        fd = int(name)
        if fd not in keep and fd != null:
            os.dup2(null, fd, inheritable=False)


def _apply(env: dict[str, str], unset: Iterable[str]) -> None:
    os.environ.update(env)
    for name in unset:
        os.environ.pop(name, None)


def shared_memory_of(session: int) -> set[str]:
    """NCCL's files in /dev/shm that a process of `session` has mapped or open: noted before a kill, unlinked after."""
    pids = []
    for stat in glob.glob("/proc/[0-9]*/stat"):
        try:
            with open(stat) as file:
                if int(file.read().rpartition(")")[2].split()[3]) == session:
                    pids.append(int(stat.split("/")[2]))
        except (OSError, IndexError, ValueError):
            continue  # it ended while we looked
    return shared_memory_in(pids)


def shared_memory_in(pids: Iterable[int]) -> set[str]:
    """NCCL's files in /dev/shm that these processes have mapped or open."""
    found: set[str] = set()
    for pid in pids:
        try:
            with open(f"/proc/{pid}/maps") as file:
                found.update(re.findall(r"/dev/shm/nccl-\w+", file.read()))
            for fd in glob.glob(f"/proc/{pid}/fd/*"):
                found.update(re.findall(r"^/dev/shm/nccl-\w+", os.readlink(fd)))
        except OSError:
            continue  # it ended while we looked
    return found


def unlink(paths: Iterable[str]) -> None:
    for path in paths:
        try:
            os.unlink(path)
        except FileNotFoundError:
            pass


def state_of(pid: int) -> str:
    """The state letter of /proc/PID/stat (`T` stopped, `D` in the kernel), empty if it is gone."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""
