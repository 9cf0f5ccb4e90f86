"""Every fault of the lab through the address and peers stages: the sentence names the right host, pair or direction."""

from __future__ import annotations

import time

import pytest

from ray_nccl_guard.classes import FailureClass
from tests.net.faults import FAULTS, Fault
from tests.net.netlab import Lab
from tests.net.stages import Stages

pytestmark = pytest.mark.usefixtures("lab_works")

# The promise of the whole guard for a fault that the network stages can see.
SENTENCE_WITHIN_S = 15.0


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_the_sentence_names_the_right_host_pair_or_direction(fault: Fault, record_property: pytest.RecordProperty) -> None:
    with Lab(4, net=fault.net) as lab:
        fault.make(lab)
        begin_s = time.monotonic()
        outcome = Stages(lab, fault.backend).peers(between=lambda: fault.between(lab), deadline_s=fault.deadline_s)
        took_s = time.monotonic() - begin_s
    texts = [finding.text for finding in outcome.findings]
    record_property("seconds", round(took_s, 2))
    record_property("sentences", texts)
    assert [(f.kind, f.hosts) for f in outcome.findings] == [(kind, hosts) for kind, hosts, _ in fault.expected], texts
    for text, (_, _, words) in zip(texts, fault.expected, strict=True):
        assert words in text
    assert fault.decides in (None, any(finding.decides for finding in outcome.findings)), texts
    if fault.expected and fault.backend == "nccl":
        assert outcome.findings[0].gloo_too is fault.gloo_too
    assert took_s < SENTENCE_WITHIN_S


def test_the_bridge_that_nccl_takes_comes_with_the_setting_that_avoids_it() -> None:
    fault = next(f for f in FAULTS if f.name == "cni0 comes before eth0")
    with Lab(4) as lab:
        fault.make(lab)
        outcome = Stages(lab, "nccl").peers()
    assert {tuple(finding.relief.items()) for finding in outcome.findings} == {(("NCCL_SOCKET_IFNAME", "=eth0"),)}


def test_two_hosts_have_a_pair_but_no_culprit() -> None:
    with Lab(2) as lab:
        lab.close_ports(1)
        (found,) = Stages(lab, "nccl").peers().findings
    assert found.text == "h0 -> h1: this direction only (SYN_TIMEOUT)"


STORE = 29500


def test_a_store_that_all_reach_says_nothing() -> None:
    with Lab(4) as lab:
        assert Stages(lab, "gloo").store(STORE) == ()


def test_a_host_cut_off_from_the_store_is_named() -> None:
    with Lab(4) as lab:
        lab.drop_pair(0, 2)
        (found,) = Stages(lab, "gloo").store(STORE)
    assert found.failure is FailureClass.STORE_UNREACHABLE and found.hosts == ("h2",)
    assert f"rank 2 on h2 cannot reach the store 10.77.0.1 port {STORE} on h0 (SYN_TIMEOUT x1" in found.text


def test_a_store_behind_a_firewall_is_its_own_hosts_fault() -> None:
    with Lab(4) as lab:
        lab.close_ports(0)
        (found,) = Stages(lab, "gloo").store(STORE)
    assert found.hosts == ("h0",) and "inbound TCP to h0 is blocked" in found.text


def test_a_store_that_never_came_up_is_refused_not_timed_out() -> None:
    with Lab(4) as lab:
        (found,) = Stages(lab, "gloo").store(STORE, served_by=None)
    assert found.hosts == ("h0",) and "ECONNREFUSED" in found.text and "nothing listens there" in found.text


def test_a_host_that_is_gone_is_a_missing_rank() -> None:
    with Lab(4) as lab:
        stages = Stages(lab, "gloo")
        assert stages.store(STORE) == ()
        lab.kill(3)
        (found,) = stages.store(STORE, served_by=None)
    assert found.failure is FailureClass.MISSING_RANK and found.ranks == (3,)


@pytest.mark.parametrize("name", ["store.invalid", "h9"])
def test_a_store_name_without_an_address_is_said(name: str) -> None:
    from ray_nccl_guard.network.cells import Code

    with Lab(2) as lab:
        stages = Stages(lab, "gloo")
        said = stages._all([{"do": "connect", "host": name, "port": 1, "deadline_s": 3.0}] * 2, 30.0)
    assert [result.code for result in said] == [Code.NO_ADDRESS] * 2
