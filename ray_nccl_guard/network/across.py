"""Address problems that show only when all hosts are side by side, and whether each of them matters to the library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ray_nccl_guard.classes import FailureClass
from ray_nccl_guard.network.addresses import AddressProblem, Library, Trouble, choose
from ray_nccl_guard.network.findings import Host, Kind, NetworkFinding, gloo_initiates, listed, ranks_of

_CLASS = {Library.NCCL: FailureClass.NCCL_BOOTSTRAP_NETWORK, Library.GLOO: FailureClass.GLOO_NETWORK}


def together(hosts: Sequence[Host], library: Library) -> tuple[NetworkFinding, ...]:
    """What is wrong with the addresses that `library` would take on these hosts; nothing connected yet.

    On a single host any address that exists will do: only a missing interface is a problem there.
    """
    known = [host for host in hosts if host.choice]
    relief = relief_for(known, library)
    found = _own(known, library, relief)
    if len(known) > 1:
        found += _duplicates(known, library, relief) + _families(known, library)
    return tuple(found)


def _own(hosts: Sequence[Host], library: Library, relief: Mapping[str, str]) -> list[NetworkFinding]:
    """One finding for all hosts that share one sentence."""
    groups: dict[tuple[Trouble, str, bool], list[Host]] = {}
    for host in hosts:
        assert host.choice is not None
        for problem in host.choice.problems:
            if problem.library is library and (len(hosts) > 1 or problem.trouble is Trouble.NO_INTERFACE):
                key = (problem.trouble, problem.text, _matters(problem, host, hosts))
                groups.setdefault(key, []).append(host)
    return [
        NetworkFinding(
            kind=Kind.ADDRESS, failure=_CLASS[library], text=f"{listed([h.name for h in group])}: {text}",
            hosts=tuple(h.name for h in group), ranks=ranks_of(group), decides=matters,
            gloo_too=_gloo_too(group, library), relief=relief,
        )
        for (_, text, matters), group in groups.items()
    ]  # fmt: skip


def _matters(problem: AddressProblem, host: Host, hosts: Sequence[Host]) -> bool:
    """Whether the library fails for it. Bridges and link-local addresses may work by chance, so connecting decides."""
    if problem.trouble in (Trouble.NO_INTERFACE, Trouble.NO_ADDRESS):
        return True
    if problem.trouble is not Trouble.LOOPBACK:
        return False
    if problem.library is Library.NCCL:
        return True  # the rank before it in the bootstrap ring has to connect to it
    # gloo only connects from the larger address to the smaller: a loopback address larger than all others is called by
    # nobody, and the mesh forms (measured on a 10.x network with one host at 127.0.1.1; on 192.168.x it fails).
    own = host.address(Library.GLOO)
    return not all(gloo_initiates(own, other.address(Library.GLOO)) for other in hosts if other is not host)


def _duplicates(hosts: Sequence[Host], library: Library, relief: Mapping[str, str]) -> list[NetworkFinding]:
    at: dict[str, list[Host]] = {}
    for host in hosts:
        at.setdefault(host.address(library), []).append(host)
    return [
        NetworkFinding(
            kind=Kind.ADDRESS, failure=_CLASS[library],
            text=f"{listed([h.name for h in group])} would all take the same address {address} for {library.value}: "
            "an interface private to each host was chosen",
            hosts=tuple(h.name for h in group), ranks=ranks_of(group), decides=True,
            gloo_too=_gloo_too(group, library), relief=relief,
        )
        for address, group in at.items()
        if address and len(group) > 1 and not address.startswith("127.")
    ]  # fmt: skip


def _families(hosts: Sequence[Host], library: Library) -> list[NetworkFinding]:
    six = [h for h in hosts if ":" in h.address(library)]
    four = [h for h in hosts if h.address(library) and h not in six]
    if not six or not four:
        return []
    odd = min(six, four, key=len)
    text = f"{listed([h.name for h in six])} would take IPv6 for {library.value}, {listed([h.name for h in four])} IPv4"
    return [
        NetworkFinding(
            kind=Kind.ADDRESS, failure=_CLASS[library], text=text, hosts=tuple(h.name for h in odd),
            ranks=ranks_of(odd), relief={"NCCL_SOCKET_FAMILY": "AF_INET"} if library is Library.NCCL else {},
        )
    ]  # fmt: skip


def _gloo_too(group: Sequence[Host], library: Library) -> bool | None:
    if library is Library.GLOO:
        return True
    if any(p.library is Library.GLOO for h in group if h.choice for p in h.choice.problems):
        return None
    return False if all(h.address(Library.GLOO) != h.address(Library.NCCL) for h in group) else None


def relief_for(hosts: Sequence[Host], library: Library) -> dict[str, str]:
    """The interface setting, one for all ranks, with which `library` takes the address at which each host is reachable.

    Empty if there is none, or if every host takes that address already.
    """
    choices = [host.choice for host in hosts if host.choice]
    wanted = sorted({choice.node_interface for choice in choices})
    if not choices or "" in wanted or all(choice.of(library).address == choice.node_ip for choice in choices):
        return {}
    value = ("=" if library is Library.NCCL else "") + ",".join(wanted)
    setting = {f"{library.name}_SOCKET_IFNAME": value}
    for choice in choices:  # gloo also fails on a name that a host lacks
        if choose(setting, choice.interfaces, own_name=choice.own_name).of(library).address != choice.node_ip:
            return {}
    return setting
