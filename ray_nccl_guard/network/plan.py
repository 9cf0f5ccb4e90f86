"""Who connects to whom: all pairs up to 64 hosts; beyond, a sparse round and then the suspects' rows and columns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from ray_nccl_guard.network.cells import Cell
from ray_nccl_guard.network.needs import Pair

# 63 connects a host and 4,032 cells in all; one host against 63 targets took 0.05 s (measured).
FULL_UP_TO = 64


def first_round(ranks: Sequence[int]) -> frozenset[Pair]:
    """The pairs of the first round, as (from, to) of speaking ranks.

    Up to `FULL_UP_TO` hosts all pairs. Beyond, every host connects to those 1, 2, 4, 8, .. places before and after it:
    about 2 log2(N) each. That contains the ring of NCCL's bootstrap and meets every faulty host from many sides; a single
    faulty pair is met with probability 2 log2(N) / N only, so it is looked for when the start-up fails all the same.
    """
    order = sorted(ranks)
    count = len(order)
    if count <= FULL_UP_TO:
        return all_pairs(order)
    shifts = {sign * (1 << k) % count for k in range(count.bit_length()) if 1 << k < count for sign in (1, -1)} - {0}
    # Everybody meets rank 0's host, as in NCCL's bootstrap.
    star = {(order[0], rank) for rank in order[1:]} | {(rank, order[0]) for rank in order[1:]}
    return frozenset({(order[i], order[(i + shift) % count]) for i in range(count) for shift in shifts} | star)


def second_round(cells: Iterable[Cell], ranks: Sequence[int]) -> frozenset[Pair]:
    """The rows and columns of every host in a failed cell, less what the first round tried. Empty if nothing failed.

    If more than an eighth of the hosts are suspect, the fault is not on single hosts and the first round says so: nothing
    is added, since that many rows would be N x N on a network that already fails.
    """
    cells = list(cells)
    tried = {(cell.src, cell.dst) for cell in cells}
    asked, failed = Counter[int](), Counter[int]()
    for cell in cells:
        for rank in (cell.src, cell.dst):
            asked[rank] += 1
            failed[rank] += cell.code.failed
    # By share, since rank 0's host meets everybody. A faulty host's peers each fail once or twice against it; those whose
    # failures it explains are no suspects of their own.
    share = {rank: failed[rank] / asked[rank] for rank in failed if failed[rank]}
    suspects = {rank for rank, part in share.items() if 2 * part >= max(share.values())}
    if len(suspects) > max(2, len(ranks) // 8):
        return frozenset()
    return frozenset(
        pair for rank in suspects for other in ranks for pair in ((rank, other), (other, rank)) if rank != other
    ) - frozenset(tried)


def all_pairs(ranks: Sequence[int]) -> frozenset[Pair]:
    """Every ordered pair."""
    return frozenset((a, b) for a in ranks for b in ranks if a != b)


def row(pairs: Iterable[Pair], rank: int) -> tuple[int, ...]:
    """The ranks that `rank` has to connect to, ascending."""
    return tuple(sorted(b for a, b in pairs if a == rank))
