"""A simulated cluster for `locate`: worlds fail by the faults it is given, and the rules of the game are checked."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from ray_nccl_guard.locate.result import Group, Trial

Fault = Callable[[Group], bool]


def bad_rank(rank: int, *, alone: bool = False) -> Fault:
    """Fails every world it is in; on its own only if `alone` (a dead GPU, not a dead link to it)."""
    return lambda group: rank in group and (alone or len(group) > 1)


def bad_link(a: int, b: int) -> Fault:
    return lambda group: a in group and b in group


def bad_node(ranks: Sequence[int], *, inside: bool) -> Fault:
    """`inside`: its ranks fail with each other and with all; else only worlds that cross its border (its NIC) fail."""
    own = set(ranks)
    if inside:
        return lambda group: len(group) > 1 and not own.isdisjoint(group)
    return lambda group: not own.isdisjoint(group) and not own.issuperset(group)


def bad_node_link(one: Sequence[int], other: Sequence[int]) -> Fault:
    return lambda group: not set(one).isdisjoint(group) and not set(other).isdisjoint(group)


def threshold(size: int) -> Fault:
    return lambda group: len(group) >= size


def sometimes(fault: Fault, chance: float, seed: int) -> Fault:
    dice = random.Random(seed)
    return lambda group: fault(group) and dice.random() < chance


class Cluster:
    """The oracle. Counts rounds and worlds; asserts that a round's worlds are disjoint."""

    def __init__(self, *faults: Fault) -> None:
        self.faults = faults
        self.rounds = 0
        self.asked: list[Group] = []

    def __call__(self, groups: Sequence[Group]) -> list[Trial]:
        members = [rank for group in groups for rank in group]
        assert len(members) == len(set(members)), f"worlds of one round share ranks: {groups}"
        assert groups and all(groups), "an empty round or world"
        self.rounds += 1
        self.asked.extend(groups)
        return [Trial.FAILED if any(fault(group) for fault in self.faults) else Trial.PASSED for group in groups]


def cluster_of(ranks: int, per_node: int) -> dict[str, list[int]]:
    return {f"n{i}": list(range(i * per_node, min(ranks, (i + 1) * per_node))) for i in range(-(-ranks // per_node))}
