"""A verdict on a worker group goes out: dumps, stacks and record sheet beside the report, the message once, a few lines for errors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from ray_nccl_guard.flight import Kind
from ray_nccl_guard.flight.render import clean
from ray_nccl_guard.flight.sheet import sheet
from ray_nccl_guard.ray_train import publish, storage
from ray_nccl_guard.ray_train.flight_about import about
from ray_nccl_guard.ray_train.flight_judge import Collected, Unpacked
from ray_nccl_guard.ray_train.run_folder import run_folder
from ray_nccl_guard.ray_train.workers import Workers
from ray_nccl_guard.report import Report

# 1,024 ranks leave about 400 MB, two files each; a bucket takes some hundred small files a second.
_STORE_S = 60.0
# Ray cuts an error of a thousand characters or more to its first and last 500 (2.60, execution/worker_group/poll.py), and
# the exception's own last line is to stay among them.
_BRIEF = 340
_SUMMARY = 170
_PLACE = 60


def send(collected: Collected, report: Report, workers: Workers, start: int) -> Report:
    """Store what was collected and say it; returns the report that has it."""
    place = run_folder(workers.group)
    text = sheet(collected.verdict, about(report, start, collected.ends))
    folder = ""
    if place is not None:
        folder = f"{place[1]}/{publish.FOLDER}/flight/{start}"
        problem = _store(place[0], folder, collected, text)
        if problem:
            publish.log.warning("nccl_guard: the dumps could not be written to %s: %s", folder, problem)
            folder = ""
    found = collected.to_json() | {"folder": folder, "group_attempt": start, "sheet": text}
    report = publish.write(report.with_changes(flight=found), workers)
    if collected.verdict.kind is Kind.NONE:
        publish.log.info("nccl_guard: %s; dumps and stacks: %s", collected.verdict.summary, folder or "not stored")
        return report
    tail = f"dumps and stacks: {folder}\n" if folder else ""
    publish.log.warning(
        "nccl_guard: %s%s",
        collected.text(),
        tail,
        extra={
            "nccl_guard_run": report.run_name,
            "nccl_guard_flight_kind": collected.verdict.kind.value,
            "nccl_guard_failure": collected.failure.value,
            "nccl_guard_culprit_ranks": list(collected.verdict.culprit_ranks),
        },
    )
    return report


def _store(filesystem: Any, folder: str, collected: Collected, text: str) -> str:
    """Dumps as torch writes them, so that any analyser can read them, stacks and the verdict; returns why that did not go."""
    of = collected.gathered.of
    stacks = {f"rank_{rank}.txt": words.encode() for rank in collected.ends if (words := of(rank).stacks)}
    verdict = {"verdict.txt": collected.text().encode(), "sheet.txt": text.encode()}
    parts: dict[str, Callable[[], Mapping[str, bytes]]] = {
        recorder: partial(Unpacked, packed) for recorder, packed in collected.kept().items()
    }
    parts |= {"stacks": lambda: stacks, "verdict": lambda: verdict}
    for name, make in parts.items():
        if problem := storage.write(filesystem, f"{folder}/{name}", make, within_s=_STORE_S):
            return problem
    return ""


def brief(collected: Collected, report: Report) -> str:
    """What a worker's error ends in: the verdict, the culprit's line, the report. Empty if no rank is out of step.

    Nothing in it differs between ranks, since Ray shows equal errors once.
    """
    verdict = collected.verdict
    if verdict.kind is Kind.NONE:
        return ""
    lines = [_head(f"nccl_guard: {verdict.kind.value}: {verdict.summary}", _SUMMARY)]
    for rank in verdict.culprit_ranks[:1]:
        place = collected.ends[rank].place if rank in collected.ends else ""
        lines += [f"  rank {rank} is at {_tail(place, _PLACE)}"] if place else []
    left = _BRIEF - len("\n".join([*lines, "  report: "]))
    lines += [f"  report: {_tail(report.path, left)}"] if report.path else []
    return "\n".join(lines)


def _head(words: str, most: int) -> str:
    words = clean(words)
    return words if len(words) <= most else words[: most - 3] + "..."


def _tail(words: str, most: int) -> str:
    """Of a path the end tells more."""
    words = clean(words)
    return words if len(words) <= most else "..." + words[3 - most :]
