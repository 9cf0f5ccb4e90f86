"""Which address each library takes: the rules of NCCL and torch over plain values, and this host's own interfaces."""

from __future__ import annotations

import math
import random

import pytest

from ray_nccl_guard.classes import FailureClass
from ray_nccl_guard.network.across import relief_for, together
from ray_nccl_guard.network.addresses import AddressChoice, Library, Trouble, choose, gather
from ray_nccl_guard.network.cells import Cell, Code
from ray_nccl_guard.network.diagnose import diagnose
from ray_nccl_guard.network.findings import Host, Kind
from ray_nccl_guard.network.interfaces import Interface, interfaces, own_name_address, resolve
from ray_nccl_guard.network.plan import all_pairs, first_round, row, second_round

LO = Interface(name="lo", address="127.0.0.1")
LO6 = Interface(name="lo", address="::1")
ETH0 = Interface(name="eth0", address="10.0.0.1")
ETH1 = Interface(name="eth1", address="10.1.0.1")
ETH0_6 = Interface(name="eth0", address="fd00::1")
LINK6 = Interface(name="eth0", address="fe80::1%eth0")
IB0 = Interface(name="ib0", address="10.9.0.1")
DOCKER = Interface(name="docker0", address="172.17.0.1")
CNI = Interface(name="cni0", address="10.244.0.1")
VIRBR = Interface(name="virbr0", address="192.168.122.1")


@pytest.mark.parametrize(
    ("env", "available", "address"),
    [
        ({}, [LO, ETH0, ETH1], "10.0.0.1"),
        ({}, [LO, ETH0, IB0], "10.9.0.1"),
        ({}, [LO, DOCKER, VIRBR, ETH0], "10.0.0.1"),
        ({}, [LO, DOCKER], "172.17.0.1"),
        ({}, [LO, VIRBR], "127.0.0.1"),
        ({}, [LO, CNI, ETH0], "10.244.0.1"),
        ({}, [LO, ETH0, LO6, ETH0_6], "10.0.0.1"),
        ({}, [LO6, ETH0_6], "fd00::1"),
        ({}, [LO6], ""),
        ({}, [LO, Interface(name="eth0", address="10.0.0.1", running=False), ETH1], "10.1.0.1"),
        ({"NCCL_SOCKET_FAMILY": "AF_INET6"}, [LO, ETH0, LO6, ETH0_6], "fd00::1"),
        ({"NCCL_SOCKET_IFNAME": "eth1"}, [LO, ETH0, ETH1], "10.1.0.1"),
        ({"NCCL_SOCKET_IFNAME": "eth"}, [LO, ETH0, ETH1], "10.0.0.1"),
        ({"NCCL_SOCKET_IFNAME": "=eth"}, [LO, ETH0, ETH1], ""),
        ({"NCCL_SOCKET_IFNAME": "=eth1"}, [LO, ETH0, ETH1], "10.1.0.1"),
        ({"NCCL_SOCKET_IFNAME": "^eth0"}, [ETH0, ETH1], "10.1.0.1"),
        ({"NCCL_SOCKET_IFNAME": "^docker,lo"}, [LO, DOCKER, ETH1], "10.1.0.1"),
        ({"NCCL_SOCKET_IFNAME": "^=eth0"}, [ETH0, ETH1], "10.1.0.1"),
        ({"NCCL_SOCKET_IFNAME": "wlan0,eth1"}, [LO, ETH0, ETH1], "10.1.0.1"),
        ({"NCCL_SOCKET_IFNAME": "nope"}, [LO, ETH0], ""),
        ({"NCCL_SOCKET_IFNAME": "e"}, [IB0, ETH0], "10.9.0.1"),  # one character counts as not set (strlen > 1)
    ],
)
def test_nccl_takes_the_interface_that_its_rule_names(env: dict[str, str], available: list[Interface], address: str):
    assert choose(env, available, own_name="10.0.0.1").nccl.address == address


@pytest.mark.parametrize(
    ("env", "own_name", "address"),
    [
        ({}, "10.0.0.1", "10.0.0.1"),
        ({}, "127.0.1.1", "127.0.1.1"),
        ({}, "", "127.0.0.1"),
        ({"GLOO_SOCKET_IFNAME": "eth1"}, "10.0.0.1", "10.1.0.1"),
        ({"GLOO_SOCKET_IFNAME": "eth1,eth0"}, "", "10.1.0.1"),
        ({"GLOO_SOCKET_IFNAME": "eth"}, "10.0.0.1", ""),
        ({"GLOO_SOCKET_IFNAME": "eth1,nope"}, "10.0.0.1", ""),
    ],
)
def test_gloo_takes_its_variable_or_the_own_name_or_loopback(env: dict[str, str], own_name: str, address: str):
    assert choose(env, [LO, ETH0, ETH1], own_name=own_name).gloo.address == address


def troubles(choice: AddressChoice) -> dict[Library, Trouble]:
    return {problem.library: problem.trouble for problem in choice.problems}


