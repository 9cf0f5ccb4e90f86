"""The worker group as the guard asks it: one question to every rank, and by a deadline an answer, an error or silence from each."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from ray_nccl_guard.probe.workers import Answer, Patience, WorkerFunctionError, no_patience, values

__all__ = ["Answer", "WorkerFunctionError", "Workers", "is_v2", "values"]

# While `on_start` waits, the controller's event loop stands still (Ctrl-C included), so no single wait is longer.
_SLICE_S = 0.25


def is_v2(group: Any) -> bool:
    """Whether a worker group is of Ray Train V2: V1's has no context, and its workers cannot be replaced in an attempt."""
    return hasattr(group, "get_worker_group_context")


class Workers:
    """A Ray Train worker group, V1 or V2, through the few calls that both have had since 2.43."""

    def __init__(self, group: Any) -> None:
        self.group = group

    def __len__(self) -> int:
        return len(self.group)

    def ask(
        self,
        function: Callable[..., Any],
        arguments: Sequence[tuple[Any, ...]] | None = None,
        *,
        deadline_s: float,
        patience_s: Patience = no_patience,
        ranks: Sequence[int] | None = None,
    ) -> list[Answer]:
        """Ask every rank (or `ranks`) at once, and wait at most `deadline_s`.

        `patience_s` sees each answer as it comes; the seconds it returns bound the wait for those still missing.
        """
        asked = list(range(len(self))) if ranks is None else list(ranks)
        given = arguments if arguments is not None else [()] * len(asked)
        pending = {
            self.group.execute_single_async(rank, function, *args): rank for rank, args in zip(asked, given, strict=True)
        }
        answers: dict[int, Answer] = {}
        end_s = time.monotonic() + deadline_s
        while pending and (left_s := end_s - time.monotonic()) > 0:
            done, _ = ray.wait(list(pending), num_returns=1, timeout=min(_SLICE_S, left_s))
            if done:
                # What else is there by now: one look for each of thousands of ranks would pass over all the others each time.
                more, _ = ray.wait(list(pending), num_returns=len(pending), timeout=0)
                done = list(dict.fromkeys([*done, *more]))
            for ref in done:
                answer = _answer(pending.pop(ref), ref)
                answers[answer.rank] = answer
                patience = patience_s(answer)
                if patience is not None:
                    end_s = min(end_s, time.monotonic() + patience)
        for rank in pending.values():
            answers[rank] = Answer(rank=rank, silent=True)
        return [answers[rank] for rank in asked]

    def ask_one(self, rank: int, function: Callable[..., Any], *args: Any, deadline_s: float) -> Answer:
        return self.ask(function, [args], deadline_s=deadline_s, ranks=[rank])[0]


def _answer(rank: int, ref: Any) -> Answer:
    try:
        return Answer(rank=rank, ok=True, value=ray.get(ref, timeout=10))
    except RayTaskError as error:
        cause = error.cause if isinstance(error.cause, Exception) else error
        return Answer(rank=rank, raised=cause)
    except RayActorError as error:
        return Answer(rank=rank, died=error, preempted=bool(getattr(error, "preempted", False)))
    except GetTimeoutError:
        return Answer(rank=rank, silent=True)
    except RayError as error:  # the object was lost with its node
        return Answer(rank=rank, died=error, preempted=True)
