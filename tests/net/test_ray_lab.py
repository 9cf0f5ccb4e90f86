"""A real Ray cluster over the lab's hosts, whose own ports stay open, and a guarded fit() over networks that are broken for all else.

Every node has one fake GPU. The faults strike only new connections to ports that are not Ray's: what a security group does,
and what users meet.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.fakegpu.double import CannotBuild, build
from tests.net.faults import RAY_PORTS
from tests.net.netlab import REPOSITORY, Lab, read_line

pytest.importorskip("ray", reason="ray is not installed")
pytest.importorskip("torch", reason="torch is not installed")
pytestmark = [pytest.mark.usefixtures("lab_works"), pytest.mark.slow, pytest.mark.timeout(900)]

HOSTS = 4
FIXED = {
    "node-manager-port": 7000, "object-manager-port": 7001, "metrics-export-port": 7002, "dashboard-agent-grpc-port": 7003,
    "dashboard-agent-listen-port": 7004, "runtime-env-agent-port": 7005, "min-worker-port": 7010, "max-worker-port": 7099,
    "num-cpus": 2, "num-gpus": 1, "object-store-memory": 100 << 20,
}  # fmt: skip
# Ray's nodes and four imports of torch on shared cores.
START_LIMIT_S, FIT_LIMIT_S = 180.0, 500.0
# The goal with deadlines of 3 s: from the start of the check to the sentence.
SENTENCE_S = 15.0


def refuse_new(lab: Lab, sources: list[int], target: int, how: str = "drop") -> None:
    """New connections of these hosts to `target` fail, but for those to Ray's ports."""
    verdict = {"drop": "drop", "reset": "reject with tcp reset"}[how]
    rules = [
        f"ip saddr {lab.ip(source)} ct state new tcp dport != {{ {RAY_PORTS} }} {verdict}"
        for source in sources
        if source != target
    ]
    lab._nft(target, "input", *rules)


def others(target: int) -> list[int]:
    return [host for host in range(HOSTS) if host != target]


def everywhere_closed(lab: Lab) -> None:
    for host in range(HOSTS):
        refuse_new(lab, others(host), host)


def one_pair(lab: Lab) -> None:
    refuse_new(lab, [1], 2)
    refuse_new(lab, [2], 1)


def outbound(lab: Lab) -> None:
    lab._nft(2, "output", "oif lo accept", f"ct state new tcp dport != {{ {RAY_PORTS} }} drop")


def heal(lab: Lab) -> None:
    for host in range(HOSTS):
        subprocess.run(
            lab.command(host, ["nft", "delete", "table", "inet", "fault"]), capture_output=True, timeout=20, check=False
        )
        lab.own_name(host, lab.ip(host))
        subprocess.run(lab.command(host, ["ip", "link", "del", "cni0"]), capture_output=True, timeout=20, check=False)


def loopback_names(lab: Lab) -> None:
    for host in range(HOSTS):
        lab.own_name(host, "127.0.1.1")


