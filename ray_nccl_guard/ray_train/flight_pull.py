"""What a hang left behind: the recorders and stacks of a worker that answers, and on its node what one that does not has left."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import threading
import time
import traceback
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType

from ray_nccl_guard.flight.dump import Frame
from ray_nccl_guard.ray_train.recorder import STACKS_SIGNAL, Armed, remove

# A dump holds 2,000 records; a larger file is not one of this run's (0.4 MB each on the benchmark's, flight.py).
_MOST_BYTES = 64 << 20
_PY_SPY_S = 15.0  # it stops the process, walks its threads and lets it go: 12 ms for three threads (py-spy 0.4.3)
_SIGNAL_S = 2.0  # faulthandler writes a few kB
_STACKS = 256 << 10  # bytes of text that are kept of one process


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulled:
    """What one process gave.

    Attributes:
        dumps: a dump, compressed by zlib, for each recorder (`gloo`, `nccl2`, `nccl`); of a file that torch wrote, `file`.
        stacks: all Python stacks as text.
        place: where `train_func` is now, innermost frame first; empty if it has ended, or if nobody could look.
        groups: global ranks of process groups, in group order, by torch's name of the group.
        notes: what could not be had, and why.
        state: of a process that does not answer, as the kernel calls it (`T` stopped, `D` in a driver); `gone` if there is none.
    """

    dumps: Mapping[str, bytes] = field(default_factory=dict)
    stacks: str = ""
    place: tuple[Frame, ...] = ()
    groups: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    state: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathered:
    """What a worker group gave.

    Attributes:
        answered: by rank, of workers that answered themselves.
        left: by rank, of the others, as far as their nodes were reached.
        died: why, by rank, of workers that Ray calls dead.
        notes: what could not be had for whole nodes.
    """

    answered: dict[int, Pulled]
    left: dict[int, Pulled] = field(default_factory=dict)
    died: dict[int, str] = field(default_factory=dict)
    silent: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()
    seconds: float = 0.0

    def of(self, rank: int) -> Pulled:
        return self.answered.get(rank) or self.left.get(rank) or Pulled()


def pull() -> Pulled:
    """Runs on the main thread of a worker, beside whatever hangs in the thread of `train_func`."""
    stacks, place = _stacks_here()
    dumps: dict[str, bytes] = {}
    notes: list[str] = []
    for name, dump in _recorders().items():
        try:
            data = dump()
        except RuntimeError as error:  # torch's own: no such recorder in this process
            notes.append(f"the {name} recorder gave nothing: {str(error).splitlines()[0]}")
            continue
        if data:
            dumps[name] = zlib.compress(data, 1)
    return Pulled(dumps=dumps, stacks=stacks, place=place, groups=_groups(), notes=tuple(notes))


def _recorders() -> dict[str, Callable[[], bytes]]:
    """The recorders of this torch: 2.15 has one per backend, before that are the legacy NCCL one and a common one."""
    from torch._C import _distributed_c10d as c10d

    found: dict[str, Callable[[], bytes]] = {}
    common = getattr(c10d, "_dump_fr_trace", None)
    if common is not None and "backend:" in (common.__doc__ or ""):
        found["nccl2"] = lambda: common(backend="nccl2")
        found["gloo"] = lambda: common(backend="gloo")
    elif common is not None:
        found["gloo"] = common
    legacy = getattr(c10d, "_dump_nccl_trace", None)
    if legacy is not None:
        found["nccl"] = legacy
    return found


def _groups() -> dict[str, tuple[int, ...]]:
    """gloo's dumps do not tell who belongs to a group; torch's own tables in this process do."""
    from torch.distributed import distributed_c10d as c10d

    world = getattr(c10d, "_world", None)
    names, members = getattr(world, "pg_names", {}), getattr(world, "pg_group_ranks", {})
    return {
        str(names[group]): tuple(sorted(ranks, key=ranks.get))
        for group, ranks in members.items()
        if group in names and ranks
    }


def _stacks_here() -> tuple[str, tuple[Frame, ...]]:
    frames = sys._current_frames()
    texts: list[str] = []
    place: tuple[Frame, ...] = ()
    for thread in threading.enumerate():
        frame = frames.get(thread.ident or 0)
        if frame is None or thread is threading.current_thread():
            continue
        texts.append(f"Thread {thread.name}:\n" + "".join(traceback.format_stack(frame)))
        # The names that Ray Train's V2 and V1 give to the thread of `train_func`.
        if thread.name.startswith("TrainingThread(") or type(thread).__name__ == "RunnerThread":
            place = _frames(frame)
    return "\n".join(texts)[:_STACKS], place


def _frames(frame: FrameType | None) -> tuple[Frame, ...]:
    found: list[Frame] = []
    while frame is not None:
        found.append(Frame(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    return tuple(found)


def left_on_node(ranks: Sequence[Armed], alive: Sequence[int], remove_folder: bool = False) -> dict[int, Pulled]:
    """Runs in a task on the node of workers that gave no answer: their files, and the stacks of those that live.

    Args:
        alive: of `ranks`, those whose process Ray does not call dead.
        remove_folder: nobody else is there to do it.
    """
    found = {armed.rank: _left_by(armed, armed.rank in alive) for armed in ranks}
    if remove_folder:
        for folder in {armed.folder for armed in ranks if armed.folder}:
            remove(folder)
    return found


def _left_by(armed: Armed, alive: bool) -> Pulled:
    notes: list[str] = []
    dumps = {}
    path = f"{armed.prefix}{armed.rank}"
    try:
        # torch writes the whole file at once before it aborts the process; an older one is of another run.
        if armed.prefix and os.stat(path).st_mtime >= armed.since - 1:
            with open(path, "rb") as file:
                dumps["file"] = zlib.compress(file.read(_MOST_BYTES), 1)
    except OSError:
        notes.append("it wrote no dump file")
    state = _state(armed.pid)
    stacks = ""
    if alive and state not in ("gone", "Z"):
        stacks = _by_py_spy(armed.pid, notes) or _by_signal(armed, notes)
    return Pulled(dumps=dumps, stacks=stacks[:_STACKS], place=place_in(stacks), notes=tuple(notes), state=state)


def _state(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0]
    except OSError:
        return "gone"


def _by_py_spy(pid: int, notes: list[str]) -> str:
    program = shutil.which("py-spy") or shutil.which("py-spy", path=os.path.dirname(sys.executable))
    if program is None:
        return ""
    try:
        done = subprocess.run(
            [program, "dump", "--full-filenames", "--pid", str(pid)],
            capture_output=True,
            text=True,
            timeout=_PY_SPY_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        notes.append(f"py-spy gave no stacks within {_PY_SPY_S:g} s")
        return ""
    if done.returncode != 0:
        notes.append(f"py-spy: {(done.stderr.strip().splitlines() or ['it failed'])[-1]}")
        return ""
    return done.stdout


def _by_signal(armed: Armed, notes: list[str]) -> str:
    if not armed.stack_file or not _catches(armed.pid, STACKS_SIGNAL):
        notes.append("its stacks could not be had: it does not catch the signal that asks for them")
        return ""
    os.kill(armed.pid, STACKS_SIGNAL)
    end_s = time.monotonic() + _SIGNAL_S
    while time.monotonic() < end_s:
        time.sleep(0.1)
        with open(armed.stack_file, errors="replace") as file:
            text = file.read(_STACKS)
        if text:
            return text
    notes.append(f"its stacks did not come within {_SIGNAL_S:g} s")
    return ""


def _catches(pid: int, number: int) -> bool:
    try:
        with open(f"/proc/{pid}/status") as file:
            caught = next((line.split()[1] for line in file if line.startswith("SigCgt:")), "0")
    except OSError:
        return False
    return bool(int(caught, 16) >> (number - 1) & 1)


# py-spy: `    fetch (/app/train.py:31)`; faulthandler: `  File "/app/train.py", line 31 in fetch`.
_PY_SPY_LINE = re.compile(r"^ {4}(?P<name>.+) \((?P<file>.+):(?P<line>\d+)\)$")
_SIGNAL_LINE = re.compile(r'^  File "(?P<file>.+)", line (?P<line>\d+) in (?P<name>.+)$')
# What runs `train_func` on V2, and on V1.
_RUNNERS = (("thread_runner.py", "_run_target"), ("air/_internal/util.py", "run"))


def place_in(stacks: str) -> tuple[Frame, ...]:
    """Where `train_func` is in what py-spy or faulthandler printed, innermost frame first; empty if it is not there."""
    for thread in re.split(r"^(?=Thread |Current thread )", stacks, flags=re.MULTILINE):
        lines = [found for line in thread.splitlines() if (found := _PY_SPY_LINE.match(line) or _SIGNAL_LINE.match(line))]
        frames = tuple(Frame(line["file"], int(line["line"]), line["name"]) for line in lines)
        # py-spy gives qualified names from Python 3.11 on.
        if any(frame.file.endswith(file) and frame.name.endswith(name) for frame in frames for file, name in _RUNNERS):
            return frames
    return ()
