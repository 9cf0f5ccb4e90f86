"""Whom Flight Recorder dumps convict, and whom they should: precision and recall (`flight.py --accuracy`).

A folder holds sets as folders, with `truth.json` beside them: the set's name to `{"culprits": [ranks], "kind": ...}`; a set
with a `fault_injection.log` that says `Fault ranks: [...]` needs none. Precision: of the ranks that were named, how many
were culprits. Recall: of the culprits, how many were named.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import harness

KEPT = harness.ROOT / "tests" / "unit" / "data" / "flight"
MAKER = harness.ROOT / "tests" / "process" / "make_flight_dumps.py"
PEER = "from torch.distributed.flight_recorder.fr_trace import main; main()"


@dataclass(frozen=True)
class Set:
    """Dumps of one job, and what a reader has to say of them; `kind` is None where the truth does not tell."""

    folder: Path
    culprits: frozenset[int]
    kind: str | None = None


def sets_in(folder: Path) -> Iterator[Set]:
    told = folder / "truth.json"
    truth = json.loads(told.read_text()) if told.exists() else {}
    for each in sorted(path for path in folder.iterdir() if path.is_dir()):
        log = each / "fault_injection.log"
        if each.name in truth:
            yield Set(each, frozenset(truth[each.name]["culprits"]), truth[each.name].get("kind"))
        elif log.exists():
            ranks = re.search(r"Fault ranks: \[([\d, ]*)\]", log.read_text())
            assert ranks is not None, f"{log} does not say which ranks were made to fail"
            yield Set(each, frozenset(int(rank) for rank in ranks[1].split(",") if rank.strip()))


def made_in(folder: Path) -> Iterator[Set]:
    """Jobs that are run now, in a process of their own: ranks are forked from it."""
    from tests.process.make_flight_dumps import SCENARIOS

    subprocess.run([sys.executable, str(MAKER), str(folder)], check=True, timeout=170, capture_output=True)
    for name, scenario in SCENARIOS.items():
        yield Set(folder / name, frozenset(scenario.culprits), scenario.kind)


def named_here(one: Set) -> tuple[frozenset[int], str]:
    from ray_nccl_guard import flight

    verdict = flight.diagnose(flight.load([one.folder]))
    return frozenset(verdict.culprit_ranks), verdict.kind.value


def named_by_peer(one: Set) -> frozenset[int] | None:
    """All ranks that torchfrtrace of this torch calls missing or culprits; None where it ended in an error."""
    dumps = [path for path in one.folder.iterdir() if re.search(r"_\d+$", path.name)]
    prefix = re.sub(r"\d+$", "", dumps[0].name)
    used = harness.measured(PEER, str(one.folder), "-p", prefix, "--allow-incomplete-ranks", deadline_s=120)
    if used.code != 0:
        return None
    groups = re.findall(r"missing ranks: \{([\d, ]+)\}|Culprit rank (\d+)", used.output)
    return frozenset(int(rank) for pair in groups for part in pair for rank in part.split(",") if rank.strip())


def rates(pairs: list[tuple[frozenset[int], frozenset[int]]]) -> tuple[int, int, int]:
    """Ranks rightly named, ranks named, culprits."""
    return sum(len(named & true) for named, true in pairs), sum(len(n) for n, _ in pairs), sum(len(t) for _, t in pairs)


def accuracy(folders: Sequence[Path], peer: bool) -> tuple[list[dict[str, Any]], list[str]]:
    """Rows and sentences. Without a folder: the dumps kept in the repository, and those of jobs that are made to go wrong now."""
    with tempfile.TemporaryDirectory() as made:
        sets = [one for folder in folders or [KEPT] for one in sets_in(folder)]
        if not folders:
            sets += made_in(Path(made))
        return _compare(sets, peer)


def _compare(sets: list[Set], peer: bool) -> tuple[list[dict[str, Any]], list[str]]:
    rows: list[dict[str, Any]] = []
    ours: list[tuple[frozenset[int], frozenset[int]]] = []
    theirs: list[tuple[frozenset[int], frozenset[int]]] = []
    crashed = 0
    # Nothing is timed here, and the peer starts an interpreter with torch for each set: one on every core.
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        others = pool.map(named_by_peer, sets) if peer else [None] * len(sets)
        answers = list(zip(sets, others, strict=True))
    for one, other in answers:
        named, kind = named_here(one)
        ours.append((named, one.culprits))
        right = named == one.culprits and one.kind in (None, kind)
        row = {
            "table": "who is named", "set": one.folder.name, "truth": _words(one.culprits), "guard": _words(named),
            "kind": kind, "right": "yes" if right else "NO",
        }  # fmt: skip
        if peer:
            crashed += other is None
            theirs.append((other or frozenset(), one.culprits))
            row["torchfrtrace"] = "error" if other is None else _words(other)
        rows.append(row)
    found = [_sentence("The guard", ours, sum(row["right"] == "yes" for row in rows))]
    if peer:
        exact = sum(named == true for named, true in theirs) - sum(
            row["torchfrtrace"] == "error" and row["truth"] == "-" for row in rows
        )
        found.append(_sentence("torchfrtrace", theirs, exact) + f" It ended in an error on {crashed}.")
    return rows, found


def _sentence(who: str, pairs: list[tuple[frozenset[int], frozenset[int]]], exact: int) -> str:
    hit, named, true = rates(pairs)
    return f"{who} is right on {exact} of {len(pairs)} sets: precision {hit}/{named}, recall {hit}/{true} of ranks."


def _words(ranks: frozenset[int]) -> str:
    return ", ".join(map(str, sorted(ranks))) or "-"
