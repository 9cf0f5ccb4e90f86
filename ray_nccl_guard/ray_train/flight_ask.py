"""Asks a live run where its ranks are, without stopping it: from any driver on its cluster, twice, to see whether it moves."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import ray

from ray_nccl_guard.errors import UsageError
from ray_nccl_guard.flight import FlightVerdict, Kind
from ray_nccl_guard.flight.sheet import About
from ray_nccl_guard.flight.words import ranks as named
from ray_nccl_guard.ray_train import flight_live
from ray_nccl_guard.ray_train.flight_about import ended_words
from ray_nccl_guard.ray_train.flight_ends import ends
from ray_nccl_guard.ray_train.flight_gather import gather
from ray_nccl_guard.ray_train.flight_judge import Collected, judge, moved
from ray_nccl_guard.ray_train.flight_pull import Gathered
from ray_nccl_guard.ray_train.probe_cluster import _connect as connect
from ray_nccl_guard.ray_train.workers import Workers
from ray_nccl_guard.verdict import Certainty

# Between the two questions. A step of training is rarely longer; one that is looks like a standstill, which the text says.
APART_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a live run told.

    Attributes:
        moved: calls that each rank asked for between the two questions, of those that asked for any.
        about: what the run knows of itself.
    """

    collected: Collected
    moved: dict[int, int]
    about: About

    @property
    def verdict(self) -> FlightVerdict:
        """As the dumps say, unless the run moves: then ranks are a call or two apart, and nothing is wrong with that."""
        verdict = self.collected.verdict
        if not self.moved or verdict.kind is Kind.NONE:
            return verdict
        return replace(
            verdict,
            kind=Kind.NONE,
            culprit_ranks=(),
            certainty=Certainty.ESTABLISHED,
            summary=f"the run moves: {named(self.moved)} asked for up to {max(self.moved.values())} more calls within "
            f"{APART_S:g} s",
            because=(),
            against=(),
            stacks=(),
            next="",
        )


def ask_run(name: str, address: str, say: Callable[[str], None]) -> Asked:
    """Ask the run of that name on the cluster at `address` (`auto`, or HOST:PORT of its head).

    Raises:
        UsageError: there is no Ray there, no guarded run of that name trains there, or its workers are gone.
    """
    connect(address, say)
    try:
        run = flight_live.find(name)
        if run is None:
            known = ", ".join(flight_live.names()) or "none"
            raise UsageError(
                f"no guarded run {name!r} trains on this cluster", help=(f"runs that do: {known}", "see RunConfig(name=...)")
            )
        workers = Workers(run)
        say(f"asking {len(run)} ranks")
        before = judge(_gather(workers, run), {}, len(run))
        say("asking them again, to see whether they move")
        time.sleep(APART_S)
        gathered = _gather(workers, run)
        after = judge(gathered, ends(len(run), gathered, {}), len(run))
    finally:
        ray.shutdown()
    return Asked(collected=after, moved=moved(before, after), about=_about(run, after))


def _about(run: flight_live.LiveRun, after: Collected) -> About:
    return replace(run.about, earlier=(*run.about.earlier, *ended_words(after.ends)))


def _gather(workers: Workers, run: flight_live.LiveRun) -> Gathered:
    gathered = gather(workers, run.armed, at_end=False)
    if len(gathered.died) == len(run):
        raise UsageError(f"the workers of run {run.run_name!r} are gone", help=("its report is under <run>/nccl_guard/",))
    return gathered


def save(collected: Collected, folder: Path) -> None:
    """Write the dumps, one folder per recorder, and the stacks."""
    for recorder, packed in collected.kept().items():
        _write(folder / recorder, {name: zlib.decompress(data) for name, data in packed.items()})
    of = collected.gathered.of
    _write(folder / "stacks", {f"rank_{r}.txt": of(r).stacks.encode() for r in collected.ends if of(r).stacks})


def _write(folder: Path, files: dict[str, bytes]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
