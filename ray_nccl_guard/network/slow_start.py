"""Which rank a slow communicator waited for: all ranks leave its making together, so only their own phases tell them apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from ray_nccl_guard.classes import FailureClass
from ray_nccl_guard.network.findings import Host, Kind, NetworkFinding, listed

# As in steadiness.slow_ranks: ten times what the others take, and two seconds on top.
_TIMES, _MORE_S = 10.0, 2.0

# What a rank does by itself before it meets the others in NCCL's bootstrap. `outside` is its comm_init less NCCL's total.
_BEFORE = {
    "outside": "outside NCCL (torch's store, NCCL's id)",
    "kernels": "loading NCCL's kernels",
    "alloc": "allocating NCCL's memory",
    "bootstrap.create": "opening its bootstrap sockets",
    "bootstrap.send": "connecting to the bootstrap root, rank 0",
}
_BETWEEN = {"bootstrap.connect": "connecting to its neighbours in the bootstrap ring"}
_AFTER = {
    "topo": "detecting the topology",
    "graphs": "searching rings and trees",
    "connections": "connecting to its peers",
}


def slow_start(
    phases: Mapping[int, Mapping[str, float]], took_s: Mapping[int, float], hosts: Sequence[Host]
) -> tuple[NetworkFinding, ...]:
    """What made a communicator slow that was made all the same.

    Args:
        phases: seconds by phase for each rank, as `probe.nccl_timings.read` found them.
        took_s: seconds of the whole step for each rank.
    """
    known = {rank: {**own, "outside": took_s[rank] - own["total"]} for rank, own in phases.items() if own and rank in took_s}
    if len(known) < 2:
        return ()
    found = _stand_out(known, _BEFORE, hosts)
    late = _late(known)
    if late and not found:
        # Who waits for nobody in a meeting that others wait in came last.
        waited_s = max(known[rank]["bootstrap"] for rank in known)
        text = f"comm_init passed, but {_on(late, hosts)} came late to it: the others waited {waited_s:.1f} s in NCCL's bootstrap"
        found.append(_finding(text, late, hosts))
    if not found:
        # Behind one that comes late its neighbour waits as well, so the ring is looked at only where nobody came late.
        found = _stand_out(known, _BETWEEN, hosts)
    return (*found, *_stand_out(known, _AFTER, hosts))


def _stand_out(
    known: Mapping[int, Mapping[str, float]], names: Mapping[str, str], hosts: Sequence[Host]
) -> list[NetworkFinding]:
    found = []
    for phase, words in names.items():
        own_s = {rank: seconds[phase] for rank, seconds in known.items() if phase in seconds}
        odd = _outliers(own_s)
        if odd:
            rest_s = [seconds for rank, seconds in own_s.items() if rank not in odd]
            most_s = max(own_s[rank] for rank in odd)
            text = (
                f"comm_init passed, but {_on(odd, hosts)} spent {most_s:.1f} s {words}, "
                f"where the median of the others is {median(rest_s):.1f} s"
            )
            found.append(_finding(text, odd, hosts))
    return found


def _outliers(own_s: Mapping[int, float]) -> tuple[int, ...]:
    """Ranks far above the rest; at most half of them, or they would be the rule."""
    if len(own_s) < 2:
        return ()
    lower_half = sorted(own_s.values())[: (len(own_s) + 1) // 2]
    usual_s = median(lower_half)
    odd = tuple(rank for rank, s in sorted(own_s.items()) if s > _TIMES * usual_s and s > usual_s + _MORE_S)
    return odd if len(odd) * 2 <= len(own_s) else ()


def _late(known: Mapping[int, Mapping[str, float]]) -> tuple[int, ...]:
    waited_s = {rank: seconds["bootstrap"] for rank, seconds in known.items() if "bootstrap" in seconds}
    most_s = max(waited_s.values(), default=0.0)
    late = tuple(rank for rank, s in sorted(waited_s.items()) if s * _TIMES <= most_s and s + _MORE_S < most_s)
    return late if 0 < len(late) * 2 <= len(waited_s) else ()


def _on(ranks: Sequence[int], hosts: Sequence[Host]) -> str:
    names = [host.name for host in hosts if set(host.ranks) & set(ranks)]
    said = f"{'rank' if len(ranks) == 1 else 'ranks'} {listed([str(rank) for rank in ranks])}"
    return f"{said} on {listed(names)}" if names else said


def _finding(text: str, ranks: Sequence[int], hosts: Sequence[Host]) -> NetworkFinding:
    on = tuple(host.name for host in hosts if set(host.ranks) & set(ranks))
    return NetworkFinding(
        kind=Kind.SLOW, failure=FailureClass.NCCL_BOOTSTRAP_NETWORK, text=text, hosts=on, ranks=tuple(ranks)
    )
