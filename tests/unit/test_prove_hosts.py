"""The store's stage and the matrix put together: whose fault it is that nobody reaches the store, and what each stage took."""

from __future__ import annotations

from ray_nccl_guard.facts import RankFacts
from ray_nccl_guard.network.addresses import AddressChoice, choose
from ray_nccl_guard.network.cells import Cell, Code
from ray_nccl_guard.network.interfaces import Interface
from ray_nccl_guard.network.reach import ConnectResult
from ray_nccl_guard.network.stage import PeersRow
from ray_nccl_guard.probe.meet import Meeting
from ray_nccl_guard.probe.spec import Outcome, ProbeResult, RankTask, Step, StepRecord
from ray_nccl_guard.prove import hosts
from ray_nccl_guard.rung import Rung

HOSTS = 4
TASK = RankTask(run_id="r", backend="gloo", rank=0, world_size=HOSTS, store_host="10.0.0.3", store_port=1)


def choice(host: int) -> AddressChoice:
    here = (Interface(name="eth0", address=f"10.0.0.{host}"),)
    return choose({}, here, own_name=f"10.0.0.{host}", node_ip=f"10.0.0.{host}")


# Rank 0, and so the store, is on h0.
KNOWN = hosts.of([RankFacts(rank=r, host=f"h{r}", node=f"n{r}", addresses=choice(r)) for r in range(HOSTS)])


def meeting(rank: int, blocked: set[tuple[int, int]], *, row: bool = True) -> Meeting:
    """What `rank` saw where the connections in `blocked` are dropped."""
    code = Code.SYN_TIMEOUT if (rank, 0) in blocked else Code.OK
    cells = tuple(
        Cell(src=rank, dst=other, code=Code.SYN_TIMEOUT if (rank, other) in blocked else Code.OK)
        for other in range(HOSTS)
        if other != rank
    )
    return Meeting(
        rank=rank,
        reach=ConnectResult(code=code, seconds=3.0 if code is not Code.OK else 0.01),
        row=PeersRow(rank=rank, choice=choice(rank), rounds=(cells,), seconds=0.5) if row else None,
    )


def everybody(*, to: set[int] | None = None) -> set[tuple[int, int]]:
    targets = set(range(HOSTS)) if to is None else to
    return {(a, b) for a in range(HOSTS) for b in targets if a != b}


def found(blocked: set[tuple[int, int]], *, row: bool = True):
    (one, *_) = hosts.network_findings(KNOWN, [meeting(r, blocked, row=row) for r in range(HOSTS)], TASK)
    return one


def test_a_rule_for_the_whole_cluster_is_not_blamed_on_the_stores_host():
    one = found(everybody())
    assert one.failure == "store_unreachable" and one.decides
    assert (
        "no other host reaches the store 10.0.0.3 port 1 on h0 (SYN_TIMEOUT x3, 3.0 s); every pair of hosts fails"
        in one.text
    )
    assert one.culprit_ranks == (0, 1, 2, 3)


def test_a_firewall_on_the_stores_host_is_told_from_that():
    one = found(everybody(to={0}))
    assert one.culprit_ranks == (0,) and "h0: inbound blocked from every peer" in one.text


def test_without_a_look_around_the_store_alone_speaks():
    one = found(everybody(), row=False)
    assert one.culprit_ranks == (0,) and "inbound TCP to h0 is blocked" in one.text


def test_a_pair_that_holds_the_store_names_both_ends():
    one = found({(2, 0), (0, 2)})
    assert one.failure == "store_unreachable" and one.culprit_ranks == (0, 2) and "pair h0 <-> h2" in one.text


def test_what_the_stages_before_the_child_took_is_kept_with_the_result():
    child = ProbeResult(rank=1, outcome=Outcome.OK, steps=(
        StepRecord(step=Step.STORE, outcome=Outcome.OK, seconds=0.001), StepRecord(step=Step.DEVICE, outcome=Outcome.OK, seconds=1),
    ))  # fmt: skip
    (kept,) = hosts.with_network_times([child], [meeting(1, set())])
    assert [(s.step, s.seconds) for s in kept.steps] == [(Step.STORE, 0.01), (Step.PEERS, 0.5), (Step.DEVICE, 1)]


def test_a_rungs_own_setting_decides_which_addresses_are_judged_and_connected():
    def bridged(host: int) -> AddressChoice:
        here = (Interface(name="cni0", address="10.244.0.1"), Interface(name="eth0", address=f"10.0.0.{host}"))
        return choose({}, here, own_name=f"10.0.0.{host}", node_ip=f"10.0.0.{host}")

    known = hosts.of([RankFacts(rank=r, host=f"h{r}", node=f"n{r}", addresses=bridged(r)) for r in range(HOSTS)])
    plain = hosts.address_findings(known, Rung(backend="nccl"))
    relief = next(f.relief for f in plain if f.relief)
    assert any(f.decides for f in plain) and relief == {"NCCL_SOCKET_IFNAME": "=eth0"}
    assert hosts.address_findings(known, Rung(backend="nccl", env=relief)) == ()
    taken = hosts.under(bridged(2), relief)
    assert taken is not None and taken.nccl.address == "10.0.0.2"
    wrong = hosts.address_findings(known, Rung(backend="nccl", env={"NCCL_SOCKET_IFNAME": "=ib9"}))
    assert all(f.decides for f in wrong) and "ib9" in wrong[0].text
