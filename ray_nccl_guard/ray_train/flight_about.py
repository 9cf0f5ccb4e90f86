"""What a run knows of itself, for the record sheet of a hang: its name and hosts, versions, each rank's device, earlier errors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ray_nccl_guard.classes import FailureClass
from ray_nccl_guard.facts import RankFacts
from ray_nccl_guard.flight.sheet import About
from ray_nccl_guard.flight.words import ranks as named
from ray_nccl_guard.ray_train.flight_ends import End, How
from ray_nccl_guard.report import Report


def about(report: Report, start: int, ended: Mapping[int, End] | None = None) -> About:
    """`start` counts the run's worker groups from 1. `ended` is how its ranks ended, where they have."""
    facts = report.facts
    run = f"run {report.run_name or 'without a name'}, worker group {start}"
    run += f", trains on {report.decision.backend}" if report.decision.backend else ""
    return About(
        identifiers=(run, f"report {report.path or 'not written'}", *_shared("host", {f.rank: f.host for f in facts})),
        versions=tuple(_versions(facts)),
        devices=tuple(_device(fact) for fact in facts),
        earlier=(*_attempts(report), *ended_words(ended or {})),
    )


def _versions(facts: tuple[RankFacts, ...]) -> Iterator[str]:
    for name, values in (
        ("torch", {f.rank: f.torch_version for f in facts}),
        ("libnccl", {f.rank: f.libnccl.get("version", "") for f in facts}),
        ("driver", {f.rank: f.driver_version for f in facts}),
        ("Python", {f.rank: f.python_version for f in facts}),
    ):
        yield from _shared(name, values)


def _shared(name: str, values: Mapping[int, str]) -> Iterator[str]:
    """`torch 2.15.0 (ranks 0-7)`: one line for each value that is known."""
    same: dict[str, list[int]] = {}
    for rank, value in values.items():
        if value:
            same.setdefault(value, []).append(rank)
    for value, sharing in same.items():
        yield f"{name} {value} ({named(sharing)})"


def _device(fact: RankFacts) -> str:
    if fact.gpu is not None:
        device = f"{fact.gpu.name or 'GPU'} {fact.gpu.uuid}"
    elif fact.device_index is not None:
        device = f"GPU {', '.join(fact.gpu_ids) or fact.device_index}, its name is not known"
    else:
        device = "no GPU"
    return f"rank {fact.rank}: {device}, pid {fact.pid} on {fact.host or 'an unknown host'}"


def _attempts(report: Report) -> Iterator[str]:
    for attempt in report.attempts:
        if attempt.verdict.failure is not FailureClass.OK:
            failure, summary = attempt.verdict.failure.value, attempt.verdict.summary
            yield f"worker group {attempt.group_attempt}, before training, {attempt.rung.name}: {failure}: {summary}"


def ended_words(ended: Mapping[int, End]) -> Iterator[str]:
    """Ranks that raised, died or answer no more."""
    same: dict[tuple[str, str], list[int]] = {}
    for rank, end in ended.items():
        if end.how in (How.RAISED, How.DIED, How.SILENT):
            same.setdefault((f"{end.how.value} {end.what}".strip(), end.place), []).append(rank)
    for (words, place), sharing in same.items():
        yield f"{named(sharing)} {words}" + (f", at {place}" if place else "")
