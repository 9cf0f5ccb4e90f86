"""The leading process of ranks without Ray: asks them through the store, and ends them with one exit code."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Sequence
from typing import Any

from ray_nccl_guard.probe import parcel
from ray_nccl_guard.probe.serve import look_s
from ray_nccl_guard.probe.workers import Answer, Patience, no_patience

# Ranks leave within one look at the store; a rank that hangs by then is not waited for.
_LEAVE_S = 3.0


class Leader:
    """A `WorkerGroup` over a store. `why_dead(rank)` says why a process of ours has ended, empty while it lives."""

    def __init__(self, store: Any, world_size: int, why_dead: Callable[[int], str] = lambda rank: "") -> None:
        self._store, self._world_size, self._why_dead = store, world_size, why_dead
        self._asked = dict.fromkeys(range(world_size), 0)

    def __len__(self) -> int:
        return self._world_size

    def absent(self, deadline_s: float, say: Callable[[int], None] = lambda came: None) -> list[int]:
        """Wait for the ranks to join; those that have not by the deadline, or have ended before."""
        end_s = time.monotonic() + deadline_s
        missing, told = list(range(self._world_size)), -1
        while missing and time.monotonic() < end_s:
            missing = [rank for rank in missing if not self._store.check([f"claim/{rank}"])]
            if (came := self._world_size - len(missing)) != told:
                say(came)
                told = came
            if missing and all(self._why_dead(rank) for rank in missing):
                break
            time.sleep(look_s(self._world_size))
        return missing

    def twice(self) -> list[int]:
        """Ranks that two processes claim."""
        return [rank for rank in range(self._world_size) if self._store.add(f"claim/{rank}", 0) > 1]

    def ask(
        self,
        function: Callable[..., Any],
        arguments: Sequence[tuple[Any, ...]] | None = None,
        *,
        deadline_s: float,
        patience_s: Patience = no_patience,
        ranks: Sequence[int] | None = None,
    ) -> list[Answer]:
        asked = list(range(self._world_size)) if ranks is None else list(ranks)
        given = arguments if arguments is not None else [()] * len(asked)
        pending = {}
        for rank, args in zip(asked, given, strict=True):
            pending[rank] = f"answer/{rank}/{self._asked[rank]}"
            self._put(rank, function.__name__, args)
        answers: dict[int, Answer] = {}
        end_s = time.monotonic() + deadline_s
        while pending and time.monotonic() < end_s:
            came = [answer for rank, key in pending.items() if (answer := self._look(rank, key)) is not None]
            for answer in came:
                del pending[answer.rank]
                answers[answer.rank] = answer
                patience = patience_s(answer)
                if patience is not None:
                    end_s = min(end_s, time.monotonic() + patience)
            if not came:
                time.sleep(look_s(self._world_size))
        answers.update((rank, Answer(rank=rank, silent=True)) for rank in pending)
        return [answers[rank] for rank in asked]

    def ask_one(self, rank: int, function: Callable[..., Any], *args: Any, deadline_s: float) -> Answer:
        return self.ask(function, [args], deadline_s=deadline_s, ranks=[rank])[0]

    def end(self, code: int) -> None:
        """Tell every rank the exit code, and keep the store until they have read it."""
        for rank in self._asked:
            self._put(rank, "end", (code,))
        end_s = time.monotonic() + _LEAVE_S
        while self._store.add("left", 0) < self._world_size and time.monotonic() < end_s:
            if all(self._why_dead(rank) for rank in self._asked):
                return
            time.sleep(look_s(self._world_size))

    def _put(self, rank: int, name: str, args: tuple[Any, ...]) -> None:
        self._store.set(f"ask/{rank}/{self._asked[rank]}", parcel.pack((name, args)))
        self._asked[rank] += 1

    def _look(self, rank: int, key: str) -> Answer | None:
        if not self._store.check([key]):
            why = self._why_dead(rank)
            return Answer(rank=rank, died=ChildProcessError(why)) if why else None
        try:
            how, value = parcel.unpack(self._store.get(key))
        except (pickle.UnpicklingError, ValueError, TypeError, EOFError) as error:
            return Answer(rank=rank, raised=RuntimeError(f"an answer that is none: {error}"))
        if how == "ok":
            return Answer(rank=rank, ok=True, value=value)
        return Answer(rank=rank, raised=RuntimeError(str(value)))
