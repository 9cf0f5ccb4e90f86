"""Slow and lossy links: what a single round of connections does not show, or shows only by chance."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import median

from ray_nccl_guard.classes import FailureClass
from ray_nccl_guard.network.addresses import Library
from ray_nccl_guard.network.cells import Cell, Code
from ray_nccl_guard.network.findings import Host, Kind, NetworkFinding, listed, ranks_of

# A single round of a link that lost 40 % of its packets blamed the wrong hosts in one of two runs (measured, 4 hosts);
# a name is given only if three rounds agree.
ROUNDS = 3
# A hello within one data centre takes well under 1 ms; 100 ms is another continent or a queue that does not drain.
SLOW_RTT_S = 0.1


def merge(rounds: Sequence[Sequence[Cell]]) -> tuple[Cell, ...]:
    """One cell per pair out of several rounds: a failure only if no round passed, else the passing cell.

    A pair that fails now and passes then is lossy, not blocked, so its passing cell counts as one that sent again.
    """
    by_pair: dict[tuple[int, int], list[Cell]] = {}
    for cell in (cell for cells in rounds for cell in cells):
        by_pair.setdefault((cell.src, cell.dst), []).append(cell)
    merged = []
    for cells in by_pair.values():
        passed = [cell for cell in cells if cell.ok]
        tried = [cell for cell in cells if cell.code is not Code.NOT_TRIED]
        best = min(passed, key=lambda cell: cell.rtt_s) if passed else (tried or cells)[0]
        again = max(cell.retransmits for cell in cells)
        merged.append(replace(best, retransmits=max(again, 1) if passed and len(passed) < len(tried) else again))
    return tuple(merged)


def wants_more_rounds(cells: Sequence[Cell]) -> bool:
    """True if a first round hints at loss: what passed with one host passed only after it had been sent again.

    A few repeated segments all over the place are no hint: the kernel sends a late one again on any busy host.
    """
    passed = [cell for cell in cells if cell.ok]
    return bool(_lossy(passed, {rank for cell in passed for rank in (cell.src, cell.dst)}))


def lossy_hosts(rounds: Sequence[Sequence[Cell]], ranks: Iterable[int]) -> frozenset[int]:
    """Speaking ranks of the hosts whose links lose packets: named only if three rounds agree."""
    if len(rounds) < ROUNDS:
        return frozenset()
    passed = {(cell.src, cell.dst) for cells in rounds for cell in cells if cell.ok}
    return frozenset.intersection(*(_lossy([c for c in cells if (c.src, c.dst) in passed], ranks) for cells in rounds))


def _lossy(cells: Sequence[Cell], ranks: Iterable[int]) -> frozenset[int]:
    """Hosts that explain the cells that struggled: a third of their own do, and at most a third of the rest."""
    # Counted once for all: at 1,024 hosts a look through all cells for each of them took 6 s (benchmarks/reachability.py).
    own, hit = Counter[int](), Counter[int]()
    for cell in cells:
        for rank in (cell.src, cell.dst):
            own[rank] += 1
            hit[rank] += _struggled(cell)
    hits = sum(map(_struggled, cells))
    return frozenset(
        rank
        for rank in ranks
        if hit[rank] >= 2 and hit[rank] * 3 >= own[rank] and (hits - hit[rank]) * 3 <= len(cells) - own[rank]
    )


def _struggled(cell: Cell) -> bool:
    return cell.retransmits > 0 or cell.code.failed


def lossy(rounds: Sequence[Sequence[Cell]], host: Host, library: Library) -> NetworkFinding:
    """The sentence for a lossy host. Decides only where something failed in every round: 10 % loss hurts neither backend."""
    cells = [cell for cells in rounds for cell in cells if host.rank in (cell.src, cell.dst)]
    hit = sum(map(_struggled, cells))
    text = f"{host.name}: lossy, {hit} of {len(cells)} connections in {len(rounds)} rounds had to send again or failed"
    failed = any(cell.code.failed for cell in merge(rounds) if host.rank in (cell.src, cell.dst))
    return replace(_finding(Kind.LOSSY, text, host, library), decides=failed)


def slow(cells: Sequence[Cell], hosts: Mapping[int, Host], library: Library) -> list[NetworkFinding]:
    """Hosts whose every peer waits long for an answer although all pass."""
    passed = [cell for cell in cells if cell.ok and cell.src in hosts and cell.dst in hosts]
    if not passed:
        return []
    everything = [cell.rtt_s for cell in passed]
    if min(everything) > SLOW_RTT_S and len(hosts) > 2:
        text = f"every pair of hosts is slow (median answer after {median(everything) * 1e3:.0f} ms)"
        return [replace(_finding(Kind.SLOW, text, next(iter(hosts.values())), library), hosts=(), ranks=())]
    least_s: dict[int, float] = {}
    for cell in passed:
        for rank in (cell.src, cell.dst):
            least_s[rank] = min(cell.rtt_s, least_s.get(rank, cell.rtt_s))
    found = []
    for rank, host in hosts.items():
        own_s = least_s.get(rank, 0.0)
        if own_s <= SLOW_RTT_S:
            continue
        rest_s = [cell.rtt_s for cell in passed if rank not in (cell.src, cell.dst)]
        # Five times what the others take: a cluster across two sites is slow by design, and no host of it is at fault.
        if own_s > (5 * median(rest_s) if rest_s else 0.0):
            text = f"{host.name}: slow, every peer waits {own_s * 1e3:.0f} ms or more for its answer"
            found.append(_finding(Kind.SLOW, text, host, library))
    return found


def slow_ranks(stage: str, seconds: Mapping[int, float], hosts: Sequence[Host]) -> NetworkFinding | None:
    """Ranks whose passing stage took far longer than the others', e.g. a bootstrap of 10 s where the median is 0.2 s.

    Far is ten times the median and 2 s above it: ten times alone would name ranks by scheduling noise where the median
    is a millisecond.
    """
    if len(seconds) < 3:
        return None
    middle_s = median(seconds.values())
    late = [rank for rank, took_s in sorted(seconds.items()) if took_s > 10 * middle_s and took_s > middle_s + 2.0]
    if not late:
        return None
    on = [host for host in hosts if set(host.ranks) & set(late)]
    most_s = max(seconds[rank] for rank in late)
    where = f" on {listed([host.name for host in on])}" if on else ""
    text = (
        f"{stage} passed but took {most_s:.1f} s on {'rank' if len(late) == 1 else 'ranks'} "
        f"{listed([str(rank) for rank in late])}{where}, where the median is {middle_s:.1f} s"
    )
    return NetworkFinding(
        kind=Kind.SLOW, failure=FailureClass.NCCL_BOOTSTRAP_NETWORK, text=text,
        hosts=tuple(host.name for host in on), ranks=tuple(late),
    )  # fmt: skip


def _finding(kind: Kind, text: str, host: Host, library: Library) -> NetworkFinding:
    failure = FailureClass.GLOO_NETWORK if library is Library.GLOO else FailureClass.NCCL_BOOTSTRAP_NETWORK
    same = host.address(Library.GLOO) == host.address(Library.NCCL)
    return NetworkFinding(
        kind=kind, failure=failure, text=text, hosts=(host.name,), ranks=ranks_of([host]),
        gloo_too=True if library is Library.GLOO or same else None,
    )  # fmt: skip
