"""How each rank ended, as Ray Train knows it, and whether that may have left somebody waiting."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from ray_nccl_guard.flight.dump import Frame
from ray_nccl_guard.flight.tables import user_frames
from ray_nccl_guard.ray_train.flight_pull import Gathered
from ray_nccl_guard.rulebook import RuleRole, shipped_rules

_LINE = re.compile(r'File "(?P<file>[^"\n]+)", line (?P<line>\d+), in (?P<name>\S+)')
_LIBRARY = re.compile(r"/lib/python3\.\d+/|^<")
_LONGEST = 300  # characters of an exception's first line


class How(Enum):
    """Where a rank is when the run stops."""

    RAISED = "raised"
    DIED = "died"
    SILENT = "does not answer"
    RUNNING = "still in train_func"
    ENDED = "train_func has ended"


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """One rank.

    Attributes:
        what: the exception's first line, or why Ray calls the worker dead; empty if there is none.
        own: it raised, and not because a collective failed: nothing the others did makes it do that.
        place: the innermost line of the program itself, as `file:line in name`; empty if not known.
    """

    how: How
    what: str = ""
    own: bool = False
    place: str = ""


def ends(world_size: int, gathered: Gathered, statuses: Mapping[int, Any]) -> dict[int, End]:
    """How every rank ended. `statuses` are Ray's own, by rank, each with an `error` that may be None."""
    return {rank: _end(rank, gathered, getattr(statuses.get(rank), "error", None)) for rank in range(world_size)}


def _end(rank: int, gathered: Gathered, error: Exception | None) -> End:
    place = place_of(gathered.of(rank).place)
    if rank in gathered.died:
        return End(how=How.DIED, what=gathered.died[rank])
    if rank in gathered.silent:
        state = gathered.of(rank).state
        return End(how=How.SILENT, what=f"process state {state}" if state else "", place=place)
    if error is not None:
        text = str(error)
        base = getattr(error, "_base_exc", error)
        return End(how=How.RAISED, what=_short(base), own=not of_a_collective(base), place=_place_in(text))
    return End(how=How.RUNNING, place=place) if place else End(how=How.ENDED)


def of_a_collective(error: BaseException) -> bool:
    """Whether an exception says that a collective failed, which makes its rank a witness rather than a cause."""
    if type(error).__name__.startswith("Dist"):
        return True
    telling = (RuleRole.CAUSE, RuleRole.SYMPTOM, RuleRole.CASCADE)
    lines = str(error).splitlines()[:50]
    return any(rule.matches(line) for rule in shipped_rules() if rule.role in telling for line in lines)


def place_of(frames: tuple[Frame, ...]) -> str:
    """The innermost line that is the program's own."""
    program = user_frames(frames)
    # A program may be installed as a library itself; then its innermost frame is the best that can be told.
    own = [frame for frame in program if not _LIBRARY.search(frame.file)] or program
    return f"{own[0].file}:{own[0].line} in {own[0].name}" if own else ""


def _place_in(traceback: str) -> str:
    frames = tuple(Frame(m["file"], int(m["line"]), m["name"]) for m in _LINE.finditer(traceback))
    return place_of(frames[::-1])


def _short(error: BaseException) -> str:
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {line}"[:_LONGEST] if line else type(error).__name__


def ended_badly(status: Any, group: Any) -> bool:
    """Whether somebody may have been left waiting.

    Not if all ended well, nor if every rank raised for a reason of its own (a bug that all ranks meet), nor if Ray took the
    nodes away. A hang that Ray's NCCL RAS callback confirms is an error that the poll status does not show.
    """
    errors = getattr(status, "errors", {})
    if not errors:
        return ras_confirmed_a_hang(group)
    if getattr(status, "has_preempted_worker", lambda: False)():
        return False
    everyone = len(errors) == len(status.worker_statuses)
    return not (everyone and all(_is_own(error) for error in errors.values()))


def _is_own(error: BaseException) -> bool:
    """Raised by the program in `train_func`; Ray's own errors say that a worker died or does not answer."""
    return not of_a_collective(error) and not type(error).__name__.startswith(("WorkerHealthCheck", "RayActor", "ActorDied"))


def ras_confirmed_a_hang(group: Any) -> bool:
    """Whether Ray's own callback (2.60 and later, switched on by the user) holds some communicator to hang now.

    It counts the polls of NCCL's RAS at which a communicator stood still, and calls it a hang at a number of them; under its
    action `observe` that ends in a warning only, under `fail` in an error that names no worker.
    """
    for callback in getattr(group, "_callbacks", ()):
        if type(callback).__name__ == "NCCLRASCallback":
            frozen = getattr(callback, "comm_deadlock_count", {})
            enough = getattr(callback, "_confirm_poll_counts", float("inf"))
            return any(count >= enough for count in frozen.values())
    return False
