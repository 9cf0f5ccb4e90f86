"""`probe --from-env` over hosts of the lab, as two pods of a Job run it: what the network does to it is named with its host."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable

import pytest

from tests.fakegpu.double import CannotBuild, build
from tests.net.netlab import REPOSITORY, Lab

pytest.importorskip("torch", reason="torch is not installed")
pytestmark = pytest.mark.usefixtures("lab_works")

# Imports of torch, one a host on shared cores, and the probe's own deadlines.
LIMIT_S = 200.0


def probe(
    lab: Lab, *words: str, backend: str = "gloo", env: Callable[[int], dict[str, str]] = lambda host: {}
) -> tuple[list[int], dict, list[str]]:
    """Exit codes by host, rank 0's report, and what each host wrote to stderr."""
    processes = []
    for host in range(lab.count):
        own = {"RANK": str(host), "WORLD_SIZE": str(lab.count), "MASTER_ADDR": lab.ip(0), "MASTER_PORT": "29500"}
        command = lab.command(
            host, [sys.executable, "-m", "ray_nccl_guard", "probe", "--from-env", "--backend", backend, "--json", *words]
        )
        processes.append(subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", *command], env={**os.environ, **own, **env(host), "PYTHONPATH": str(REPOSITORY)},
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        ))  # fmt: skip
    try:
        said = [process.communicate(timeout=LIMIT_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [process.returncode for process in processes], json.loads(said[0][0]), [err for _, err in said]


def test_two_hosts_prove_gloo_over_their_network():
    with Lab(2) as lab:
        codes, report, said = probe(lab)
    assert codes == [0, 0], said
    assert [r["host"] for r in report["ranks"]] == ["h0", "h1"]
    assert [r["address"] for r in report["ranks"]] == ["10.77.0.1", "10.77.0.2"]
    assert report["timings_s"]["peers"] < 5


def test_hosts_that_have_only_ipv6_prove_gloo():
    with Lab(2) as lab:
        lab.only_ipv6()
        codes, report, said = probe(lab)
    assert codes == [0, 0], said
    assert [r["address"] for r in report["ranks"]] == ["fd77::1", "fd77::2"]


@pytest.mark.parametrize(
    "make, culprits, says",
    [
        pytest.param(lambda lab: lab.close_ports(1), [1], "h1: inbound blocked", id="inbound"),
        pytest.param(lambda lab: lab.drop_syn(2, 1), [1, 2], "h2 -> h1", id="one direction", marks=pytest.mark.long),
    ],
)
def test_a_fault_between_hosts_is_named_before_gloo_waits_for_it(make: Callable[[Lab], None], culprits, says):
    with Lab(3) as lab:
        make(lab)
        codes, report, said = probe(lab, "--timeout", "3")
    assert codes == [20, 20, 20], said
    assert report["verdict"]["failure"] == "gloo_network" and says in report["verdict"]["summary"], report["verdict"]
    assert sorted(report["verdict"]["culprit_ranks"]) == culprits
    assert report["attempts"][0]["network"]["failed"] > 0, "the matrix is in the report"
    assert report["attempts"][0]["seconds"] < 15


@pytest.mark.long
def test_a_firewall_that_gloo_never_meets_refuses_nobody():
    with Lab(3) as lab:
        lab.close_ports(2)  # gloo connects from the larger address to the smaller, and nobody's is larger than h2's
        codes, report, said = probe(lab, "--timeout", "3")
    assert codes == [0, 0, 0], said
    assert report["verdict"]["failure"] == "ok"


@pytest.mark.long
@pytest.mark.parametrize(
    "make, why",
    [
        pytest.param(lambda lab: lab.drop_pair(0, 2), "no answer from 10.77.0.1", id="dropped"),
        pytest.param(lambda lab: lab.no_route_at_all(2), "cannot be reached: Network is unreachable", id="no route at all"),
    ],
)
def test_a_host_that_cannot_reach_the_store_says_so_itself_and_is_missing_to_the_others(make, why):
    with Lab(3) as lab:
        make(lab)
        codes, report, said = probe(lab, "--wait", "25")
    assert codes == [20, 20, 20]
    assert report["verdict"]["failure"] == "missing_rank" and report["verdict"]["culprit_ranks"] == [2]
    assert "rank 2 does not reach the store" in said[2] and why in said[2]


def test_two_hosts_whose_gpus_have_one_index_are_told_apart_and_a_fault_of_one_is_its_own(tmp_path):
    try:
        double = build()
    except CannotBuild as reason:
        pytest.skip(f"the double cannot be built: {reason}")

    def gpu(host: int) -> dict[str, str]:
        (tmp_path / f"h{host}").mkdir()
        options = {"devices": 1, "node": f"h{host}", "state": tmp_path / f"h{host}", "fault": "init:error=2@hosth1"}
        return {"LOCAL_RANK": "0", **double.env(**options)}

    with Lab(2) as lab:
        codes, report, said = probe(lab, backend="nccl", env=gpu)
    assert codes == [10, 10], said
    assert (report["verdict"]["failure"], report["verdict"]["culprit_ranks"]) == ("unknown", [1]), "and no duplicate GPU"
    assert report["backend_chosen"] == "gloo" and report["attempts"][0]["backend"] == "nccl"
    cards = [rank["gpu"]["uuid"] for rank in report["ranks"]]
    assert len(set(cards)) == 2 and [rank["host"] for rank in report["ranks"]] == ["h0", "h1"]