def private_bridge(lab: Lab) -> None:
    for host in range(HOSTS):
        lab.add_interface(host, "cni0", "10.244.0.1/24")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One fault and what has to come of it.

    Attributes:
        action: the report's.
        hosts: names that the culprits' ranks have to be on; empty if all or none are at fault.
        failures: classes that are right. Where rank 0, and so the store, lands is Ray's to choose: a fault of its host shows
            at the store, the same fault elsewhere between the peers.
        says: a piece of the sentence, one of several for the same reason.
    """

    name: str
    make: Callable[[Lab], None] = field(default=lambda lab: None)
    backend: str = "gloo"
    action: str = "refuse"
    hosts: frozenset[str] = frozenset()
    failures: tuple[str, ...] = ("gloo_network", "store_unreachable")
    says: tuple[str, ...] = ("",)
    relief: dict[str, str] = field(default_factory=dict)


H2 = frozenset({"h2"})
IN_THE_GATE = {
    "healthy, nccl", "the direction that gloo needs", "a private bridge before eth0, and NCCL's setting cures it",
}  # fmt: skip
NCCL = ("nccl_bootstrap_network", "store_unreachable")
CASES = [
    Case(name="healthy, gloo", action="proceed", failures=("ok",)),
    Case(name="healthy, nccl", backend="nccl", action="proceed", failures=("ok",)),
    Case(name="every port but Ray's closed", make=everywhere_closed, backend="nccl", failures=NCCL,
         says=("every pair of hosts fails",)),
    Case(name="one host inbound dropped", make=lambda lab: refuse_new(lab, others(2), 2), hosts=H2,
         says=("h2: inbound blocked", "on h2")),
    Case(name="one host inbound dropped, and gloo needs it too", make=lambda lab: refuse_new(lab, others(2), 2), backend="nccl",
         hosts=H2, failures=NCCL, says=("h2: inbound blocked", "on h2")),
    Case(name="one host inbound reset", make=lambda lab: refuse_new(lab, others(2), 2, "reset"), hosts=H2,
         says=("ECONNREFUSED",)),
    Case(name="two hosts inbound dropped", make=lambda lab: [refuse_new(lab, others(h), h) for h in (1, 2)] and None,
         hosts=frozenset({"h1", "h2"}), says=("h1: inbound blocked", "h2: inbound blocked", "on h1", "on h2")),
    Case(name="one host outbound dropped", make=outbound, hosts=H2, says=("h2: outbound blocked", "h2 cannot reach", "on h2")),
    Case(name="one pair", make=one_pair, hosts=frozenset({"h1", "h2"}), says=("pair h1 <-> h2", "on h1", "on h2")),
    Case(name="the direction that gloo needs", make=lambda lab: refuse_new(lab, [2], 1), hosts=frozenset({"h1", "h2"}),
         says=("h2 -> h1", "on h1", "on h2")),
    Case(name="own names are loopback, and gloo's setting cures it", make=loopback_names, action="fall_back",
         failures=("gloo_network",), says=("127.0.1.1",), relief={"GLOO_SOCKET_IFNAME": "eth0"}),
    Case(name="a private bridge before eth0, and NCCL's setting cures it", make=private_bridge, backend="nccl", action="fall_back",
         failures=("nccl_bootstrap_network",), says=("10.244.0.1",), relief={"NCCL_SOCKET_IFNAME": "=eth0"}),
]  # fmt: skip


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Lab, subprocess.Popen[bytes]]]:
    try:
        double = build()
    except CannotBuild as reason:
        pytest.skip(f"the double cannot be built: {reason}")
    folder = tmp_path_factory.mktemp("ray-lab")
    with Lab(HOSTS) as lab:
        for host in range(HOSTS):
            own = double.env(devices=1, node=f"h{host}", state=folder / f"gpu{host}", ops=True)
            (folder / f"gpu{host}").mkdir()
            start_ray(lab, host, own, folder / f"ray{host}.log")
        environment = {**os.environ, "RAY_AUTH_MODE": "disabled", "PYTHONPATH": str(REPOSITORY)}
        command = lab.command(
            0, [sys.executable, "-m", "tests.net.ray_driver", f"{lab.ip(0)}:6379", str(HOSTS), str(folder)]
        )
        with open(folder / "driver.log", "wb") as log:
            driver = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
                env=environment,
            )  # fmt: skip
        try:
            line = read_line(driver, START_LIMIT_S)
            assert line == "ready", f"{line}: {(folder / 'driver.log').read_text()[-3000:]}"
            yield lab, driver
        finally:
            driver.kill()
            driver.wait(timeout=20)


def start_ray(lab: Lab, host: int, own: dict[str, str], log: Path) -> None:
    where = ["--head", "--port=6379", "--include-dashboard=false"] if host == 0 else [f"--address={lab.ip(0)}:6379"]
    fixed = [f"--{name}={value}" for name, value in FIXED.items()]
    program = [sys.executable, "-m", "ray.scripts.scripts", "start", *where, f"--node-ip-address={lab.ip(host)}", *fixed]
    path = f"{own.get('PYTHONPATH', '')}:{REPOSITORY}".lstrip(":")
    environment = {**os.environ, **own, "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": path}
    with open(log, "wb") as output:
        done = subprocess.run(
            lab.command(host, program), env=environment, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
            timeout=START_LIMIT_S, check=False,
        )  # fmt: skip
    assert done.returncode == 0, log.read_text()[-3000:]


def fit(driver: subprocess.Popen[bytes], case: Case) -> dict[str, Any]:
    assert driver.stdin is not None
    driver.stdin.write(json.dumps({"name": case.name, "backend": case.backend, "workers": HOSTS}).encode() + b"\n")
    driver.stdin.flush()
    end_s = time.monotonic() + FIT_LIMIT_S
    while line := read_line(driver, max(0.1, end_s - time.monotonic())):
        result: dict[str, Any] = json.loads(line)
        if result["name"] == case.name:  # else the late answer of a case that was given up
            return result
    raise AssertionError(f"no answer of the driver within {FIT_LIMIT_S:g} s")


def named(case: Case) -> Any:
    return pytest.param(case, id=case.name, marks=[] if case.name in IN_THE_GATE else [pytest.mark.long])


@pytest.mark.parametrize("case", [named(case) for case in CASES])
def test_the_sentence_names_the_host_and_the_decision_is_right(cluster, case: Case):
    lab, driver = cluster
    try:
        case.make(lab)
        started_s = time.monotonic()
        came = fit(driver, case)
    finally:
        heal(lab)
    report = came["report"]
    assert report, came["error"]
    verdict, seen = report["verdict"], (time.monotonic() - started_s, came["error"][:500], report["because"])
    print(f"\n{case.name}: {verdict['failure']}: {verdict['summary']} [{report['timings_s']['guard']:.1f} s]")
    assert report["action"] == case.action and verdict["failure"] in case.failures, (verdict, seen)
    assert any(piece in verdict["summary"] for piece in case.says) or case.action == "proceed", verdict["summary"]
    hosts = {rank["host"] for rank in report["ranks"] if rank["rank"] in verdict["culprit_ranks"]}
    assert not case.hosts or (hosts and hosts <= case.hosts), (hosts, verdict["summary"])
    assert report["relief"] == case.relief
    # Four nodes of Ray and four workers share this machine with whatever else runs on it.
    crowded = max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
    assert report["timings_s"]["guard"] <= SENTENCE_S * crowded, (report["timings_s"], crowded)
    if case.action == "refuse":
        assert came["trained_on"] == [] and "training refused" in came["error"], came["error"]
    else:
        assert came["trained_on"] == [report["backend_chosen"]] * HOSTS