@pytest.mark.parametrize(
    ("env", "available", "own_name", "expected"),
    [
        ({}, [LO, ETH0], "10.0.0.1", {}),
        ({}, [LO, ETH0], "127.0.1.1", {Library.GLOO: Trouble.LOOPBACK}),
        ({}, [LO], "", {Library.NCCL: Trouble.LOOPBACK, Library.GLOO: Trouble.LOOPBACK}),
        ({}, [], "10.0.0.1", {Library.NCCL: Trouble.NO_ADDRESS}),
        ({}, [DOCKER], "172.17.0.1", {Library.NCCL: Trouble.BRIDGE, Library.GLOO: Trouble.BRIDGE}),
        ({}, [CNI, ETH0], "10.0.0.1", {Library.NCCL: Trouble.BRIDGE}),
        ({}, [LINK6], "fe80::1%eth0", {Library.NCCL: Trouble.LINK_LOCAL, Library.GLOO: Trouble.LINK_LOCAL}),
        (
            {},
            [LO, Interface(name="eth0", address="10.0.0.1", running=False)],
            "10.0.0.1",
            {Library.NCCL: Trouble.LOOPBACK, Library.GLOO: Trouble.DOWN},
        ),
        ({"NCCL_SOCKET_IFNAME": "eth7"}, [LO, ETH0], "10.0.0.1", {Library.NCCL: Trouble.NO_INTERFACE}),
        ({"GLOO_SOCKET_IFNAME": "eth7"}, [LO, ETH0], "10.0.0.1", {Library.GLOO: Trouble.NO_INTERFACE}),
    ],
)
def test_troubles_are_seen_before_anything_connects(
    env: dict[str, str], available: list[Interface], own_name: str, expected: dict[Library, Trouble]
):
    assert troubles(choose(env, available, own_name=own_name)) == expected


def test_a_missing_interface_says_which_there_are():
    (problem,) = choose({"NCCL_SOCKET_IFNAME": "eth7"}, [LO, ETH0], own_name="10.0.0.1").problems
    assert problem.text == "NCCL_SOCKET_IFNAME=eth7 names no usable interface (there are: lo, eth0)"


def host(index: int, choice: AddressChoice) -> Host:
    return Host(rank=index, name=f"h{index}", ranks=(index,), choice=choice)


def plain(index: int, *extra: Interface, own_name: str = "", net: str = "10.0.0", **env: str) -> Host:
    ip = f"{net}.{index + 1}"
    available = [LO, *extra, Interface(name="eth0", address=ip)]
    return host(index, choose(env, available, own_name=own_name or ip, node_ip=ip))


def test_one_host_may_use_loopback_but_no_missing_interface():
    assert together([plain(0, own_name="127.0.1.1")], Library.GLOO) == ()
    (found,) = together([plain(0, NCCL_SOCKET_IFNAME="eth7")], Library.NCCL)
    assert found.decides and found.hosts == ("h0",)


def test_gloo_lives_with_one_loopback_name_above_all_others_and_not_below():
    ten = together([plain(i, own_name="127.0.1.1" if i == 1 else "") for i in range(3)], Library.GLOO)
    oneninetwo = together(
        [plain(i, own_name="127.0.1.1" if i == 1 else "", net="192.168.0") for i in range(3)], Library.GLOO
    )
    assert [f.decides for f in ten] == [False] and [f.decides for f in oneninetwo] == [True]
    assert ten[0].failure is FailureClass.GLOO_NETWORK and ten[0].text.startswith("h1: gloo would take 127.0.1.1")
    everywhere = together([plain(i, own_name="127.0.1.1") for i in range(3)], Library.GLOO)
    assert [(f.hosts, f.decides) for f in everywhere] == [(("h0", "h1", "h2"), True)]


def test_the_same_private_bridge_on_all_hosts_is_a_duplicate_with_its_relief():
    of = [plain(i, CNI) for i in range(3)]
    found = together(of, Library.NCCL)
    duplicate = next(f for f in found if "same address" in f.text)
    assert duplicate.text.startswith("h0, h1 and h2 would all take the same address 10.244.0.1 for nccl")
    assert duplicate.decides and duplicate.relief == {"NCCL_SOCKET_IFNAME": "=eth0"}
    assert duplicate.gloo_too is False
    assert together(of, Library.GLOO) == ()


def test_a_relief_is_one_setting_that_is_right_on_every_host_or_none():
    ens = host(1, choose({}, [CNI, Interface(name="ens5", address="10.0.0.2")], own_name="10.0.0.2", node_ip="10.0.0.2"))
    assert relief_for([plain(0, CNI), ens], Library.NCCL) == {"NCCL_SOCKET_IFNAME": "=ens5,eth0"}
    # On this host the other one's interface exists too, and is the wrong one.
    both = host(
        1,
        choose(
            {}, [CNI, Interface(name="eth0", address="10.7.0.2"), Interface(name="ens5", address="10.0.0.2")],
            own_name="10.0.0.2", node_ip="10.0.0.2",
        ),
    )  # fmt: skip
    assert relief_for([plain(0, CNI), both], Library.NCCL) == {}
    assert relief_for([plain(0), plain(1)], Library.NCCL) == {}  # nothing to relieve


