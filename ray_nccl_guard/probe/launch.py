"""The launcher: runs in the worker, keeps one disposable child under its deadlines, and turns its end into a `ProbeResult`."""

from __future__ import annotations

import os
import time
from dataclasses import replace

from ray_nccl_guard.probe import act, kernel, memory, nccl_timings, process
from ray_nccl_guard.probe.child import EXIT_OK, EXIT_SPAWN_ME
from ray_nccl_guard.probe.journal import JournalReader, anonymous_file, say_go, silent_s
from ray_nccl_guard.probe.record import Record, tail
from ray_nccl_guard.probe.spec import Outcome, ProbeResult, RankTask, Start, Step
from ray_nccl_guard.probe.store import Link, arrive
from ray_nccl_guard.probe.sweep import Sweep

# Once one rank has failed, the others have this long to fail by themselves: their own words are evidence (DESIGN D3).
GRACE_S = 2.0
# A child whose journal or NCCL log grew within this time before its deadline is slow, not silent: the deadline doubles, once.
PROGRESS_S = 5.0
# How long a silent child's launcher listens, at its deadline, for a rank whose child is not silent: their clocks differ by
# milliseconds, and a look into the store may wait for rank 0's busy worker.
_HEAR_S = 1.0

# A killed child is nearly always reaped within milliseconds; the launcher answers after this, so that its silence means
# something, and `settle` waits for the rest.
_REAP_FIRST_S = 1.0
SETTLE_S = process.REAP_S

# Between two looks at a child: a healthy one takes 0.1 s in all, and goes from step to step in bursts; a silent one costs
# its worker nothing.
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.002, 0.01

_unreaped: list[process.Child] = []

_BEFORE_NCCL = (Step.IMPORT, Step.DEVICE)


def run_rank(task: RankTask) -> ProbeResult:
    """Prove one rank: meet the others at the store, then run the child. Call it on the worker's main thread."""
    started_s = time.monotonic()
    link = Link(task)
    record = Record(task)
    record.begin(Step.STORE)
    if task.drill and (missing := act.at_store(task)) is not None:
        return record.end(missing, error="it did not come to the store (drill)", seconds=time.monotonic() - started_s)
    try:
        absent = arrive(link.connect(task.deadline_s(Step.STORE)), task, task.deadline_s(Step.STORE))
    except RuntimeError as error:  # torch's DistError family: no way to the store
        return record.end(Outcome.FAILED, error=f"{type(error).__name__}: {error}", seconds=time.monotonic() - started_s)
    if absent:
        names = ", ".join(map(str, absent))
        return record.end(
            Outcome.FAILED,
            error=f"missing rank: {names} of {task.world_size} did not come to the store",
            seconds=time.monotonic() - started_s,
        )
    record.ok(Step.STORE)
    try:
        result = _Watch(task, link, record, started_s + task.within_s).run()
        if result.outcome is not Outcome.OK and result.outcome is not Outcome.WAITING:
            link.failed()
    finally:
        link.close()
    return replace(result, seconds=time.monotonic() - started_s)


def settle(gpu_uuid: str, free_before_bytes: int | None) -> tuple[bool, str]:
    """After a child that failed: wait until it is reaped and its GPU memory is back.

    Returns whether a killed child still stands (it sits in the GPU driver), and what is worth a note.
    """
    _unreaped[:] = [child for child in _unreaped if not child.kill(within_s=SETTLE_S)]
    if _unreaped:
        return True, ""
    if gpu_uuid and free_before_bytes and memory.wait_until_back(gpu_uuid, free_before_bytes) is False:
        return False, f"GPU {gpu_uuid} had not got back the memory of the probe's process after {memory.BACK_S:g} s"
    return False, ""


