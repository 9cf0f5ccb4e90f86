"""Which connections a backend cannot do without, so that a blocked one is a verdict for it or only a remark."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ray_nccl_guard.network.addresses import Library
from ray_nccl_guard.network.cells import Code
from ray_nccl_guard.network.findings import Host, gloo_initiates

Pair = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """What a set of failed pairs means.

    Attributes:
        decides: the backend certainly cannot start.
        gloo_too: gloo certainly meets it (True), certainly does not (False), or has to be asked (None).
    """

    decides: bool
    gloo_too: bool | None


def bootstrap_pairs(hosts: Sequence[Host]) -> frozenset[Pair]:
    """The host pairs over which NCCL's bootstrap connects, as speaking ranks (from, to).

    Every rank connects to rank 0's root and is called back by it, then connects to the next rank of a ring
    (NCCL, src/bootstrap.cc). Rings and trees connect further pairs later, which ones is not known before.
    """
    speaker = {rank: host.rank for host in hosts for rank in host.ranks}
    order = sorted(speaker)
    if not order:
        return frozenset()
    root = speaker[order[0]]
    ring = {(speaker[a], speaker[b]) for a, b in zip(order, order[1:] + order[:1], strict=True)}
    star = {(speaker[rank], root) for rank in order} | {(root, speaker[rank]) for rank in order}
    return frozenset((a, b) for a, b in ring | star if a != b)


def effect(
    pairs: Iterable[Pair], codes: Mapping[Pair, Code], hosts: Mapping[int, Host], library: Library,
    needed: frozenset[Pair],
) -> Effect:  # fmt: skip
    """What it means for `library` that these pairs fail with these codes."""
    pairs = list(pairs)
    through_gloo = [_gloo_meets(pair, codes[pair], hosts) for pair in pairs]
    if library is Library.GLOO:
        return Effect(decides=any(met is not False for met in through_gloo), gloo_too=True)
    # A stall of big messages does not stop the bootstrap, whose messages are small, nor data that takes another network.
    decides = any(pair in needed and codes[pair] is not Code.BULK_STALL for pair in pairs)
    shared = all(_same_address(hosts[rank]) for pair in pairs for rank in pair)
    if not shared or not pairs:
        return Effect(decides=decides, gloo_too=None)
    if any(through_gloo):
        return Effect(decides=decides, gloo_too=True)
    return Effect(decides=decides, gloo_too=None if None in through_gloo else False)


def _same_address(host: Host) -> bool:
    return bool(host.address(Library.NCCL)) and host.address(Library.NCCL) == host.address(Library.GLOO)


def _gloo_meets(pair: Pair, code: Code, hosts: Mapping[int, Host]) -> bool | None:
    """Whether gloo's mesh uses this direction. Data flows both ways, whoever connected."""
    if code is Code.BULK_STALL:
        return True
    source, target = (hosts[rank].address(Library.GLOO) for rank in pair)
    return gloo_initiates(source, target)
