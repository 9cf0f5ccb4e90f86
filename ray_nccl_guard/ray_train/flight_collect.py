"""When a worker group ends badly: its dumps and stacks are kept with the run, and the culprit is named once, before Ray ends it."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Container, Mapping, Sequence
from functools import partial
from typing import Any

from ray_nccl_guard.facts import RankFacts
from ray_nccl_guard.flight import Kind
from ray_nccl_guard.ray_train import flight_live, publish, recorder, storage
from ray_nccl_guard.ray_train.flight_ends import ends, of_a_collective
from ray_nccl_guard.ray_train.flight_gather import gather
from ray_nccl_guard.ray_train.flight_judge import Collected, Unpacked, judge
from ray_nccl_guard.ray_train.recorder import Armed
from ray_nccl_guard.ray_train.run_folder import run_folder
from ray_nccl_guard.ray_train.workers import Workers
from ray_nccl_guard.report import Report

_ARM_S = 15.0  # some variables and a folder; a worker that needs longer is found by the training group
_REMOVE_S = 5.0
_REMOVE_PATIENCE_S = 1.0  # an empty folder is gone at once; whoever needs longer hangs
# 1,024 ranks leave about 400 MB, two files each; a bucket takes some hundred small files a second.
_STORE_S = 60.0


class FlightWatch:
    """Watches one worker group, from before its process group is made until it is shut down."""

    def __init__(self, workers: Workers, facts: Sequence[RankFacts], report: Report, start: int) -> None:
        self.workers, self.facts, self.report, self.start = workers, facts, report, start
        self.name = uuid.uuid4().hex[:12]
        self.armed: tuple[Armed, ...] = ()
        self._live_key = ""

    def arm(self, *, change_settings: bool = True) -> None:
        """Switch the recorder on in every worker. A worker that does not answer here goes without."""
        name = self.name if change_settings else None
        asked = [(fact.rank, fact.node, name) for fact in self.facts]
        answers = self.workers.ask(recorder.arm, asked, deadline_s=_ARM_S)
        self.armed = tuple(answer.value for answer in answers if answer.ok)
        for answer in answers:
            if answer.raised is not None:
                publish.log.warning("nccl_guard: no flight recorder on rank %d: %r", answer.rank, answer.raised)

    def go_live(self) -> None:
        """The group stands: make its folders, and let `ray-nccl-guard flight --run` find the workers while they run."""
        able = [armed for armed in self.armed if armed.folder]
        answers = self.workers.ask(
            recorder.make_room, [(armed,) for armed in able], deadline_s=_ARM_S, ranks=[armed.rank for armed in able]
        )
        there = {answer.rank: answer.value for answer in answers if answer.ok}
        self.armed = tuple(there.get(armed.rank, armed) for armed in self.armed)
        self._live_key = flight_live.announce(self.workers.group, self.armed, self.report.run_name, self.name)

    def end(self, status: Any) -> None:
        """The worker group is about to be shut down. `status` is Ray's latest poll of it, None if there is none."""
        flight_live.withdraw(self._live_key)
        if ended_badly(status, self.workers.group):
            collected = self._collect(getattr(status, "worker_statuses", {}))
            self._publish(collected)
            self.clean_up(collected.gathered.answered)
        else:
            self.clean_up()

    def _collect(self, statuses: Mapping[int, Any]) -> Collected:
        gathered = gather(self.workers, self.armed, at_end=True)
        return judge(gathered, ends(len(self.workers), gathered, statuses), len(self.workers))

    def _publish(self, collected: Collected) -> None:
        place = run_folder(self.workers.group)
        folder = ""
        if place is not None:
            folder = f"{place[1]}/{publish.FOLDER}/flight/{self.start}"
            problem = _store(place[0], folder, collected)
            if problem:
                publish.log.warning("nccl_guard: the dumps could not be written to %s: %s", folder, problem)
                folder = ""
        found = collected.to_json() | {"folder": folder, "group_attempt": self.start}
        self.report = publish.write(self.report.with_changes(flight=found), self.workers, collected.verdict)
        if collected.verdict.kind is Kind.NONE:
            publish.log.info("nccl_guard: %s; dumps and stacks: %s", collected.verdict.summary, folder or "not stored")
            return
        tail = f"dumps and stacks: {folder}\n" if folder else ""
        publish.log.warning(
            "nccl_guard: %s%s",
            collected.text(),
            tail,
            extra={
                "nccl_guard_run": self.report.run_name,
                "nccl_guard_flight_kind": collected.verdict.kind.value,
                "nccl_guard_failure": collected.failure.value,
                "nccl_guard_culprit_ranks": list(collected.verdict.culprit_ranks),
            },
        )

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


def ended_badly(status: Any, group: Any) -> bool:
    """Whether somebody may have been left waiting.

    Not if all ended well, nor if every rank raised for a reason of its own (a bug that all ranks meet), nor if Ray took the
    nodes away. Ray's NCCL RAS callback confirms a hang by an error that Ray's poll status does not show.
    """
    errors = getattr(status, "errors", {})
    if not errors:
        return _ras_confirmed_a_hang(group)
    if getattr(status, "has_preempted_worker", lambda: False)():
        return False
    everyone = len(errors) == len(status.worker_statuses)
    return not (everyone and all(_is_own(error) for error in errors.values()))


def _is_own(error: BaseException) -> bool:
    """Raised by the program in `train_func`; Ray's own errors say that a worker died or does not answer."""
    return not of_a_collective(error) and not type(error).__name__.startswith(("WorkerHealthCheck", "RayActor", "ActorDied"))


def _ras_confirmed_a_hang(group: Any) -> bool:
    for callback in getattr(group, "_callbacks", ()):
        if type(callback).__name__ == "NCCLRASCallback":
            frozen = getattr(callback, "comm_deadlock_count", {})
            enough = getattr(callback, "_confirm_poll_counts", float("inf"))
            return any(count >= enough for count in frozen.values())
    return False


def _store(filesystem: Any, folder: str, collected: Collected) -> str:
    """Dumps as torch writes them, so that any analyser can read them, stacks and the verdict; returns why that did not go."""
    of = collected.gathered.of
    stacks = {f"rank_{rank}.txt": text.encode() for rank in collected.ends if (text := of(rank).stacks)}
    parts: dict[str, Callable[[], Mapping[str, bytes]]] = {
        recorder: partial(Unpacked, packed) for recorder, packed in collected.kept().items()
    }
    parts |= {"stacks": lambda: stacks, "verdict": lambda: {"verdict.txt": collected.text().encode()}}
    for name, make in parts.items():
        if problem := storage.write(filesystem, f"{folder}/{name}", make, within_s=_STORE_S):
            return problem
    return ""
