"""Rounds and small worlds that `locate` needs per size and fault, beside DLRover's two rounds and testing all pairs.

    python benchmarks/locate_sim.py [--json]

A simulation: no process is started. DLRover's node check pairs all nodes twice and names nodes that failed twice; all
pairs is a tournament of N - 1 rounds. Neither tells a link from a rank with less than its whole table, and neither meets a
fault that needs more than two ranks.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ray_nccl_guard.locate.locate import locate
from ray_nccl_guard.locate.result import Kind, Located
from tests.unit.locate_oracle import (
    Cluster,
    Fault,
    bad_link,
    bad_node,
    bad_rank,
    cluster_of,
    sometimes,
    threshold,
)

PER_NODE = 8
TRIES = 20


def faults(count: int, dice: random.Random) -> dict[str, tuple[Fault, Callable[[Located], bool]]]:
    """One fault of each kind, with what counts as the right answer."""
    a, b = dice.sample(range(count), 2)
    nodes = cluster_of(count, PER_NODE)
    node = dice.choice(list(nodes))
    size = dice.randint(3, count) if count > 2 else 2
    own = nodes[node]
    return {
        "bad rank": (bad_rank(a), lambda f: f.kind is Kind.RANK and f.ranks == (a,)),
        "dead gpu": (bad_rank(a, alone=True), lambda f: f.kind is Kind.RANK and f.ranks == (a,)),
        "bad node": (bad_node(own, inside=False), lambda f: f.kind is Kind.NODE and f.nodes == (node,)),
        "bad link": (bad_link(a, b), lambda f: f.kind is Kind.LINK and set(f.ranks) == {a, b}),
        "threshold": (threshold(size), lambda f: f.kind is Kind.THRESHOLD and f.smallest == size),
        "one in three": (
            sometimes(bad_rank(a), 1 / 3, dice.randrange(1 << 30)),
            lambda f: f.kind in (Kind.INTERMITTENT, Kind.RANK) and f.ranks == (a,),
        ),
    }


def measure(count: int) -> dict[str, dict[str, float]]:
    """Worst rounds, worst worlds and the share of right answers per fault kind."""
    dice = random.Random(count)
    seen: dict[str, list[tuple[bool, int, int]]] = {}
    for _ in range(TRIES):
        for kind, (fault, right) in faults(count, dice).items():
            if kind == "bad node" and count <= 2 * PER_NODE:
                continue  # two nodes cannot tell a node from the link between them
            found = locate(cluster_of(count, PER_NODE), Cluster(fault), budget_s=600)
            seen.setdefault(kind, []).append((right(found), found.rounds, found.probes))
    return {
        kind: {
            "right": sum(ok for ok, _, _ in rows) / len(rows),
            "rounds": max(rounds for _, rounds, _ in rows),
            "worlds": max(worlds for _, _, worlds in rows),
        }
        for kind, rows in seen.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true")
    as_json = parser.parse_args().json
    table = {count: measure(count) for count in (4, 8, 16, 64, 256, 1024)}
    if as_json:
        print(json.dumps(table))
        return
    print(f"{TRIES} random faults each, {PER_NODE} ranks a node; worst rounds / worst worlds / right answers")
    for count, kinds in table.items():
        every = count * (count - 1) // 2
        print(f"\nN = {count}   (DLRover: 2 rounds, {count} worlds; all pairs: {count - 1} rounds, {every} worlds)")
        for kind, row in kinds.items():
            print(f"  {kind:13} {row['rounds']:4.0f} rounds {row['worlds']:6.0f} worlds   {row['right']:4.0%} right")


if __name__ == "__main__":
    main()
