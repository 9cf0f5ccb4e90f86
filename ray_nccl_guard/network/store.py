"""The store stage's answers as sentences: who cannot reach the store, who is absent, whose port is taken."""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from ray_nccl_guard.classes import FailureClass
from ray_nccl_guard.network.findings import Host, Kind, NetworkFinding, listed, ranks_of
from ray_nccl_guard.network.reach import ConnectResult


def store_findings(
    results: Mapping[int, ConnectResult], hosts: Sequence[Host], *, store: str, absent: Collection[int] = ()
) -> tuple[NetworkFinding, ...]:
    """Name who cannot reach the store, and who should have come and did not.

    Args:
        results: each rank's connect; a rank without an entry said nothing.
        store: the store as `address port N`, for the sentence.
        absent: ranks that the barrier behind the connect did not see.
    """
    failed = {rank: result for rank, result in results.items() if not result.ok}
    silent = (set(absent) | {rank for host in hosts for rank in host.ranks} - set(results)) - set(failed)
    found = []
    if failed:
        found.append(_unreachable(failed, results, hosts, store))
    if silent:
        on = [host for host in hosts if set(host.ranks) & silent]
        said = f"{_ranks(silent)} on {listed([host.name for host in on])}" if on else _ranks(silent)
        came = sum(rank not in silent for rank in results)
        text = f"{said} never arrived at the store {store}; {came} of {came + len(silent)} ranks did"
        found.append(
            NetworkFinding(
                kind=Kind.SILENT, failure=FailureClass.MISSING_RANK, text=text, hosts=tuple(host.name for host in on),
                ranks=tuple(sorted(silent)), decides=True, gloo_too=True,
            )
        )  # fmt: skip
    return tuple(found)


def _unreachable(
    failed: Mapping[int, ConnectResult], results: Mapping[int, ConnectResult], hosts: Sequence[Host], store: str
) -> NetworkFinding:
    root = next((host for host in hosts if 0 in host.ranks), None)
    on = [host for host in hosts if set(host.ranks) & set(failed)]
    reached = [host for host in hosts if host is not root and any(results[r].ok for r in host.ranks if r in results)]
    codes = Counter(result.errno_name for result in failed.values())
    how = ", ".join(f"{code} x{count}" for code, count in codes.most_common())
    slowest_s = max(result.seconds for result in failed.values())
    blamed = on
    if root and not reached and (root in on or len(on) > 1):
        # Nobody outside the store's own host reaches it: the fault is there, not on each of the others.
        blamed = [root]
        text = f"no other host reaches the store {store} on {root.name} ({how}, {slowest_s:.1f} s): {_why(codes, root.name)}"
    else:
        text = (
            f"{_ranks(failed)} on {listed([host.name for host in on])} cannot reach the store {store}"
            f"{f' on {root.name}' if root else ''} ({how}, {slowest_s:.1f} s); {len(results) - len(failed)} others reach it"
        )
    return NetworkFinding(
        kind=Kind.STORE, failure=FailureClass.STORE_UNREACHABLE, text=text, hosts=tuple(host.name for host in blamed),
        ranks=ranks_of(blamed) or tuple(sorted(failed)), decides=True, gloo_too=True,
    )  # fmt: skip


def _why(codes: Counter[str], root: str) -> str:
    if set(codes) == {"ECONNREFUSED"}:
        return f"nothing listens there, or {root}'s firewall refuses"
    if set(codes) == {"NO_ADDRESS"}:
        return "its name does not resolve"
    return f"inbound TCP to {root} is blocked, or it advertises an address on another network"


def listen_failed(error: OSError, *, host: Host, port: int) -> NetworkFinding:
    """The store could not listen on rank 0's host."""
    taken = error.errno == errno.EADDRINUSE
    reason = "another process has the port" if taken else os.strerror(error.errno or 0)
    text = f"the store cannot listen on {host.name} port {port}: {reason}"
    failure = FailureClass.PORT_IN_USE if taken else FailureClass.STORE_UNREACHABLE
    return NetworkFinding(
        kind=Kind.PORT, failure=failure, text=text, hosts=(host.name,), ranks=(0,), decides=True, gloo_too=True
    )


def _ranks(ranks: Collection[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {listed([str(rank) for rank in sorted(ranks)])}"
