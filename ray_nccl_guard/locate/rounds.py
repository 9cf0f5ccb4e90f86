"""Rounds of small worlds: asks only what cannot be inferred, packs questions of independent searches into one round."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from ray_nccl_guard.locate.result import Group, RunRound, Trial

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A world to run. `again` asks although the answer is known, to see whether the fault is steady."""

    group: Group
    again: bool = False


Search = Generator[Sequence[Question], Sequence[bool], T]
"""A search: yields the worlds it wants to know about, is sent whether each failed, returns what it found."""


class BudgetOver(Exception):
    """No time or no rounds left, or a world could not be run."""


@dataclass(slots=True)
class Rounds:
    """Runs searches against the oracle within a budget, and remembers.

    A world inside one that passed is taken to pass, and one around a world that failed to fail. `again` checks that.
    """

    run_round: RunRound
    end_s: float
    max_rounds: int
    rounds: int = 0
    probes: int = 0
    log: list[tuple[Group, bool]] = field(default_factory=list)
    passed: list[frozenset[int]] = field(default_factory=list)
    failed: list[frozenset[int]] = field(default_factory=list)

    def known(self, group: Group) -> bool | None:
        """True if it is known to fail, False if known to pass."""
        members = frozenset(group)
        if any(members <= other for other in self.passed):
            return False
        if any(other <= members for other in self.failed):
            return True
        return None

    def drive(self, search: Search[T]) -> T:
        """Run one search to its end.

        Raises:
            BudgetOver: the budget ended first.
        """
        try:
            questions = next(search)
            while True:
                questions = search.send(self._answers(questions))
        except StopIteration as stop:
            result: T = stop.value
            return result

    def _answers(self, questions: Sequence[Question]) -> list[bool]:
        answers: dict[int, bool] = {}
        waiting = list(enumerate(questions))
        while waiting:
            busy: set[int] = set()
            batch, later = [], []
            for index, question in waiting:
                known = None if question.again else self.known(question.group)
                if known is not None:
                    answers[index] = known
                elif busy.isdisjoint(question.group):
                    busy |= set(question.group)
                    batch.append((index, question.group))
                else:
                    later.append((index, question))
            if batch:
                answers.update(zip((index for index, _ in batch), self._run([g for _, g in batch]), strict=True))
            waiting = later
        return [answers[index] for index in range(len(questions))]

    def _run(self, groups: Sequence[Group]) -> list[bool]:
        if self.rounds >= self.max_rounds or time.monotonic() >= self.end_s:
            raise BudgetOver
        trials = list(self.run_round(groups))
        self.rounds += 1
        self.probes += len(groups)
        for group, trial in zip(groups, trials, strict=True):
            if trial is not Trial.NOT_RUN:
                self.log.append((group, trial is Trial.FAILED))
                (self.failed if trial is Trial.FAILED else self.passed).append(frozenset(group))
        if Trial.NOT_RUN in trials:
            raise BudgetOver
        return [trial is Trial.FAILED for trial in trials]


def ask(groups: Iterable[Group], *, again: bool = False) -> Search[list[bool]]:
    """Whether each of these worlds fails. A world of one that is not asked by itself is taken to pass."""
    answers = yield [Question(group=group, again=again) for group in groups]
    return list(answers)


def together(searches: Sequence[Search[T]]) -> Search[list[T]]:
    """Several searches side by side: their questions share rounds wherever their ranks do not collide."""
    results: dict[int, T] = {}
    wanted: dict[int, Sequence[Question]] = {}
    for index, search in enumerate(searches):
        _advance(search, None, index, wanted, results)
    while wanted:
        turn = dict(wanted)
        answers = yield [question for questions in turn.values() for question in questions]
        given = iter(answers)
        for index, questions in turn.items():
            _advance(searches[index], [next(given) for _ in questions], index, wanted, results)
    return [results[index] for index in range(len(searches))]


def _advance(
    search: Search[T], answers: Sequence[bool] | None, index: int, wanted: dict[int, Sequence[Question]],
    results: dict[int, T],
) -> None:  # fmt: skip
    try:
        wanted[index] = next(search) if answers is None else search.send(answers)
    except StopIteration as stop:
        wanted.pop(index, None)
        results[index] = stop.value
