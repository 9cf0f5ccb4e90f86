"""Locating a fault: alone, within each node, across nodes, and at last by patience, in few parallel rounds."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence

from ray_nccl_guard.locate.culprits import Culprits, explain
from ray_nccl_guard.locate.result import Group, Kind, Located, RunRound
from ray_nccl_guard.locate.rounds import BudgetOver, Rounds, Search, ask, together
from ray_nccl_guard.locate.sentence import sentence

# On top of the probe and only after it has failed (DESIGN, locate).
BUDGET_S = 60.0
# A fault that shows in one of three tries stays hidden through 12 rounds in (2/3)^12 = 0.8 % of cases.
PATIENCE = 12
# Far above what any strategy here needs at 1,024 ranks (benchmarks/locate_sim.py); a guard against an oracle that lies.
MAX_ROUNDS = 64


def locate(
    nodes: Mapping[str, Sequence[int]], run_round: RunRound, *, budget_s: float = BUDGET_S, max_rounds: int = MAX_ROUNDS
) -> Located:
    """Find the rank, node, link or size that makes the whole world fail.

    Args:
        nodes: each node's ranks.
        run_round: runs disjoint groups of ranks at the same time; each group is a world of its own. It keeps the
            deadline of a round; no new round begins after `budget_s`.
    """
    rounds = Rounds(run_round, time.monotonic() + budget_s, max_rounds)
    groups: dict[str, Group] = {node: tuple(ranks) for node, ranks in nodes.items() if ranks}
    try:
        found = rounds.drive(_search(groups, rounds))
    except BudgetOver:
        found = Located(kind=Kind.UNDECIDED, ranks=_suspects(rounds))
    return sentence(found, groups, rounds.rounds, rounds.probes)


def _suspects(rounds: Rounds) -> tuple[int, ...]:
    """The members of the smallest world that failed."""
    if not rounds.failed:
        return ()
    smallest: frozenset[int] = min(rounds.failed, key=len)
    return tuple(sorted(smallest))


def _search(nodes: Mapping[str, Group], rounds: Rounds) -> Search[Located]:
    everyone = tuple(rank for ranks in nodes.values() for rank in ranks)
    if not everyone:
        return Located(kind=Kind.NONE)
    answers = yield from ask([(rank,) for rank in everyone])
    bad = {rank for rank, fails in zip(everyone, answers, strict=True) if fails}
    rest = {node: tuple(rank for rank in ranks if rank not in bad) for node, ranks in nodes.items()}
    alive = tuple(rank for ranks in rest.values() for rank in ranks)
    if bad and (len(alive) < 2 or not (yield from ask([alive]))[0]):
        return _ranks(bad, nodes)
    if len(alive) < 2:
        return Located(kind=Kind.NONE)
    found = yield from _among(rest, alive)
    located = _judge(found, rest)
    if located.kind is Kind.UNDECIDED:
        return (yield from _patience(alive, rounds))
    if located.kind is Kind.LINK and not located.nodes:
        return (yield from _widen(located, rest))
    if bad and located.kind in (Kind.RANK, Kind.NODE):
        return _ranks(bad | set(located.ranks), nodes)
    if located.kind is Kind.RANK:
        healthy = tuple(rank for rank in alive if rank not in located.ranks)
        if len(healthy) > 1 and (yield from ask([healthy]))[0]:
            more = yield from explain(healthy, (), _across(rest))
            return _ranks(set(located.ranks) | more.ranks | {rank for pair in more.links for rank in pair}, nodes)
    return located


def _among(nodes: Mapping[str, Group], alive: Group) -> Search[list[Culprits]]:
    """Within each node that has several ranks; if all of those pass, across nodes."""
    inner = {node: ranks for node, ranks in nodes.items() if len(ranks) > 1}
    if len([ranks for ranks in nodes.values() if ranks]) > 1 and inner:
        answers = yield from ask(inner.values())
        failing = [ranks for ranks, fails in zip(inner.values(), answers, strict=True) if fails]
        if failing:
            # Only a node that passed as a world has ranks known to work with others.
            helpers = [rank for ranks, fails in zip(inner.values(), answers, strict=True) if not fails for rank in ranks]
            for turn in (0, 1):
                if not helpers:
                    pairs = _across_half(alive, turn)
                    answers = yield from ask(pairs)
                    helpers = [rank for pair, fails in zip(pairs, answers, strict=True) if not fails for rank in pair]
            # Each search gets helpers of its own, so that they do not wait for each other.
            shares = [helpers[i :: len(failing)] for i in range(len(failing))]
            return (
                yield from together(
                    [explain(ranks, share, lambda a, b: True) for ranks, share in zip(failing, shares, strict=True)]
                )
            )
    return [(yield from explain(alive, (), _across(nodes)))]


def _across_half(members: Group, turn: int) -> list[Group]:
    """Disjoint pairs of the first half with the second, whose partners are `turn` places further on."""
    half = len(members) // 2
    return [(members[i], members[half + (i + turn) % half]) for i in range(half)]


class _across:
    """Whether two ranks are on different nodes."""

    def __init__(self, nodes: Mapping[str, Group]) -> None:
        self.node = {rank: node for node, ranks in nodes.items() for rank in ranks}

    def __call__(self, a: int, b: int) -> bool:
        return self.node[a] != self.node[b]


def _ranks(bad: set[int] | frozenset[int], nodes: Mapping[str, Group]) -> Located:
    """Ranks, or nodes where all ranks of a node are bad and there is more than one node."""
    whole = [node for node, ranks in nodes.items() if len(ranks) > 1 and bad >= set(ranks)]
    if whole and len(nodes) > 1 and bad == {rank for node in whole for rank in nodes[node]}:
        return Located(kind=Kind.NODE, ranks=tuple(sorted(bad)), nodes=tuple(whole))
    return Located(kind=Kind.RANK, ranks=tuple(sorted(bad)))


def _widen(link: Located, nodes: Mapping[str, Group]) -> Search[Located]:
    """One pair of ranks that fails across two nodes: is it the whole link of the nodes?"""
    ends = [[rank for rank in ranks if rank in link.ranks] for ranks in nodes.values()]
    on = [node for node, found in zip(nodes, ends, strict=True) if found]
    rest = [[rank for rank in nodes[node] if rank not in link.ranks] for node in on]
    if len(on) != 2 or not all(rest):
        return link
    answers = yield from ask(list(zip(*rest, strict=False)))
    if not all(answers):
        return link
    return Located(kind=Kind.LINK, ranks=tuple(sorted(nodes[on[0]] + nodes[on[1]])), nodes=tuple(on))


def _judge(found: Sequence[Culprits], nodes: Mapping[str, Group]) -> Located:
    if any(one.unsteady for one in found):
        return Located(kind=Kind.UNDECIDED)
    bad = frozenset[int]().union(*(one.ranks for one in found))
    links = frozenset[Group]().union(*(one.links for one in found))
    sized = [one for one in found if one.smallest]
    if len(found) > 1 and all(one.untold or one.smallest == 2 for one in found):
        return Located(kind=Kind.THRESHOLD, smallest=2, largest_ok=1)  # any two ranks of any node
    of = {rank: node for node, ranks in nodes.items() for rank in ranks}
    several = [ranks for ranks in nodes.values() if len(ranks) > 1]
    if sized and not bad and not links:
        if len(found) < len(several) and all(len({of[rank] for rank in one.members}) == 1 for one in found):
            # Other nodes pass at the same size, so it is these nodes.
            culprits = {of[one.members[0]] for one in found}
            ranks = tuple(sorted(rank for node in culprits for rank in nodes[node]))
            return Located(kind=Kind.NODE, ranks=ranks, nodes=tuple(sorted(culprits)))
        smallest, largest = min(one.smallest for one in sized), max(one.largest_ok for one in sized)
        return Located(kind=Kind.THRESHOLD, smallest=smallest, largest_ok=min(largest, smallest - 1))
    if bad:
        return _ranks(bad, nodes)
    if links:
        ends = {rank for pair in links for rank in pair}
        between = {frozenset(of[rank] for rank in pair) for pair in links}
        both = tuple(sorted(next(iter(between)))) if len(between) == 1 and len(links) > 1 else ()
        whole = len(both) == 2 and all(ends >= set(nodes[node]) for node in both)
        return Located(kind=Kind.LINK, ranks=tuple(sorted(ends)), nodes=both if whole else ())
    return Located(kind=Kind.UNDECIDED)


def _patience(everyone: Group, rounds: Rounds) -> Search[Located]:
    """The fault comes and goes: everybody meets new partners, and who fails with two different ones is named."""
    # One failed pair accuses two ranks, and a second failure with another partner is as long in coming as the first was.
    for turn in range(2 * PATIENCE if len(everyone) > 2 else PATIENCE):
        named = _repeat_offenders(rounds)
        if named:
            return Located(kind=Kind.INTERMITTENT, ranks=named)
        if turn >= PATIENCE and not _failed_pairs(rounds):
            break
        yield from ask(_round_robin(everyone, turn), again=True)
    named = _repeat_offenders(rounds)
    if named:
        return Located(kind=Kind.INTERMITTENT, ranks=named)
    pairs = _failed_pairs(rounds)
    return Located(kind=Kind.INTERMITTENT if pairs else Kind.NONE, ranks=tuple(sorted(frozenset().union(*pairs))))


def _failed_pairs(rounds: Rounds) -> set[frozenset[int]]:
    return {frozenset(group) for group, failed in rounds.log if failed and len(group) == 2}


def _repeat_offenders(rounds: Rounds) -> tuple[int, ...]:
    """Ranks that failed with two partners or more, if nobody else explains those failures."""
    partners = Counter(rank for pair in _failed_pairs(rounds) for rank in pair)
    most = max(partners.values(), default=0)
    return tuple(sorted(rank for rank, count in partners.items() if count == most)) if most > 1 else ()


def _round_robin(members: Group, turn: int) -> list[Group]:
    """Pairs of the `turn`-th round of a tournament: no pair comes twice in `len(members) - 1` turns."""
    seats: list[int | None] = [*members, None] if len(members) % 2 else [*members]
    turn %= max(1, len(seats) - 1)
    turned = [seats[0], *seats[1 + turn :], *seats[1 : 1 + turn]]
    half = len(turned) // 2
    pairs = zip(turned[:half], reversed(turned[half:]), strict=True)
    return [(a, b) for a, b in pairs if a is not None and b is not None]
