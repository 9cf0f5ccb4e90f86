"""Rounds and small worlds that `locate` needs per size and fault, beside DLRover's two rounds and testing all pairs.

    python benchmarks/locate_sim.py [--sizes 4 64 1024] [--tries 20] [--json]

A simulation: no process is started, and a world fails by the fault's rule alone. DLRover's node check is modelled by its published rule:
nodes are paired with their neighbour, then the failed with the passed; who failed twice is named, and up to three nodes
it gives up. It counts as right here when it names the node, which is all that it asks. All pairs of ranks are a tournament
of N - 1 rounds; without its whole table it tells no link from a rank, and a fault that needs more than two ranks it never meets.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import harness
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


def faults(count: int, dice: random.Random) -> dict[str, tuple[Fault, Callable[[Located], bool], set[int]]]:
    """One fault of each kind, with what counts as the right answer, and the ranks that it sits on."""
    a, b = dice.sample(range(count), 2)
    nodes = cluster_of(count, PER_NODE)
    node = dice.choice(list(nodes))
    size = dice.randint(3, count) if count > 2 else 2
    own = nodes[node]
    return {
        "bad rank": (bad_rank(a), lambda f: f.kind is Kind.RANK and f.ranks == (a,), {a}),
        "dead gpu": (bad_rank(a, alone=True), lambda f: f.kind is Kind.RANK and f.ranks == (a,), {a}),
        "bad node": (bad_node(own, inside=False), lambda f: f.kind is Kind.NODE and f.nodes == (node,), set(own)),
        "bad link": (bad_link(a, b), lambda f: f.kind is Kind.LINK and set(f.ranks) == {a, b}, {a, b}),
        "threshold": (threshold(size), lambda f: f.kind is Kind.THRESHOLD and f.smallest == size, set()),
        "one in three": (
            sometimes(bad_rank(a), 1 / 3, dice.randrange(1 << 30)),
            lambda f: f.kind in (Kind.INTERMITTENT, Kind.RANK) and f.ranks == (a,),
            {a},
        ),
    }


@dataclass(slots=True)
class Seen:
    """What the tries of one kind of fault at one size came to."""

    right: list[bool] = field(default_factory=list)
    rounds: list[int] = field(default_factory=list)
    worlds: list[int] = field(default_factory=list)
    dlrover_right: list[bool] = field(default_factory=list)


def measure(count: int, tries: int) -> dict[str, Seen]:
    """Both strategies on `tries` random faults of each kind."""
    dice = random.Random(count)
    seen: dict[str, Seen] = {}
    for _ in range(tries):
        for kind, (fault, right, ranks) in faults(count, dice).items():
            nodes = cluster_of(count, PER_NODE)
            if kind == "bad node" and len(nodes) <= 2:
                continue  # two nodes cannot tell a node from the link between them
            found = locate(nodes, Cluster(fault), budget_s=600)
            one = seen.setdefault(kind, Seen())
            one.right.append(right(found))
            one.rounds.append(found.rounds)
            one.worlds.append(found.probes)
            if len(nodes) > 3:
                named = two_rounds(list(nodes.values()), fault, dice)
                one.dlrover_right.append(bool(ranks) and named == {rank // PER_NODE for rank in ranks})
    return seen


def two_rounds(nodes: list[list[int]], fault: Fault, dice: random.Random) -> set[int]:
    """The nodes that fail with their neighbour and again with another one."""

    def failed(order: list[int]) -> set[int]:
        pairs = [order[i : i + 2] for i in range(0, len(order) - 1, 2)]
        if len(order) % 2:
            pairs[-1].append(order[-1])
        return {node for pair in pairs if fault(tuple(rank for node in pair for rank in nodes[node])) for node in pair}

    first = failed(list(range(len(nodes))))
    by_time = sorted(range(len(nodes)), key=lambda node: (node in first, dice.random()))
    ends = [node for pair in zip(by_time, reversed(by_time), strict=True) for node in pair][: len(nodes)]
    return first & failed(ends)


def main() -> None:
    parser = harness.arguments(__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[4, 8, 16, 64, 256, 1024], metavar="N")
    parser.add_argument("--tries", type=int, default=20, help="random faults of each kind and size")
    args = parser.parse_args()
    top, rows = harness.head("Locating a fault: rounds and worlds, beside two rounds of pairs and all pairs"), []
    for count in args.sizes:
        for kind, one in measure(count, args.tries).items():
            rows.append({
                "case": f"{kind}, N = {count}", "unit": "rounds", "rounds, worst": max(one.rounds), "worlds, worst": max(one.worlds),
                "right": _share(one.right), "DLRover rounds": 2 if one.dlrover_right else None,
                "DLRover names the node": _share(one.dlrover_right),
                "all pairs, rounds": count - 1, "all pairs, worlds": count * (count - 1) // 2,
            })  # fmt: skip
    most = max(args.sizes)
    worst = {row["case"].partition(",")[0]: row["rounds, worst"] for row in rows if row["case"].endswith(f"N = {most}")}
    found = [
        f"At {most} ranks the worst of {args.tries} faults took {worst['bad rank']} rounds for a bad rank and {worst['bad link']} "
        f"for a bad link, where all pairs take {most - 1}; two rounds of pairs name a bad node only (simulated)."
    ]
    notes = [
        f"{args.tries} random faults each, {PER_NODE} ranks a node. A dash: a node check of up to three nodes gives up."
    ]
    harness.show(args, top, rows, notes, found=found, value="rounds, worst")


def _share(right: list[bool]) -> str | None:
    return f"{sum(right)} of {len(right)}" if right else None


if __name__ == "__main__":
    main()