class _Watch:
    """One child under its deadlines; none goes on after `ends_s`, on this process's clock."""

    def __init__(self, task: RankTask, link: Link, record: Record, ends_s: float) -> None:
        self.task, self.link, self.record, self.ends_s = task, link, record, ends_s
        self.fds = tuple(anonymous_file(f"nccl-guard-{name}") for name in ("journal", "pulse", "output", "nccl"))
        self.kernel = kernel.Watermark()
        self.extended: set[Step] = set()
        self.grown_at_s = time.monotonic()
        self._seen_bytes = 0

    def run(self) -> ProbeResult:
        how = Start.SPAWN if self.task.spec.start is Start.SPAWN else Start.FORK
        try:
            result = self._run_child(how)
            if how is Start.FORK and self._needs_spawn(result):
                # Whatever a fork meets before NCCL may be the fork's own trouble: only what a fresh process confirms is
                # a verdict (DESIGN D3).
                for fd in self.fds:
                    os.ftruncate(fd, 0)
                self.record.restart()
                forked, result = result, self._run_child(Start.SPAWN)
                if _unconfirmed(forked, result):
                    note = "seen in a forked process; a fresh one had not come that far when another rank failed"
                    return replace(forked, detail="; ".join(filter(None, (forked.detail, note))))
            return result
        finally:
            self.kernel.close()
            for fd in self.fds:
                os.close(fd)

    def _needs_spawn(self, result: ProbeResult) -> bool:
        if self.task.spec.start is not Start.AUTO or result.stuck or time.monotonic() > self.ends_s:
            return False
        refusal = self.task.device_index is None and result.step is Step.DEVICE
        return result.exit_code == EXIT_SPAWN_ME or (
            result.outcome in (Outcome.FAILED, Outcome.DIED, Outcome.TIMED_OUT)
            and result.step in _BEFORE_NCCL
            and not refusal  # the facts have already established that there is no GPU; this child only quotes torch
        )

    def _run_child(self, how: Start) -> ProbeResult:
        env = {"NCCL_DEBUG": os.environ.get("NCCL_DEBUG", "INFO"), **self.task.env}
        if env["NCCL_DEBUG"].upper() in ("", "VERSION", "WARN"):
            env["NCCL_DEBUG"] = "INFO"  # how far NCCL got is the best witness of a hang; the log is private to the child
        self.reader = JournalReader(self.fds[0])
        child = process.start(self.task, how, self.fds, env)
        if self.link._thread is None:
            self.link.start()
            self.link.done(Step.STORE)
            self.link.done(Step.PEERS)
        sweep = Sweep(child.pid)
        try:
            outcome, reason = self._wait(child, sweep)
            return self._conclude(child, outcome, reason)
        finally:
            sweep.end()

    def _wait(self, child: process.Child, sweep: Sweep) -> tuple[Outcome | None, str]:
        """Until the child ends (None), or has to be ended: the outcome to report and why."""
        pause_s = _SHORTEST_PAUSE_S
        while True:
            ended = child.reaped()
            if self._take_in():
                pause_s = _SHORTEST_PAUSE_S
            if ended:
                return None, ""
            if Step.DEVICE in self.link.all_done:
                say_go(self.fds[1])
            now_s = time.monotonic()
            failed_at_s = self.link.failed_elsewhere_at_s
            if failed_at_s is not None and now_s > failed_at_s + GRACE_S:
                return Outcome.WAITING, "ended because another rank had failed"
            if now_s > self.ends_s:
                left = f"{self.task.within_s:.1f} s that Policy.budget_s had left"
                return Outcome.TIMED_OUT, f"no end within the {left}"
            sweep.look(now_s)
            overdue_s = now_s - self._deadline(child, now_s)
            if overdue_s > 0 and not self._extend(now_s) and not self._may_hear_more(overdue_s):
                lost = f"; the probe's store was lost before that ({self.link.broken})" if self.link.broken else ""
                return Outcome.TIMED_OUT, f"no end after {self._allowed_s(self.record.step):g} s{lost}"
            self.link.news.wait(pause_s)  # what the others have done may be what the child waits for
            self.link.news.clear()
            pause_s = min(_LONGEST_PAUSE_S, pause_s * 1.3)

    def _take_in(self) -> bool:
        """Read what the child has written since; whether there was anything."""
        heard_s = self.grown_at_s
        for event in self.reader.new_events():
            self.grown_at_s = event.at_s
            finished = self.record.take(event)
            if finished is not None:
                self.link.done(finished)
        size = os.fstat(self.fds[3]).st_size + os.fstat(self.fds[2]).st_size
        if size != self._seen_bytes:
            self._seen_bytes, self.grown_at_s = size, time.monotonic()
        return self.grown_at_s != heard_s

    def _allowed_s(self, step: Step) -> float:
        return self.task.deadline_s(step) * (2 if step in self.extended else 1)

    def _deadline(self, child: process.Child, now_s: float) -> float:
        """When the current step is overdue. Its clock starts when the last rank has finished the step before, so that one
        slow rank is never a missing rank to the others; it is bounded all the same."""
        step = self.record.step
        before = list(Step)[max(0, step.position - 1)]
        others_ready_s = self.link.all_done.get(before)
        if others_ready_s is None and self.task.world_size > 1 and step not in _BEFORE_NCCL and not self.link.broken:
            return child.started_s + 2 * sum(self.task.deadline_s(s) for s in Step)
        return max(self.record.step_started_s, others_ready_s or 0.0) + self._allowed_s(step)

    def _extend(self, now_s: float) -> bool:
        """Double the deadline of the communicator, once, if this child or the one that it waits for is slow, not silent."""
        step = self.record.step
        if step in self.extended or step is not Step.COMM_INIT:
            return False
        own = now_s - self.grown_at_s <= PROGRESS_S
        if not own and not self.link.still_going:
            return False
        self.extended.add(step)
        if own:
            self.link.going()
        whose = "its" if own else "another rank's"
        self.record.note(f"deadline doubled to {self._allowed_s(step):g} s: {whose} log still grew")
        return True

    def _may_hear_more(self, overdue_s: float) -> bool:
        step = self.record.step
        alone = self.task.world_size == 1 or step in self.extended or step is not Step.COMM_INIT
        return not alone and overdue_s < _HEAR_S

    def _conclude(self, child: process.Child, outcome: Outcome | None, reason: str) -> ProbeResult:
        now_s = time.monotonic()
        quiet_s, state, stuck = 0.0, "", False
        # A look through all of /proc: 10 ms and more, which a backend without such files need not pay.
        shares = "nccl" in self.task.backend and self.task.drill is None
        shared = process.shared_memory_of(child.pid) if shares else set()
        step = self.record.step
        if outcome is None:
            child.kill(within_s=0.0)  # what the child itself may have started shares its session
            self._take_in()
        else:
            # From here on the child's journal is not read any more: a signal may wake what was stuck, and what it does in
            # its last moments is no proof of anything.
            quiet_s, state = silent_s(self.fds[1], now_s), process.state_of(child.pid)
            child.ask_stack()
            shared |= process.shared_memory_of(child.pid) if shares else set()
            stuck = not child.kill(within_s=_REAP_FIRST_S)
            if stuck:
                _unreaped.append(child)
        process.unlink(shared)
        code, signal = _exit_of(child)
        if outcome is None:
            outcome = Outcome.OK if code == EXIT_OK else Outcome.DIED if signal is not None else Outcome.FAILED
        if outcome in (Outcome.TIMED_OUT, Outcome.DIED, Outcome.FAILED) and step is Step.TEARDOWN:
            # Everything the job needs has been proved; how a disposable child takes its leave refuses nobody.
            self.record.note(
                f"its farewell ended {outcome.value}: {self.record.error or reason or f'signal {signal}'}"[:500]
            )
            self.record.error = ""
            outcome = Outcome.OK
        return self.record.end(
            outcome,
            error=self.record.error or (reason if outcome is not Outcome.OK else ""),
            seconds=now_s - child.started_s,
            exit_code=code,
            signal=signal,
            killed_by_guard=bool(reason),
            lines=tail(self.fds[2], "output") + tail(self.fds[3], "nccl"),
            nccl_s=nccl_timings.read(self.fds[3], self.task.world_size),
            silent_s=quiet_s,
            process_state=state,
            stuck=stuck,
            kernel_lines=self.kernel.since() if outcome is Outcome.DIED else (),
            start=child.start,
        )


def _unconfirmed(forked: ProbeResult, fresh: ProbeResult) -> bool:
    """Whether a fresh process was cut short before the step that failed in the fork, so that only the fork has seen it.

    A fault of every rank is often confirmed by one rank seconds before the next: the others must not look like bystanders.
    """
    seen = forked.outcome in (Outcome.FAILED, Outcome.DIED) and forked.exit_code != EXIT_SPAWN_ME
    if not (seen and fresh.outcome is Outcome.WAITING and forked.step and fresh.step):
        return False
    return fresh.step.position <= forked.step.position


def _exit_of(child: process.Child) -> tuple[int | None, int | None]:
    if child.status is None:
        return None, None
    code = os.waitstatus_to_exitcode(child.status)
    return (code, None) if code >= 0 else (None, -code)
