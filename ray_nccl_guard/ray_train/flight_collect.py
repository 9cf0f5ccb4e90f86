"""Watches a worker group: when it ends badly or hangs, its dumps and stacks are kept with the run, and the culprit is named once."""

from __future__ import annotations

import time
import uuid
from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ray_nccl_guard.facts import RankFacts
from ray_nccl_guard.flight import Kind
from ray_nccl_guard.ray_train import flight_live, flight_publish, flight_v1, publish, recorder
from ray_nccl_guard.ray_train.flight_about import about
from ray_nccl_guard.ray_train.flight_ends import ended_badly, ends, ras_confirmed_a_hang
from ray_nccl_guard.ray_train.flight_gather import Deadlines, gather
from ray_nccl_guard.ray_train.flight_judge import Collected, judge, moved
from ray_nccl_guard.ray_train.recorder import Armed
from ray_nccl_guard.ray_train.workers import Workers, is_v2
from ray_nccl_guard.report import Report

_ROOM_S = 15.0  # a folder; a worker that needs longer goes without
_REMOVE_S = 5.0
_REMOVE_PATIENCE_S = 1.0  # an empty folder is gone at once; whoever needs longer hangs
# Who presses Ctrl-C waits for this: long enough for ranks that train to make a call, short enough to be waited for.
_MOVES_S = 2.0
_AT_THE_END = Deadlines()
_INTERRUPTED = Deadlines(first_s=10.0, patience_s=5.0, nodes_s=15.0)
# On V1 a worker's process serves nothing else while its train_func runs: whoever is still in it will not answer.
_V1 = Deadlines(first_s=30.0, patience_s=5.0)
_RAS_SAID = "Ray's NCCL RAS callback has confirmed that a communicator stands still"


class FlightWatch:
    """Watches one worker group, from before its process group is made until it is shut down."""

    def __init__(self, workers: Workers, facts: Sequence[RankFacts], report: Report, start: int) -> None:
        self.workers, self.facts, self.report, self.start = workers, tuple(facts), report, start
        self.name = uuid.uuid4().hex[:12]
        self.armed: tuple[Armed, ...] = ()
        self._live_key = ""
        self._ended: Collected | None = None  # what was collected of its errors, once they were seen
        self._told_of_ras = False
        self._over = False

    def go_live(self) -> None:
        """The group stands: make its folders, and let `ray-nccl-guard flight --run` find the workers while they run."""
        able = [armed for armed in self.armed if armed.folder]
        answers = self.workers.ask(
            recorder.make_room, [(armed,) for armed in able], deadline_s=_ROOM_S, ranks=[armed.rank for armed in able]
        )
        there = {answer.rank: answer.value for answer in answers if answer.ok}
        self.armed = tuple(there.get(armed.rank, armed) for armed in self.armed)
        known = about(self.report, self.start)
        self._live_key = flight_live.announce(self.workers.group, self.armed, self.report.run_name, self.name, known)
        self.attend()

    def attend(self) -> None:
        """Be told of errors as Ray polls them, of a hang that NCCL's RAS confirms, and of Ctrl-C, where Ray can tell."""
        if is_v2(self.workers.group):
            try:
                from ray_nccl_guard.ray_train.flight_callback import attach  # it needs V2's own classes
            except ImportError:
                return  # of a Ray to come; `end` collects all the same
            attach(self.workers.group, self)
        else:
            flight_v1.attach(self.workers.group, self)

    def look(self, status: Any) -> str:
        """Ray has polled the workers, every second or so; returns what their errors are to end in."""
        group = self.workers.group
        if not getattr(status, "errors", {}):
            confirmed = ras_confirmed_a_hang(group)
            if confirmed and not self._told_of_ras:
                self._send(self._collect({}, at_end=False))
            self._told_of_ras = confirmed
            return ""
        if self._ended is None:
            if not ended_badly(status, group):
                return ""
            self._ended = self._collect(status.worker_statuses)
            self._send(self._ended)
        return flight_publish.brief(self._ended, self.report)

    def interrupt(self) -> None:
        """Ctrl-C: Ray ends the workers without a word to its backends. What hangs is named, what moves is left in peace."""
        flight_live.withdraw(self._live_key)
        if self._ended is not None:
            self.clean_up(self._ended.gathered.answered)
            return
        publish.log.info(
            "nccl_guard: Ctrl-C: asking the ranks where they are, for a few seconds (%.0f at most)",
            2 * _INTERRUPTED.first_s + _INTERRUPTED.nodes_s + _MOVES_S,
        )
        before = gather(self.workers, self.armed, at_end=False, within=replace(_INTERRUPTED, nodes_s=0.0))
        time.sleep(_MOVES_S)
        collected = self._collect({}, within=_INTERRUPTED)
        verdict = collected.verdict
        if verdict.kind is not Kind.NONE and not moved(judge(before, {}, len(self.workers)), collected):
            against = f"Ctrl-C came first: what was seen is that no rank made a call in {_MOVES_S:g} s"
            self._send(replace(collected, verdict=replace(verdict, against=(*verdict.against, against))))
        self.clean_up(collected.gathered.answered)

    def end(self, status: Any) -> None:
        """The worker group is about to be shut down. `status` is Ray's latest poll of it, None if there is none."""
        if self._over:
            return
        self._over = True
        flight_live.withdraw(self._live_key)
        if self._ended is None and not self._told_of_ras and ended_badly(status, self.workers.group):
            within = _AT_THE_END if is_v2(self.workers.group) else _V1
            self._ended = self._collect(getattr(status, "worker_statuses", {}), within=within)
            self._send(self._ended)
        self.clean_up(None if self._ended is None else self._ended.gathered.answered)

    def _collect(self, statuses: Mapping[int, Any], *, at_end: bool = True, within: Deadlines = _AT_THE_END) -> Collected:
        gathered = gather(self.workers, self.armed, at_end=at_end, within=within)
        collected = judge(gathered, ends(len(self.workers), gathered, statuses), len(self.workers))
        if collected.verdict.kind is not Kind.NONE and ras_confirmed_a_hang(self.workers.group):
            verdict = replace(collected.verdict, because=(*collected.verdict.because, _RAS_SAID))
            collected = replace(collected, verdict=verdict)
        return collected

    def _send(self, collected: Collected) -> None:
        self.report = flight_publish.send(collected, self.report, self.workers, self.start)

    def clean_up(self, answering: Container[int] | None = None) -> None:
        """Remove the folder on every node. Every rank that may answer is asked, since nobody knows which of a node still do."""
        able = [armed for armed in self.armed if armed.folder and (answering is None or armed.rank in answering)]
        self.workers.ask(
            recorder.remove,
            [(armed.folder,) for armed in able],
            deadline_s=_REMOVE_S,
            patience_s=lambda answer: _REMOVE_PATIENCE_S if answer.ok else None,
            ranks=[armed.rank for armed in able],
        )
