"""The diagnosis over matrices that faults of the lab gave, as plain values: no socket is opened here."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from ray_nccl_guard.classes import FailureClass
from ray_nccl_guard.network.addresses import choose
from ray_nccl_guard.network.cells import Cell, Code
from ray_nccl_guard.network.diagnose import diagnose
from ray_nccl_guard.network.findings import Host, Kind, NetworkFinding, gloo_initiates, listed
from ray_nccl_guard.network.interfaces import Interface
from ray_nccl_guard.network.reach import ConnectResult
from ray_nccl_guard.network.steadiness import slow_ranks, wants_more_rounds
from ray_nccl_guard.network.store import listen_failed, store_findings

S, R, U, B = Code.SYN_TIMEOUT, Code.ECONNREFUSED, Code.EHOSTUNREACH, Code.BULK_STALL
Rule = Callable[[int, int], Code | None]


def host(index: int, *, gpus: int = 1, ip: str = "", gloo_ip: str = "", net: str = "10.0.0") -> Host:
    ip = ip or f"{net}.{index + 1}"
    choice = choose({}, [Interface(name="eth0", address=ip)], own_name=gloo_ip or ip, node_ip=ip)
    return Host(rank=index * gpus, name=f"h{index}", ranks=tuple(range(index * gpus, (index + 1) * gpus)), choice=choice)


def hosts(count: int, **options: object) -> list[Host]:
    return [host(index, **options) for index in range(count)]  # type: ignore[arg-type]


def cells(of: Sequence[Host], rule: Rule, *, rtt_s: float = 0.0005, retransmits: int = 0) -> list[Cell]:
    """One cell per ordered pair; `rule` takes host indices and says what fails."""
    return [
        Cell(src=a.rank, dst=b.rank, code=rule(i, j) or Code.OK, rtt_s=rtt_s, retransmits=retransmits)
        for i, a in enumerate(of)
        for j, b in enumerate(of)
        if i != j
    ]


def only(found: Sequence[NetworkFinding]) -> NetworkFinding:
    assert len(found) == 1, [finding.text for finding in found]
    return found[0]


def test_a_healthy_matrix_says_nothing():
    assert diagnose(cells(hosts(4), lambda a, b: None), hosts(4), "nccl") == ()


def test_a_host_that_nobody_reaches_is_inbound_blocked_and_its_ranks_are_named():
    of = hosts(4, gpus=8)
    found = only(diagnose(cells(of, lambda a, b: S if b == 2 else None), of, "nccl"))
    assert found.kind is Kind.HOST_INBOUND
    assert found.text.startswith("h2: inbound blocked from every peer (SYN_TIMEOUT x3), outbound works")
    assert found.ranks == tuple(range(16, 24))
    assert found.decides and found.failure is FailureClass.NCCL_BOOTSTRAP_NETWORK and found.gloo_too is True


def test_a_host_that_reaches_nobody_is_outbound_blocked():
    of = hosts(4)
    found = only(diagnose(cells(of, lambda a, b: Code.EPERM if a == 1 else None), of, "gloo"))
    assert found.kind is Kind.HOST_OUTBOUND and found.hosts == ("h1",)
    assert found.failure is FailureClass.GLOO_NETWORK


def test_a_cable_out_is_one_sentence_about_one_host():
    of = hosts(4)
    found = only(diagnose(cells(of, lambda a, b: S if 2 in (a, b) else None), of, "gloo"))
    assert found.kind is Kind.HOST_BOTH and found.hosts == ("h2",)
    assert "nobody reaches it and it reaches nobody" in found.text


def test_two_blocked_hosts_are_two_sentences():
    of = hosts(5)
    found = diagnose(cells(of, lambda a, b: R if b in (1, 3) else None), of, "nccl")
    assert [(f.kind, f.hosts) for f in found] == [(Kind.HOST_INBOUND, ("h1",)), (Kind.HOST_INBOUND, ("h3",))]


def test_a_blocked_host_and_one_direction_elsewhere_are_both_found():
    of = hosts(5)
    found = diagnose(cells(of, lambda a, b: S if b == 3 or (a, b) == (0, 1) else None), of, "nccl")
    assert [f.kind for f in found] == [Kind.HOST_INBOUND, Kind.DIRECTION]
    assert found[1].text.startswith("h0 -> h1: this direction only (SYN_TIMEOUT)")


def test_a_pair_is_a_pair_and_no_direction_is_claimed():
    of = hosts(4)
    found = only(diagnose(cells(of, lambda a, b: S if {a, b} == {1, 2} else None), of, "gloo"))
    assert found.kind is Kind.PAIR and found.hosts == ("h1", "h2")
    assert found.text == "pair h1 <-> h2: both directions fail (SYN_TIMEOUT / SYN_TIMEOUT)"


def test_a_missing_route_blames_the_host_that_lacks_it():
    of = hosts(4)
    found = only(diagnose(cells(of, lambda a, b: {(2, 1): U, (1, 2): S}.get((a, b))), of, "gloo"))
    assert found.hosts == ("h2",)
    assert "h2 itself has no way to h1" in found.text


@pytest.mark.parametrize("count", [3, 4, 8])
def test_every_pair_failing_is_a_rule_for_the_cluster(count: int):
    of = hosts(count)
    found = only(diagnose(cells(of, lambda a, b: S), of, "nccl"))
    assert found.kind is Kind.ALL_PAIRS and found.hosts == ()
    assert "a security group without a rule that refers to itself" in found.text
    assert found.decides


def test_two_hosts_are_a_pair_never_a_cluster_or_a_host():
    of = hosts(2)
    assert only(diagnose(cells(of, lambda a, b: S), of, "nccl")).kind is Kind.PAIR
    assert only(diagnose(cells(of, lambda a, b: S if a == 0 else None), of, "nccl")).kind is Kind.DIRECTION


def test_one_host_and_none_have_nothing_to_say():
    assert diagnose([], hosts(1), "nccl") == ()
    assert diagnose([], [], "nccl") == ()


def test_an_mtu_mismatch_is_told_from_a_slow_path():
    of = hosts(4)

    def stall(a: int, b: int) -> Code | None:
        return B if 2 in (a, b) else None

    mtu = only(diagnose(cells(of, stall, rtt_s=0.002), of, "gloo"))
    slow = only(diagnose(cells(of, stall, rtt_s=0.6), of, "gloo"))
    assert mtu.kind is slow.kind is Kind.BULK
    assert "small messages pass, 64 KiB stalls both ways (a hello takes 2 ms): packets above the path's MTU" in mtu.text
    assert "a very slow path" in slow.text
    assert mtu.decides


def test_a_bulk_stall_alone_does_not_refuse_nccl_whose_data_may_take_another_network():
    of = hosts(4)
    assert not only(diagnose(cells(of, lambda a, b: B if 2 in (a, b) else None), of, "nccl")).decides


def test_a_stranger_at_the_address_is_said():
    of = hosts(4)
    found = only(diagnose(cells(of, lambda a, b: Code.WRONG_PEER if b == 1 else None), of, "nccl"))
    assert found.kind is Kind.WRONG_PEER and "10.0.0.2" in found.text


def test_a_frozen_host_is_a_missing_rank_and_hides_nothing():
    of = hosts(4)
    of[2] = Host(rank=2, name="h2", ranks=(2,), choice=of[2].choice, answered=False)
    seen = [c for c in cells(of, lambda a, b: Code.NO_ECHO if b == 2 else S if {a, b} == {0, 1} else None) if c.src != 2]
    found = diagnose(seen, of, "gloo")
    assert [f.kind for f in found] == [Kind.SILENT, Kind.PAIR]
    assert found[0].failure is FailureClass.MISSING_RANK and found[0].ranks == (2,)
    assert "its kernel takes connections but its process does not answer" in found[0].text


@pytest.mark.parametrize(
    ("code", "words"), [(S, "SYN_TIMEOUT x3 (down, or cut off)"), (None, "answered its peers but did not report")]
)
def test_a_host_without_a_row_says_what_its_peers_saw(code: Code | None, words: str):
    of = hosts(4)
    of[2] = Host(rank=2, name="h2", ranks=(2,), choice=of[2].choice, answered=False)
    seen = [c for c in cells(of, lambda a, b: code if b == 2 else None) if c.src != 2]
    assert words in only(diagnose(seen, of, "nccl")).text


def test_untried_pairs_are_neither_passes_nor_failures():
    of = hosts(4)
    assert diagnose(cells(of, lambda a, b: Code.NOT_TRIED if a == 0 else None), of, "nccl") == ()
    found = only(diagnose([Cell(src=0, dst=1, code=S)], of[:2], "nccl"))
    assert "the other direction was not tried" in found.text


def test_gloo_is_hurt_only_by_a_direction_from_the_larger_address_to_the_smaller():
    of = hosts(4)
    down = only(diagnose(cells(of, lambda a, b: S if (a, b) == (2, 1) else None), of, "gloo"))
    up = only(diagnose(cells(of, lambda a, b: S if (a, b) == (1, 2) else None), of, "gloo"))
    assert down.decides and not up.decides
    assert "gloo does not connect that way" in up.text
    assert gloo_initiates("10.0.0.10", "10.0.0.9") is True  # numbers, not text
    assert gloo_initiates("fd00::1", "fd00::2") is None


def test_nccl_is_stopped_only_by_pairs_its_bootstrap_needs():
    of = hosts(5)
    ring = only(diagnose(cells(of, lambda a, b: S if (a, b) == (2, 3) else None), of, "nccl"))
    back = only(diagnose(cells(of, lambda a, b: S if (a, b) == (3, 2) else None), of, "nccl"))
    root = only(diagnose(cells(of, lambda a, b: S if (a, b) == (3, 0) else None), of, "nccl"))
    assert ring.decides and root.decides and not back.decides
    assert "NCCL's bootstrap does without it" in back.text


def test_the_ring_follows_the_ranks_where_they_alternate_between_hosts():
    a = Host(rank=0, name="a", ranks=(0, 2), choice=host(0).choice)
    b = Host(rank=1, name="b", ranks=(1, 3), choice=host(1).choice)
    c = Host(rank=4, name="c", ranks=(4,), choice=host(2).choice)
    found = only(diagnose([Cell(src=1, dst=4, code=S), Cell(src=4, dst=1, code=Code.OK)], [a, b, c], "nccl"))
    assert found.decides


def test_gloo_shares_a_blocked_way_only_if_it_takes_the_same_address_and_direction():
    def inbound(a: int, b: int) -> Code | None:
        return S if (a, b) == (0, 1) else None

    of = hosts(3)
    assert only(diagnose(cells(of, inbound), of, "nccl")).gloo_too is False  # 10.0.0.1 never calls 10.0.0.2
    elsewhere = [host(i, gloo_ip=f"192.168.0.{i + 1}") for i in range(3)]
    assert only(diagnose(cells(elsewhere, inbound), elsewhere, "nccl")).gloo_too is None
    assert only(diagnose(cells(of, lambda a, b: S if (a, b) == (1, 0) else None), of, "nccl")).gloo_too is True


def test_loss_is_named_only_when_three_rounds_agree():
    of = hosts(4)

    def round_(*lossy: tuple[int, int]) -> list[Cell]:
        return [
            Cell(src=c.src, dst=c.dst, code=c.code, rtt_s=c.rtt_s, retransmits=int((c.src, c.dst) in lossy))
            for c in cells(of, lambda a, b: None)
        ]

    rounds = [round_((0, 2), (2, 1), (2, 3)), round_((1, 2), (2, 0)), round_((3, 2), (2, 3), (0, 1))]
    assert wants_more_rounds(rounds[0]) and not wants_more_rounds(cells(of, lambda a, b: None))
    assert diagnose(rounds[0], of, "gloo") == ()
    found = only(diagnose(rounds[0], of, "gloo", more_rounds=rounds[1:]))
    assert found.kind is Kind.LOSSY and found.hosts == ("h2",) and not found.decides
    rounds[2] = round_((0, 1))
    assert diagnose(rounds[0], of, "gloo", more_rounds=rounds[1:]) == ()


def test_a_pair_that_passes_in_one_round_is_not_called_blocked():
    of = hosts(4)
    fails, passes = cells(of, lambda a, b: S if (a, b) == (1, 2) else None), cells(of, lambda a, b: None)
    assert diagnose(fails, of, "gloo", more_rounds=[passes, fails]) == ()


def test_a_slow_host_is_named_without_being_refused():
    of = hosts(4)
    seen = [
        Cell(src=c.src, dst=c.dst, code=Code.OK, rtt_s=0.6 if 2 in (c.src, c.dst) else 0.001)
        for c in cells(of, lambda a, b: None)
    ]
    found = only(diagnose(seen, of, "nccl"))
    assert found.kind is Kind.SLOW and found.text.startswith("h2: slow, every peer waits 600 ms")
    assert not found.decides
    every = only(diagnose(cells(of, lambda a, b: None, rtt_s=0.3), of, "nccl"))
    assert every.hosts == () and every.text.startswith("every pair of hosts is slow")


def test_the_finding_for_the_verdict_carries_ranks_and_whether_gloo_has_it_too():
    of = hosts(3)
    finding = only(diagnose(cells(of, lambda a, b: S if b == 1 else None), of, "nccl")).finding()
    assert finding.failure == "nccl_bootstrap_network" and finding.culprit_ranks == (1,) and finding.decides
    assert finding.text.endswith("gloo has the same problem")


def test_a_thousand_hosts_are_a_short_sentence():
    assert listed(["a"]) == "a"
    assert listed(["a", "b"]) == "a and b"
    assert listed([f"h{i}" for i in range(1000)]) == "h0, h1, h2, h3, h4, h5 and 994 more"


def connects(*codes: Code) -> dict[int, ConnectResult]:
    return {rank: ConnectResult(code=code, seconds=0.1 if code is Code.OK else 3.0) for rank, code in enumerate(codes)}


def test_a_host_that_cannot_reach_the_store_is_named():
    found = only(store_findings(connects(Code.OK, Code.OK, S, Code.OK), hosts(4), store="10.0.0.1 port 29500"))
    assert found.failure is FailureClass.STORE_UNREACHABLE and found.ranks == (2,) and found.gloo_too is True
    assert found.text == (
        "rank 2 on h2 cannot reach the store 10.0.0.1 port 29500 on h0 (SYN_TIMEOUT x1, 3.0 s); 3 others reach it"
    )


@pytest.mark.parametrize(("code", "words"), [(R, "nothing listens there"), (S, "inbound TCP to h0 is blocked")])
def test_a_store_that_nobody_reaches_is_its_own_hosts_fault(code: Code, words: str):
    found = only(store_findings(connects(Code.OK, code, code, code), hosts(4), store="10.0.0.1 port 29500"))
    assert found.hosts == ("h0",) and words in found.text


def test_ranks_that_said_nothing_are_missing_not_unreachable():
    found = only(store_findings(connects(Code.OK, Code.OK), hosts(3), store="s"))
    assert found.failure is FailureClass.MISSING_RANK and found.ranks == (2,)
    assert found.text == "rank 2 on h2 never arrived at the store s; 2 of 3 ranks did"
    late = only(store_findings(connects(Code.OK, Code.OK, Code.OK), hosts(3), store="s", absent=[1]))
    assert late.ranks == (1,)


def test_a_store_that_all_reach_says_nothing():
    assert store_findings(connects(Code.OK, Code.OK), hosts(2), store="s") == ()


def test_a_taken_port_is_told_from_another_reason():
    import errno

    taken = listen_failed(OSError(errno.EADDRINUSE, "x"), host=host(0), port=29500)
    other = listen_failed(OSError(errno.EADDRNOTAVAIL, "x"), host=host(0), port=29500)
    assert taken.failure is FailureClass.PORT_IN_USE and "another process has the port" in taken.text
    assert other.failure is FailureClass.STORE_UNREACHABLE


def test_a_stage_that_passed_far_slower_than_the_others_is_a_finding():
    of = hosts(4)
    found = slow_ranks("comm_init", {0: 0.2, 1: 0.2, 2: 10.0, 3: 0.3}, of)
    assert found is not None and found.ranks == (2,) and not found.decides
    assert found.text == "comm_init passed but took 10.0 s on rank 2 on h2, where the median is 0.2 s"
    assert slow_ranks("comm_init", {0: 0.001, 1: 0.001, 2: 0.5}, of) is None
    assert slow_ranks("comm_init", {0: 0.2, 1: 10.0}, of) is None
