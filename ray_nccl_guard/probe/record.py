"""The record of one rank: what its journal says so far, and the `ProbeResult` it becomes."""

from __future__ import annotations

import os
import time
from typing import Any

from ray_nccl_guard.probe.journal import Event
from ray_nccl_guard.probe.spec import LogLine, Outcome, ProbeResult, RankTask, Step, StepRecord

# Evidence kept per source and rank: with 64 ranks a report stays below 10 MB. NCCL's causes stand near the end of its log.
TAIL_LINES = 200
TAIL_BYTES = 64 << 10
# A line longer than this is cut: nobody reads further, and rules match within it.
LINE_BYTES = 8 << 10


class Record:
    """What one rank did, step by step; `step` is the one it is in."""

    def __init__(self, task: RankTask) -> None:
        self.task = task
        self.step = Step.STORE
        self.step_started_s = time.monotonic()
        self.error = ""
        self._detail = ""
        self._notes: list[str] = []
        self._steps: list[StepRecord] = []
        self._proved: dict[str, None] = {}
        self._all_reduce_s: dict[int, float] = {}
        self._facts: dict[str, Any] = {}

    def begin(self, step: Step, at_s: float | None = None) -> None:
        self.step, self._detail = step, ""
        self.step_started_s = time.monotonic() if at_s is None else at_s

    def ok(self, step: Step, at_s: float | None = None) -> None:
        end_s = time.monotonic() if at_s is None else at_s
        self._steps.append(
            StepRecord(step=step, outcome=Outcome.OK, seconds=end_s - self.step_started_s, detail="; ".join(self._notes))
        )
        self._notes = []

    def note(self, text: str) -> None:
        self._notes.append(text)

    def restart(self) -> None:
        """Forget a forked child's steps: a spawned one begins anew."""
        self._steps = [s for s in self._steps if s.step in (Step.STORE, Step.PEERS)]
        self._notes.append("started anew by spawn")
        self.error, self._detail = "", ""
        self.begin(Step.IMPORT)

    def take(self, event: Event) -> Step | None:
        """Take in one event; returns the step that it finished, if any."""
        step = Step(event.step)
        data = event.data or {}
        if event.event == "start":
            self.begin(step, event.at_s)
        elif event.event == "ok":
            self.ok(step, event.at_s)
            return step
        elif event.event == "doing":
            self._detail = event.detail
        elif event.event == "proved":
            self._proved[event.detail] = None
            if "size_bytes" in data:
                self._all_reduce_s[int(data["size_bytes"])] = float(data["seconds"])
        elif event.event == "priced":
            self._all_reduce_s[int(data["size_bytes"])] = float(data["seconds"])
        elif event.event == "note":
            self._facts.update(data)
        elif event.event in ("failed", "spawn_me"):
            self.error = event.detail
        return None

    def end(self, outcome: Outcome, *, error: str, seconds: float, **fields: Any) -> ProbeResult:
        ended_in = self._steps[-1].step if outcome is Outcome.OK and self._steps else self.step
        steps = list(self._steps)
        if not (steps and steps[-1].step is self.step):
            notes = "; ".join(part for part in (self._detail, *self._notes) if part)
            steps.append(
                StepRecord(step=self.step, outcome=outcome, seconds=time.monotonic() - self.step_started_s, detail=notes)
            )
        return ProbeResult(
            rank=self.task.rank,
            outcome=outcome,
            step=ended_in,
            detail=self._detail,
            error=error,
            steps=tuple(steps),
            proved=tuple(self._proved),
            all_reduce_s=dict(self._all_reduce_s),
            device=str(self._facts.get("device", "cpu")),
            free_before_bytes=self._facts.get("free_before_bytes"),
            free_after_bytes=self._facts.get("free_after_bytes"),
            seconds=seconds,
            **fields,
        )


def tail(fd: int, source: str) -> tuple[LogLine, ...]:
    """The last lines of a private log, with their numbers where the whole of it was read."""
    size = os.fstat(fd).st_size
    offset = max(0, size - TAIL_BYTES)
    text = os.pread(fd, TAIL_BYTES, offset).decode("utf-8", "replace")
    lines = text.splitlines()
    first = 1
    if offset:
        lines = lines[1:]  # the first one is cut
        first = _count_lines(fd, offset) + 2
    skipped = max(0, len(lines) - TAIL_LINES)
    return tuple(
        LogLine(source=source, number=first + number, text=line[:LINE_BYTES])
        for number, line in enumerate(lines)
        if number >= skipped
    )


def _count_lines(fd: int, end: int) -> int:
    count, offset = 0, 0
    while offset < end:
        chunk = os.pread(fd, min(1 << 20, end - offset), offset)
        if not chunk:
            break
        count += chunk.count(b"\n")
        offset += len(chunk)
    return count
