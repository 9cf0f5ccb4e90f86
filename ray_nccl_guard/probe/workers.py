"""The workers of a run as whoever leads it asks them: one question to every rank, and by a deadline an answer from each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What one rank answered.

    Attributes:
        value: what the function returned; None unless `ok`.
        raised: the exception that the function raised in the worker.
        died: the worker died; `preempted` if it was taken away rather than that it failed.
        silent: no answer by the deadline.
    """

    rank: int
    ok: bool = False
    value: Any = None
    raised: Exception | None = None
    died: Exception | None = None
    silent: bool = False
    preempted: bool = False


Patience = Callable[[Answer], float | None]
"""Sees each answer as it comes; the seconds it returns bound the wait for those still missing."""


def no_patience(_answer: Answer) -> float | None:
    """Every rank gets the whole deadline."""
    return None


class WorkerGroup(Protocol):
    """One process per rank that runs functions on its main thread: Ray's workers, or processes of our own."""

    def __len__(self) -> int: ...

    def ask(
        self,
        function: Callable[..., Any],
        arguments: Sequence[tuple[Any, ...]] | None = None,
        *,
        deadline_s: float,
        patience_s: Patience = no_patience,
        ranks: Sequence[int] | None = None,
    ) -> list[Answer]:
        """Ask every rank (or `ranks`) at once, and wait at most `deadline_s`; answers in the order of the ranks asked."""
        ...

    def ask_one(self, rank: int, function: Callable[..., Any], *args: Any, deadline_s: float) -> Answer: ...


class WorkerFunctionError(RuntimeError):
    """A function that the guard itself sent to the workers raised there: the guard's own failure."""


def values(answers: Sequence[Answer]) -> list[Any]:
    """The values of answers that must all be there.

    Raises:
        WorkerFunctionError: a rank's function raised.
    """
    for answer in answers:
        if answer.raised is not None:
            raise WorkerFunctionError(f"on rank {answer.rank}: {answer.raised!r}") from answer.raised
    return [answer.value for answer in answers]
