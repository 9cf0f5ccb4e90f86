"""From the cells of all hosts to sentences: which host, pair or direction is at fault, and does it stop the backend."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from statistics import median

from ray_nccl_guard.classes import FailureClass
from ray_nccl_guard.network.across import relief_for, together
from ray_nccl_guard.network.addresses import Library
from ray_nccl_guard.network.cells import Cell, Code
from ray_nccl_guard.network.findings import Host, Kind, NetworkFinding, ranks_of
from ray_nccl_guard.network.needs import Pair, bootstrap_pairs, effect
from ray_nccl_guard.network.steadiness import SLOW_RTT_S, lossy, lossy_hosts, merge, slow

# What this side's own routing or firewall says, without a packet on the wire (EHOSTUNREACH may also come back from afar).
_LOCAL = (Code.EINVAL, Code.EACCES, Code.EPERM, Code.ENETUNREACH, Code.EHOSTUNREACH, Code.EADDRNOTAVAIL)

_TIMEOUTS = (Code.SYN_TIMEOUT, Code.NO_ECHO, Code.BULK_STALL, Code.ETIMEDOUT)


def diagnose(
    cells: Sequence[Cell], hosts: Sequence[Host], backend: str, *, more_rounds: Sequence[Sequence[Cell]] = ()
) -> tuple[NetworkFinding, ...]:
    """Explain every failed cell, the most general reason first; nothing if all is well.

    Args:
        cells: what the hosts saw, one cell per ordered pair that was tried. Pairs not tried are not judged.
        hosts: all hosts of the run, also those that gave no row.
        backend: `gloo`, or any of NCCL's names.
        more_rounds: cells of later rounds, see `steadiness.wants_more_rounds`.
    """
    library = Library.GLOO if backend == "gloo" else Library.NCCL
    rounds = [cells, *more_rounds]
    addresses = together(hosts, library)
    silent = _silent(merge(rounds), hosts)
    live = [host for host in hosts if not any(host.rank in finding.ranks for finding in silent)]
    matrix = _Matrix(merge(rounds), live, library)
    found = [*addresses, *silent]
    if not matrix.bad:
        found += slow(tuple(matrix.cells.values()), matrix.hosts, library)
    elif everything := matrix.every_pair(explained=any(finding.decides for finding in addresses)):
        return (*found, everything)
    unsteady = lossy_hosts(rounds, matrix.hosts)
    if matrix.bad:
        found += matrix.whole_hosts()
        matrix.explain_by_loss(unsteady)
        found += matrix.pairs()
    return (*found, *(lossy(rounds, matrix.hosts[rank], library) for rank in sorted(unsteady)))


def _silent(cells: Sequence[Cell], hosts: Sequence[Host]) -> list[NetworkFinding]:
    """Hosts that gave no row of cells. Neither in "every pair fails" nor in a pair are they accused again."""
    found = []
    for host in hosts:
        if host.answered or any(cell.src == host.rank for cell in cells):
            continue
        inbound = [cell.code for cell in cells if cell.dst == host.rank and cell.code is not Code.NOT_TRIED]
        if inbound and all(code is Code.NO_ECHO for code in inbound):
            why = "its kernel takes connections but its process does not answer (frozen or overloaded)"
        elif inbound and not any(code.failed for code in inbound):
            why = "it answered its peers but did not report (lost, or overloaded)"
        elif inbound and all(code.failed for code in inbound):
            why = f"its peers see {_count(code for code in inbound)} (down, or cut off)"
        else:
            why = "its probe did not report (frozen, dead or overloaded)"
        found.append(
            NetworkFinding(
                kind=Kind.SILENT, failure=FailureClass.MISSING_RANK, text=f"{host.name} does not answer: {why}",
                hosts=(host.name,), ranks=ranks_of([host]), decides=True, gloo_too=True,
            )
        )  # fmt: skip
    return found


def _count(codes: Iterable[Code]) -> str:
    return ", ".join(f"{code.value} x{count}" for code, count in Counter(codes).most_common())


class _Matrix:
    """The cells between hosts that answered; `left` are the failed ones that nothing explains yet."""

    def __init__(self, cells: Iterable[Cell], hosts: Sequence[Host], library: Library) -> None:
        self.library = library
        self.hosts = {host.rank: host for host in hosts}
        self.cells = {
            (c.src, c.dst): c
            for c in cells
            if c.src in self.hosts and c.dst in self.hosts and c.src != c.dst and c.code is not Code.NOT_TRIED
        }
        self.bad = {pair: cell.code for pair, cell in self.cells.items() if cell.code.failed}
        self.left = dict(self.bad)
        self.needed = bootstrap_pairs(hosts)
        self.relief = relief_for(hosts, library)

    def every_pair(self, *, explained: bool) -> NetworkFinding | None:
        """All pairs of three hosts or more fail: a rule for the whole cluster, or the wrong network altogether."""
        if len(self.hosts) < 3 or len(self.bad) < len(self.cells):
            return None
        if explained:
            reason = "as the addresses above explain"
        elif set(self.bad.values()) == {Code.BULK_STALL}:
            reason = "small messages pass, 64 KiB does not: MTU mismatch on the whole network"
        elif self.relief:
            reason = f"{self.library.value} takes other addresses than those at which the hosts are known to be reachable"
        else:
            reason = (
                f"a rule for the whole cluster on the ports that {self.library.value} would use, such as a security group "
                "without a rule that refers to itself"
            )
        text = f"every pair of hosts fails ({_count(self.bad.values())}): {reason}"
        return self._finding(Kind.ALL_PAIRS, text, (), self.bad)

    def whole_hosts(self) -> list[NetworkFinding]:
        """Hosts that explain all their cells of a direction: nobody reaches them, they reach nobody, or both."""
        found = []
        failures = Counter(rank for pair in self.bad for rank in pair)
        for rank, _ in sorted(failures.items(), key=lambda item: (-item[1], item[0])):
            inbound = [pair for pair in self.cells if pair[1] == rank]
            outbound = [pair for pair in self.cells if pair[0] == rank]
            # Two peers at least: with one, host and pair cannot be told apart.
            into = len(inbound) > 1 and all(pair in self.bad for pair in inbound)
            out = len(outbound) > 1 and all(pair in self.bad for pair in outbound)
            explains = inbound * into + outbound * out
            if any(pair in self.left for pair in explains):
                found.append(self._host(self.hosts[rank], inbound * into, outbound * out))
                self._explain(explains)
        return found

    def _host(self, host: Host, inbound: list[Pair], outbound: list[Pair]) -> NetworkFinding:
        """The sentence for a host whose inbound cells, outbound cells, or both, all fail."""
        explains, name = inbound + outbound, host.name
        ins, outs = _count(self.bad[pair] for pair in inbound), _count(self.bad[pair] for pair in outbound)
        codes = {self.bad[pair] for pair in explains}
        if codes == {Code.BULK_STALL}:
            way = "both ways" if inbound and outbound else "towards it" if inbound else "from it"
            rtt_s = median(self.cells[pair].rtt_s for pair in explains)
            why = "a very slow path" if rtt_s > SLOW_RTT_S else "packets above the path's MTU are dropped silently"
            text = f"{name}: small messages pass, 64 KiB stalls {way} (a hello takes {rtt_s * 1e3:.0f} ms): {why}"
            return self._finding(Kind.BULK, text, [host], explains)
        if codes == {Code.WRONG_PEER}:
            text = f"{name}: another program or host answers at its address {host.address(self.library)}"
            return self._finding(Kind.WRONG_PEER, text, [host], explains)
        if inbound and outbound:
            text = f"{name}: nobody reaches it and it reaches nobody (in {ins}; out {outs})"
            return self._finding(Kind.HOST_BOTH, text, [host], explains)
        if inbound:
            text = (
                f"{name}: inbound blocked from every peer ({ins}), outbound works: firewall, security group or network "
                f"policy on {name}"
            )
            return self._finding(Kind.HOST_INBOUND, text, [host], explains)
        text = f"{name}: outbound blocked to every peer ({outs}), inbound works: route or egress rule on {name}"
        return self._finding(Kind.HOST_OUTBOUND, text, [host], explains)

    def pairs(self) -> list[NetworkFinding]:
        """What no whole host explains, pair by pair."""
        found = []
        for a, b in list(self.left):
            if (a, b) in self.left:
                found.append(self._pair(a, b) if (b, a) in self.left else self._direction(a, b))
                self._explain([(a, b), (b, a)])
        return found

    def _pair(self, a: int, b: int) -> NetworkFinding:
        """A pair that fails both ways. Packets lost one way break TCP both ways, so no direction is told."""
        one, other, there, back = self.hosts[a], self.hosts[b], self.left[a, b], self.left[b, a]
        text = f"pair {one.name} <-> {other.name}: both directions fail ({there.value} / {back.value})"
        blamed = [one, other]
        if there is back is Code.BULK_STALL:
            text = (
                f"pair {one.name} <-> {other.name}: small messages pass, 64 KiB stalls both ways: MTU mismatch on the path"
            )
        elif (there in _LOCAL) is not (back in _LOCAL):
            first, second = (one, other) if there in _LOCAL else (other, one)
            text += f"; {first.name} itself has no way to {second.name}"
            blamed = [first]
        return self._finding(Kind.PAIR, text, blamed, [(a, b), (b, a)])

    def _direction(self, a: int, b: int) -> NetworkFinding:
        one, other, there = self.hosts[a], self.hosts[b], self.left[a, b]
        what = "small messages pass, 64 KiB stalls, " if there is Code.BULK_STALL else ""
        text = f"{one.name} -> {other.name}: {what}this direction only ({there.value})"
        if (b, a) not in self.cells:
            text = f"{one.name} -> {other.name}: {what or 'fails '}({there.value}); the other direction was not tried"
        return self._finding(Kind.DIRECTION, text, [one] if there in _LOCAL else [one, other], [(a, b)])

    def explain_by_loss(self, unsteady: Collection[int]) -> None:
        """Connections with a lossy host that ran out of time are no rules of a firewall."""
        self._explain([p for p, code in self.left.items() if code in _TIMEOUTS and not set(p).isdisjoint(unsteady)])

    def _explain(self, pairs: Iterable[Pair]) -> None:
        for pair in pairs:
            self.left.pop(pair, None)

    def _finding(self, kind: Kind, text: str, blamed: Sequence[Host], pairs: Iterable[Pair]) -> NetworkFinding:
        pairs = list(pairs)
        gloo = self.library is Library.GLOO
        means = effect(pairs, self.bad, self.hosts, self.library, self.needed)
        if not means.decides:
            text += "; gloo does not connect that way" if gloo else "; NCCL's bootstrap does without it"
        return NetworkFinding(
            kind=kind, failure=FailureClass.GLOO_NETWORK if gloo else FailureClass.NCCL_BOOTSTRAP_NETWORK, text=text,
            hosts=tuple(host.name for host in blamed), ranks=ranks_of(blamed), decides=means.decides,
            gloo_too=means.gloo_too, relief=self.relief,
        )  # fmt: skip