def test_the_wrong_network_is_told_from_a_blocked_one():
    of = [plain(i, Interface(name="eno1", address=f"172.30.0.{i + 1}")) for i in range(4)]
    seen = [Cell(src=a, dst=b, code=Code.SYN_TIMEOUT) for a in range(4) for b in range(4) if a != b]
    (found,) = diagnose(seen, of, "nccl")
    assert found.kind is Kind.ALL_PAIRS and found.relief == {"NCCL_SOCKET_IFNAME": "=eth0"}
    assert "takes other addresses than those at which the hosts are known to be reachable" in found.text
    assert found.gloo_too is None


def test_an_ipv6_host_among_ipv4_hosts_is_a_remark():
    six = host(2, choose({}, [LO6, ETH0_6], own_name="fd00::1", node_ip="fd00::1"))
    (found,) = together([plain(0), plain(1), six], Library.NCCL)
    assert found.hosts == ("h2",) and not found.decides


def test_this_hosts_interfaces_are_found_loopback_first():
    found = interfaces()
    assert found[0] == Interface(name="lo", address="127.0.0.1")
    assert all(i.name and i.address for i in found)


def test_resolving_has_a_reason_when_it_fails():
    assert "127.0.0.1" in resolve("localhost", 20.0)[0]
    addresses, why = resolve("no-such-host.invalid", 20.0)
    assert addresses == () and "no-such-host.invalid" in why
    assert resolve("no-such-host.invalid", 0.0)[0] == ()


@pytest.mark.parametrize(
    "getent",
    [None, "exit 2", "echo 'fe80::5054:ff:fe12:3456 STREAM localhost'"],
    ids=["none", "it knows no such database", "it leaves out the scope"],
)
def test_a_name_resolves_where_getent_is_of_no_use(getent, tmp_path, monkeypatch):
    if getent is not None:
        (tmp_path / "getent").write_text(f"#!/bin/sh\n{getent}\n")
        (tmp_path / "getent").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "127.0.0.1" in resolve("localhost", 20.0)[0]


def test_getent_is_asked_first_and_only_its_stream_lines_count(tmp_path, monkeypatch):
    (tmp_path / "getent").write_text("#!/bin/sh\necho '10.9.8.7 STREAM x'\necho '10.9.8.6 DGRAM x'\n")
    (tmp_path / "getent").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert resolve("no-such-host.invalid", 20.0) == (("10.9.8.7",), "")


def test_gathering_on_this_host_gives_an_address_that_can_be_bound():
    choice = gather({}, node_ip="127.0.0.1")
    assert choice.nccl.address and choice.node_interface == "lo"
    assert choice.gloo.address in (own_name_address(), "127.0.0.1")


def test_up_to_sixty_four_hosts_every_pair_is_tried():
    assert first_round(range(64)) == all_pairs(range(64))
    assert len(all_pairs(range(64))) == 64 * 63


def test_a_large_world_is_tried_sparsely_with_the_bootstrap_ring_and_root_in_it():
    count = 1024
    pairs = first_round(range(count))
    assert all((rank, (rank + 1) % count) in pairs and (rank, 0) in pairs for rank in range(1, count))
    per_host = [len(row(pairs, rank)) for rank in range(1, count)]
    assert max(per_host) <= 2 * math.ceil(math.log2(count)) + 1
    assert second_round([Cell(src=a, dst=b, code=Code.OK) for a, b in pairs], range(count)) == frozenset()


@pytest.mark.parametrize("seed", range(3))
def test_the_second_round_is_the_rows_and_columns_of_the_host_at_fault(seed: int):
    bad = random.Random(seed).randrange(1, 256)
    cells = [Cell(src=a, dst=b, code=Code.SYN_TIMEOUT if b == bad else Code.OK) for a, b in sorted(first_round(range(256)))]
    more = second_round(cells, range(256))
    assert all(bad in pair for pair in more)
    tried = {(cell.src, cell.dst) for cell in cells}
    assert not tried & more
    whole = {pair for other in range(256) if other != bad for pair in ((bad, other), (other, bad))}
    assert whole <= tried | more


def test_a_cluster_wide_fault_asks_for_no_second_round():
    cells = [Cell(src=a, dst=b, code=Code.SYN_TIMEOUT) for a, b in first_round(range(256))]
    assert second_round(cells, range(256)) == frozenset()


def test_a_name_that_did_not_resolve_in_time_is_not_held_against_the_host():
    here = (Interface(name="lo", address="127.0.0.1"), Interface(name="eth0", address="10.0.0.5"))
    unknown = choose({}, here, own_name=None, node_ip="10.0.0.5")
    assert unknown.gloo.address == "10.0.0.5" and unknown.problems == ()
    assert [p.trouble for p in choose({}, here, own_name="", node_ip="10.0.0.5").problems] == [Trouble.LOOPBACK]
