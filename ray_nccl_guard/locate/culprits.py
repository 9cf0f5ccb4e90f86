"""From small worlds to culprits: pairs, suspects with known-good partners, halves and quarters, and growing sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from ray_nccl_guard.locate.result import Group
from ray_nccl_guard.locate.rounds import Search, ask, together

# Times a pair is asked again before it is called a link. A fault that shows in one of three tries, and so passes with
# other partners by chance, looks like a link in 2/3 of cases after one failure and in 2/3 * (1/3)^3 = 2.5 % after these.
RETRIES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Culprits:
    """What a search inside one failing world found. Several may be set; none set means that it could not be narrowed.

    Attributes:
        ranks: ranks with which every world fails.
        links: pairs that fail with each other only.
        smallest, largest_ok: sizes, if worlds fail by their size.
        unsteady: the answers contradict each other.
        members: the world that was searched.
        untold: at two ranks, rank and link cannot be told apart.
    """

    members: Group
    ranks: frozenset[int] = frozenset()
    links: frozenset[Group] = frozenset()
    smallest: int = 0
    largest_ok: int = 0
    unsteady: bool = False
    untold: bool = False


Near = Callable[[int, int], bool]
"""Whether a pair of ranks is of the kind that is under suspicion (across nodes, or inside one)."""


def explain(members: Group, helpers: Sequence[int], near: Near) -> Search[Culprits]:
    """Find what makes `members` fail together although each of them passes alone.

    Args:
        helpers: ranks outside that are known to be good.
        near: which pairs to try first.
    """
    if len(members) == 2:
        if not (yield from ask([members]))[0]:
            return Culprits(members=members, unsteady=True)
        return (yield from _resolve(members, {members}, set(helpers), near))
    pairs, left = match(members)
    spare = [helper for helper in helpers if helper not in members]
    extra: list[Group] = [(rank, spare.pop()) for rank in left if spare]
    answers = yield from ask(pairs + extra)
    failing = {pair for pair, fails in zip(pairs, answers, strict=False) if fails}
    good = set(helpers) | {rank for pair, fails in zip(pairs, answers, strict=False) if not fails for rank in pair}
    bad = {pair[0] for pair, fails in zip(extra, answers[len(pairs) :], strict=True) if fails}
    single = [rank for rank in left if rank not in {pair[0] for pair in extra}]
    if single and not failing:
        # The odd one out meets a rank that has just passed; if that fails, both meet others like any suspects.
        partner = min(good, key=lambda rank: not near(rank, single[0]))
        if (yield from ask([(single[0], partner)]))[0]:
            failing, good = {(single[0], partner)}, good - {single[0], partner}
    if not failing and not bad:
        return (yield from _halve(members))
    found = yield from _resolve(members, failing, good - bad, near)
    return Culprits(
        members=members, ranks=found.ranks | bad, links=found.links, smallest=found.smallest,
        largest_ok=found.largest_ok, unsteady=found.unsteady, untold=found.untold,
    )  # fmt: skip


def match(members: Group) -> tuple[list[Group], list[int]]:
    """Disjoint pairs that cover the members, and who is left over.

    Members come node by node, so the first half meets the second: across nodes, unless one node has more than half of all.
    """
    half = len(members) // 2
    return [(members[i], members[i + half]) for i in range(half)], list(members[2 * half :])


def _resolve(members: Group, failing: set[Group], good: set[int], near: Near) -> Search[Culprits]:
    """Tell rank from link: every suspect meets a rank that is known to be good, and that it has not met."""
    if not failing:
        return Culprits(members=members)
    if not good:
        found = yield from _other_matchings(members, failing)
        if isinstance(found, Culprits):
            return found
        failing, good = found
    suspects = sorted({rank for pair in failing for rank in pair if rank not in good})
    met = {a: b for pair in failing for a, b in (pair, pair[::-1])}
    partners = _partners(suspects, sorted(good), met, near)
    answers = yield from ask([(suspect, partners[suspect]) for suspect in suspects])
    bad = frozenset(suspect for suspect, fails in zip(suspects, answers, strict=True) if fails)
    cleared = sorted(pair for pair in failing if bad.isdisjoint(pair))
    links = set()
    for _ in range(RETRIES if cleared else 0):
        # One of them is enough: many links at once are the link of two nodes.
        if not (yield from ask([cleared[0]], again=True))[0]:
            return Culprits(members=members, ranks=bad, unsteady=True)
        links = set(cleared)
    return Culprits(members=members, ranks=bad, links=frozenset(links))


def _other_matchings(members: Group, failing: set[Group]) -> Search[Culprits | tuple[set[Group], set[int]]]:
    """All pairs failed, so nobody is known to be good: everybody meets somebody else, then its own side."""
    half, odd = len(members) // 2, len(members) % 2
    if len(members) == 2:
        return Culprits(members=members, links=frozenset(failing), untold=True)
    turned = [(members[i], members[half + (i + 1) % half]) for i in range(half)] if half > 1 else []
    own_side = [(side[i], side[i + 1]) for side in (members[:half], members[half:]) for i in range(0, len(side) - 1, 2)]
    left = [(members[-1], members[0]), (members[-1], members[1])] if odd else []
    good: set[int] = set()
    for pairs in (turned + left, own_side):
        answers = yield from ask(pairs)
        good |= {rank for pair, fails in zip(pairs, answers, strict=True) if not fails for rank in pair}
        failing = failing | {pair for pair, fails in zip(pairs, answers, strict=True) if fails}
        if pairs is own_side and not any(answers) and len(members) > 3:
            # Whoever stays on its side works: the two halves cannot reach each other.
            return Culprits(members=members, links=frozenset(failing))
        if good:
            return failing, good
    return Culprits(members=members, smallest=2, largest_ok=1)


def _partners(suspects: Sequence[int], good: Sequence[int], met: Mapping[int, int], near: Near) -> dict[int, int]:
    """A good partner for each suspect: of the right kind, far from the one it failed with, and not in great demand."""
    load = dict.fromkeys(good, 0)
    chosen = {}
    for suspect in suspects:
        old = met[suspect]
        partner = min(good, key=lambda rank: (not near(rank, suspect), not near(rank, old), load[rank], rank))
        load[partner] += 1
        chosen[suspect] = partner
    return chosen


def _halve(members: Group) -> Search[Culprits]:
    """All pairs tried so far pass and all together fail: shrink to the half or pair of quarters that still fails.

    Three ways to join four quarters two by two hold every pair of ranks in one half; if none of the six fails, no pair is
    at fault and the size is.
    """
    if len(members) == 2:
        for _ in range(RETRIES):
            if not (yield from ask([members], again=True))[0]:
                return Culprits(members=members, unsteady=True)
        return Culprits(members=members, links=frozenset({members}))
    a, b, c, d = _quarters(members)
    for halves in ((a + b, c + d), (a + c, b + d), (a + d, b + c)):
        real = [half for half in halves if len(half) > 1]
        answers = yield from ask(real)
        failing = [half for half, fails in zip(real, answers, strict=True) if fails]
        if len(failing) == 2:
            return (yield from _sizes(members))
        if failing:
            return (yield from _halve(failing[0]))
    return (yield from _threshold(members, (len(members) + 1) // 2))


def _quarters(members: Group) -> tuple[Group, Group, Group, Group]:
    cut = [round(len(members) * part / 4) for part in range(5)]
    a, b, c, d = (members[low:high] for low, high in pairwise(cut))
    return a, b, c, d


def _blocks(members: Group, size: int) -> list[Group]:
    """Full blocks of that size, as many as fit."""
    return [members[i : i + size] for i in range(0, len(members) - size + 1, size)]


def _sizes(members: Group) -> Search[Culprits]:
    """Both halves fail: several faults, or a size. Bisect the size; where only some blocks fail, look into those."""
    passes, fails = 1, (len(members) + 1) // 2
    while fails - passes > 1:
        # By powers of two first: halves of the logarithm, then of the difference.
        middle = 1 << (((passes.bit_length() + fails.bit_length()) // 2) - 1)
        if not passes < middle < fails:
            middle = (passes + fails) // 2
        blocks = _blocks(members, middle)
        answers = yield from ask(blocks)
        if all(answers):
            fails = middle
        elif not any(answers):
            passes = middle
        else:
            inside = [block for block, failed in zip(blocks, answers, strict=True) if failed]
            found = yield from together([_halve(block) for block in inside])
            return _merge(members, found)
    return (yield from _confirm(members, passes, fails))


def _confirm(members: Group, passes: int, fails: int) -> Search[Culprits]:
    """A size is believed if it fails and the one below passes, each time: a fault that comes and goes would not."""
    for _ in range(RETRIES - 1):
        large = yield from ask(_blocks(members, fails), again=True)
        small = yield from ask(_blocks(members, passes) if passes > 1 else [], again=True)
        if not all(large) or any(small):
            return Culprits(members=members, unsteady=True)
    return Culprits(members=members, smallest=fails, largest_ok=passes)


def _merge(members: Group, found: Sequence[Culprits]) -> Culprits:
    return Culprits(
        members=members,
        ranks=frozenset().union(*(one.ranks for one in found)),
        links=frozenset().union(*(one.links for one in found)),
        smallest=min((one.smallest for one in found if one.smallest), default=0),
        largest_ok=max((one.largest_ok for one in found), default=0),
        unsteady=any(one.unsteady for one in found),
    )


def _threshold(members: Group, passes: int) -> Search[Culprits]:
    """No pair is at fault and `members` fail: the smallest size that fails, confirmed with other members."""
    if not (yield from ask([members], again=True))[0]:
        return Culprits(members=members, unsteady=True)
    fails = len(members)
    while fails - passes > 1:
        middle = (passes + fails) // 2
        blocks = _blocks(members, middle)
        answers = yield from ask(blocks)
        passes, fails = (passes, middle) if all(answers) else (middle, fails)
    other = members[-fails:]
    if other != members[:fails] and not (yield from ask([other]))[0]:
        return Culprits(members=members)
    return (yield from _confirm(members, passes, fails))
