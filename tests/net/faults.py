"""The faults of the lab as a table: how each is made, and the sentence that has to come out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ray_nccl_guard.network.findings import Kind
from tests.net.netlab import Lab

# What a cluster opens for Ray itself; a security group of this kind is the fault that users meet most.
RAY_PORTS = "6379, 7000-7099"


def nothing(lab: Lab) -> None:
    """No fault."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault and what the diagnosis has to say.

    Attributes:
        make: breaks the lab before anything starts.
        between: breaks it after the addresses are known and before the connections.
        expected: kind, hosts blamed and a piece of the sentence, for each finding in order.
        decides: whether the findings stop the backend; must agree with real gloo (test_gloo_agrees.py). None: by chance.
        gloo_too: what the first finding says of gloo, for NCCL only.
    """

    name: str
    make: Callable[[Lab], None] = nothing
    between: Callable[[Lab], None] = nothing
    backend: str = "gloo"
    net: str = "10.77.0"
    expected: tuple[tuple[Kind, tuple[str, ...], str], ...] = ()
    decides: bool | None = True
    gloo_too: bool | None = True
    deadline_s: float = 4.0

    def __str__(self) -> str:
        return self.name


def _both(*steps: Callable[[Lab], None]) -> Callable[[Lab], None]:
    def make(lab: Lab) -> None:
        for step in steps:
            step(lab)

    return make


def _name_everywhere(address: str) -> Callable[[Lab], None]:
    return lambda lab: [lab.own_name(host, address) for host in range(lab.count)] and None


def _bridge_everywhere(name: str, address: str) -> Callable[[Lab], None]:
    return lambda lab: [lab.add_interface(host, name, address) for host in range(lab.count)] and None


H2 = ("h2",)
SYN = "SYN_TIMEOUT"

FAULTS = (
    Fault(name="healthy", decides=False),
    Fault(name="healthy for nccl", backend="nccl", decides=False),
    Fault(name="small mtu is harmless", make=lambda lab: lab.set_mtu(2, 600), decides=False),
    Fault(
        name="pair dropped", make=lambda lab: lab.drop_pair(1, 2),
        expected=((Kind.PAIR, ("h1", "h2"), "pair h1 <-> h2: both directions fail (SYN_TIMEOUT / SYN_TIMEOUT)"),),
    ),
    Fault(
        name="packets dropped one way", make=lambda lab: lab.drop_direction(1, 2),
        expected=((Kind.PAIR, ("h1", "h2"), "pair h1 <-> h2: both directions fail"),),
    ),
    Fault(
        name="connections from larger to smaller dropped", make=lambda lab: lab.drop_syn(2, 1),
        expected=((Kind.DIRECTION, ("h2", "h1"), "h2 -> h1: this direction only (SYN_TIMEOUT)"),),
    ),
    Fault(
        name="connections from smaller to larger dropped", make=lambda lab: lab.drop_syn(1, 2), decides=False,
        expected=((Kind.DIRECTION, ("h1", "h2"), "this direction only (SYN_TIMEOUT); gloo does not connect that way"),),
    ),
    Fault(
        name="one direction that nccl needs and gloo does not", make=lambda lab: lab.drop_syn(1, 2), backend="nccl",
        expected=((Kind.DIRECTION, ("h1", "h2"), "h1 -> h2: this direction only"),), gloo_too=False,
    ),
    Fault(
        name="one direction that gloo needs and the bootstrap does not", make=lambda lab: lab.drop_syn(2, 1),
        backend="nccl", decides=False,
        expected=((Kind.DIRECTION, ("h2", "h1"), "NCCL's bootstrap does without it"),),
    ),
    Fault(
        name="every port but Ray's closed", make=lambda lab: lab.close_ports(0, 1, 2, 3, keep_open=RAY_PORTS),
        backend="nccl", expected=((Kind.ALL_PAIRS, (), "a security group without a rule that refers to itself"),),
    ),
    Fault(
        name="every port refused", make=lambda lab: lab.close_ports(0, 1, 2, 3, how="reset", keep_open=RAY_PORTS),
        expected=((Kind.ALL_PAIRS, (), "ECONNREFUSED x12"),),
    ),
    Fault(
        name="one host inbound dropped", make=lambda lab: lab.close_ports(2, keep_open=RAY_PORTS), backend="nccl",
        expected=((Kind.HOST_INBOUND, H2, "h2: inbound blocked from every peer (SYN_TIMEOUT x3), outbound works"),),
    ),
    Fault(
        name="one host inbound reset", make=lambda lab: lab.close_ports(2, how="reset"),
        expected=((Kind.HOST_INBOUND, H2, "ECONNREFUSED x3"),),
    ),
    Fault(
        name="one host inbound rejected by icmp", make=lambda lab: lab.close_ports(2, how="icmp"),
        expected=((Kind.HOST_INBOUND, H2, "EHOSTUNREACH x3"),),
    ),
    Fault(
        name="two hosts inbound dropped", make=lambda lab: lab.close_ports(2, 3),
        expected=((Kind.HOST_INBOUND, H2, SYN), (Kind.HOST_INBOUND, ("h3",), SYN)),
    ),
    Fault(
        name="one host inbound dropped and a direction elsewhere",
        make=_both(lambda lab: lab.close_ports(3), lambda lab: lab.drop_syn(1, 0)),
        expected=((Kind.HOST_INBOUND, ("h3",), SYN), (Kind.DIRECTION, ("h1", "h0"), "h1 -> h0: this direction only")),
    ),
    Fault(
        name="one host outbound dropped", make=lambda lab: lab.block_outbound(2),
        expected=((Kind.HOST_OUTBOUND, H2, "h2: outbound blocked to every peer"),),
    ),
    Fault(
        name="no route, unreachable", make=lambda lab: lab.no_route(2, 1, "unreachable"),
        expected=((Kind.PAIR, H2, "h2 itself has no way to h1"),),
    ),
    Fault(
        name="no route, blackhole", make=lambda lab: lab.no_route(2, 1, "blackhole"),
        expected=((Kind.PAIR, H2, "(SYN_TIMEOUT / EINVAL); h2 itself has no way to h1"),),
    ),
    Fault(
        name="no route, prohibit", make=lambda lab: lab.no_route(2, 1, "prohibit"),
        expected=((Kind.PAIR, H2, "(SYN_TIMEOUT / EACCES); h2 itself has no way to h1"),),
    ),
    Fault(
        name="no route at all", make=lambda lab: lab.no_route_at_all(2),
        expected=((Kind.HOST_BOTH, H2, "(in SYN_TIMEOUT x3; out ENETUNREACH x3)"),),
    ),
    Fault(name="ipv6 only", make=lambda lab: lab.only_ipv6(), decides=False),
    Fault(name="ipv6 only, for nccl", make=lambda lab: lab.only_ipv6(), backend="nccl", decides=False),
    Fault(
        name="ipv6 only, and a host's packets are dropped", make=_both(lambda lab: lab.only_ipv6(), lambda lab: lab.close_ports(2)),
        expected=((Kind.HOST_INBOUND, H2, "inbound blocked from every peer (SYN_TIMEOUT x3), outbound works"),),
    ),
    Fault(
        name="cable out", make=lambda lab: lab.unplug(2),
        expected=(
            (Kind.ADDRESS, H2, "h2: gloo would take 10.77.0.3 on eth0 (the host's own name resolves to it), which is down"),
            (Kind.HOST_BOTH, H2, "h2: nobody reaches it and it reaches nobody"),
        ),
    ),
    Fault(
        name="cable out, and nccl turns to loopback", make=lambda lab: lab.unplug(2), backend="nccl", gloo_too=None,
        expected=(
            (Kind.ADDRESS, H2, "h2: nccl would take 127.0.0.1 on lo (the first interface; eth0 is down)"),
            (Kind.HOST_BOTH, H2, "h2: nobody reaches it and it reaches nobody"),
        ),
    ),
    Fault(
        name="cable out between the stages", between=lambda lab: lab.unplug(2),
        expected=((Kind.HOST_BOTH, H2, "h2: nobody reaches it and it reaches nobody"),),
    ),
    Fault(
        name="path mtu black hole", make=lambda lab: lab.drop_big_packets(2, 1500),
        expected=((Kind.BULK, H2, "h2: small messages pass, 64 KiB stalls both ways"),),
    ),
    Fault(
        name="delay of 300 ms each way", make=lambda lab: lab.delay(2, 0.3), decides=False, deadline_s=8.0,
        expected=((Kind.SLOW, H2, "h2: slow, every peer waits 6"),),
    ),
    Fault(
        name="a third of the packets lost", make=lambda lab: lab.lose(2, 35), decides=None, deadline_s=3.0,
        expected=((Kind.LOSSY, H2, "h2: lossy"),),
    ),
    Fault(
        name="own name is 127.0.1.1 below the others", make=lambda lab: lab.own_name(2, "127.0.1.1"), net="192.168.77",
        expected=((Kind.ADDRESS, H2, "h2: gloo would take 127.0.1.1"), (Kind.HOST_INBOUND, H2, "h2: inbound blocked")),
    ),
    Fault(
        name="own name is 127.0.1.1 above the others", make=lambda lab: lab.own_name(2, "127.0.1.1"), decides=False,
        expected=((Kind.ADDRESS, H2, "h2: gloo would take 127.0.1.1"), (Kind.HOST_INBOUND, H2, "h2: inbound blocked")),
    ),
    Fault(
        name="own name is 127.0.1.1 on all hosts", make=_name_everywhere("127.0.1.1"), net="192.168.77",
        expected=(
            (Kind.ADDRESS, ("h0", "h1", "h2", "h3"), "gloo would take 127.0.1.1"),
            (Kind.ALL_PAIRS, (), "as the addresses above explain"),
        ),
    ),
    Fault(
        name="own name does not resolve", make=lambda lab: lab.own_name(2, ""), net="192.168.77",
        expected=((Kind.ADDRESS, H2, "h2: gloo would take 127.0.0.1"), (Kind.HOST_INBOUND, H2, "h2: inbound blocked")),
    ),
    Fault(
        name="cni0 comes before eth0", make=_bridge_everywhere("cni0", "10.244.0.1/24"), backend="nccl", gloo_too=False,
        expected=(
            (Kind.ADDRESS, ("h0", "h1", "h2", "h3"), "nccl would take 10.244.0.1 on cni0"),
            (Kind.ADDRESS, ("h0", "h1", "h2", "h3"), "would all take the same address 10.244.0.1"),
            (Kind.ALL_PAIRS, (), "as the addresses above explain"),
        ),
    ),
    Fault(
        name="docker0 comes before eth0 and nccl passes over it", make=_bridge_everywhere("docker0", "172.17.0.1/16"),
        backend="nccl", decides=False,
    ),
    Fault(
        name="host frozen", between=lambda lab: lab.freeze(2), backend="nccl",
        expected=((Kind.SILENT, H2, "its kernel takes connections but its process does not answer"),),
    ),
    Fault(
        name="host dead", between=lambda lab: lab.kill(2), backend="nccl",
        expected=((Kind.SILENT, H2, "h2 does not answer"),),
    ),
)  # fmt: skip
