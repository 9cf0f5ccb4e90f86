"""How long the peers check takes: one host against many listeners, and N x N over the fault lab's hosts.

    python benchmarks/reachability.py [--rounds 5] [--json]

The N x N part needs the rights of tests/net (root, nftables) and says so if it lacks them. Figures of one machine: all
hosts of the lab share its cores, so a real cluster, with cores of its own per host, is faster. What a round takes on 1,024
hosts is an estimate: the schedule's busiest host, at the measured cost of one host against as many targets. A whole healthy stage
of 1,024 hosts is put together from its parts (benchmarks/wide_world.py).
"""

from __future__ import annotations

import json
import os
import resource
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import harness, wide_world
from ray_nccl_guard.network.cells import Code, Target
from ray_nccl_guard.network.peers import probe
from ray_nccl_guard.network.plan import first_round
from tests.net.netlab import REPOSITORY, Lab, why_not
from tests.net.stages import Stages

HOST, RUN = wide_world.ADDRESS, wide_world.RUN
# What the check of a healthy network may take at most with so many hosts.
BUDGET_S, WIDE = 2.0, 1024


# Many listeners in one process: each port answers as the rank of its own, as that many hosts would.
SERVER = """
import json, resource, selectors, socket, sys
from ray_nccl_guard.network import wire
count, run = int(sys.argv[1]), sys.argv[2]
resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
selector, ports = selectors.DefaultSelector(), []
for rank in range(count):
    server = socket.create_server(("127.0.0.1", 0), backlog=8)
    selector.register(server, selectors.EVENT_READ, rank)
    ports.append(server.getsockname()[1])
print(json.dumps(ports), flush=True)
while True:
    for key, _ in selector.select():
        if isinstance(key.data, int):
            peer = key.fileobj.accept()[0]
            peer.setblocking(False)
            selector.register(peer, selectors.EVENT_READ, [key.data, 0])
            continue
        state = key.data
        try:
            data = key.fileobj.recv(1 << 18)
        except OSError:
            data = b""
        before, state[1] = state[1], state[1] + len(data)
        if not data:
            selector.unregister(key.fileobj)
            key.fileobj.close()
            continue
        if before < wire.HELLO_BYTES <= state[1]:
            key.fileobj.send(wire.hello(state[0], run))
        if before < wire.HELLO_BYTES + wire.BULK_BYTES <= state[1]:
            key.fileobj.send(wire.ACK)
"""


@contextmanager
def servers(count: int) -> Iterator[list[int]]:
    """The ports of that many listeners, in a process of their own."""
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-c", SERVER, str(count), RUN]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True)
    try:
        assert server.stdout is not None
        yield json.loads(server.stdout.readline())
    finally:
        server.kill()
        server.communicate()


def one_against(count: int, dropped: int = 0) -> tuple[float, float]:
    """Wall and CPU seconds of one host against `count` targets, `dropped` of which never answer (a full backlog drops SYNs as a firewall does)."""
    with servers(count - dropped) as ports, ExitStack() as stack:
        full = stack.enter_context(closing(socket.create_server((HOST, 0), backlog=0)))
        for _ in range(4):
            filler = stack.enter_context(closing(socket.socket()))
            filler.setblocking(False)
            filler.connect_ex(full.getsockname())
        ports = [*ports, *[full.getsockname()[1]] * dropped]
        targets = [Target(rank=rank, address=HOST, port=port) for rank, port in enumerate(ports)]
        begin_s, begin_cpu_s = time.monotonic(), time.process_time()
        cells = probe(count, targets, run_id=RUN)
        took = time.monotonic() - begin_s, time.process_time() - begin_cpu_s
    answered = sum(cell.code is Code.OK for cell in cells)
    assert answered == count - dropped, f"{answered} of {count - dropped} answered"
    return took


def matrix(count: int, blocked: bool) -> float:
    """Seconds for all pairs of `count` lab hosts and the diagnosis."""
    with Lab(count) as lab:
        if blocked:
            lab.close_ports(count - 1)
        return Stages(lab, "gloo").peers().seconds


def single_host(rounds: int) -> list[dict[str, Any]]:
    """Rows: one host against many targets, all answering, and a third of them dropping every packet."""
    cases = {
        **{f"{count} targets": (count, 0) for count in (63, 255, 1023)},
        **{f"{count} targets, {count // 3} of them dropped": (count, count // 3) for count in (255, 1023)},
    }
    taken = harness.alternate({name: lambda c=case: one_against(*c) for name, case in cases.items()}, rounds=rounds)  # type: ignore[misc]
    return [
        {
            "table": "one host", "case": name, "unit": "s", **harness.summary([wall for wall, _ in values]),
            "CPU s": harness.summary([cpu for _, cpu in values])["median"],
        }
        for name, values in taken.items()
    ]  # fmt: skip


def schedule(against: dict[int, float]) -> list[dict[str, Any]]:
    """Rows: what the first round asks of how many hosts, and what it would take at the measured cost per target."""
    rows = []
    for count in (64, 256, 1024):
        asked = Counter(source for source, _ in first_round(range(count)))
        busiest = max(asked.values())
        rows.append({
            "table": "the first round's schedule", "case": f"{count} hosts", "connections": sum(asked.values()),
            "all pairs": count * (count - 1), "of a host, mean": round(sum(asked.values()) / count, 1),
            "of the busiest host": busiest, "estimate, s": against[busiest],
        })  # fmt: skip
    return rows


def wide(rounds: int) -> list[dict[str, Any]]:
    """Rows: each part of a healthy stage of `WIDE` hosts in CPU seconds, and all of them together."""
    taken = [wide_world.parts(WIDE, servers) for _ in range(rounds)]
    values = {part: [one[part] for one in taken] for part in taken[0]}
    values["all parts"] = [sum(one.values()) for one in taken]
    table = f"a healthy stage of {WIDE} hosts, by its parts"
    return [{"table": table, "case": part, "unit": "CPU s", **harness.summary(v)} for part, v in values.items()]


def lab(rounds: int) -> list[dict[str, Any]]:
    """Rows: N x N over the hosts of the lab, healthy and with one of them behind a firewall."""
    cases = {
        f"{count} hosts, {'inbound of one dropped' if blocked else 'healthy'}": (count, blocked)
        for blocked in (False, True)
        for count in (4, 8, 16)
    }
    taken = harness.alternate(
        {name: lambda c=case: matrix(*c) for name, case in cases.items()},  # type: ignore[misc]
        rounds=rounds,
        warm_up=0,
    )
    return [{"table": "N x N in the lab", "case": name, "unit": "s", **harness.summary(v)} for name, v in taken.items()]


def main() -> None:
    parser = harness.arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 8192)), hard))
    top = harness.head("The peers check: one host against many, and N x N")
    rows = single_host(args.rounds)
    against = {int(row["case"].split()[0]): row["median"] for row in rows if "dropped" not in row["case"]}
    rows += schedule(against)
    rows += wide(min(args.rounds, 3))
    within = "within" if rows[-1]["median"] <= BUDGET_S else "ABOVE"
    found = [
        f"One host against 1,023 targets takes {against[1023]:.2g} s.",
        f"A healthy stage of {WIDE} hosts takes {rows[-1]['median']:.2g} s by its parts, {within} its budget of {BUDGET_S:g} s.",
    ]
    reason = why_not()
    if reason is None:
        rows += lab(min(args.rounds, 3))
        by_case = {row["case"]: row["median"] for row in rows if row["table"] == "N x N in the lab"}
        found.append(
            f"N x N over 16 hosts on this machine takes {by_case['16 hosts, healthy']:.2g} s healthy and "
            f"{by_case['16 hosts, inbound of one dropped']:.2g} s with one host's inbound dropped."
        )
    harness.show(args, top, rows, [f"N x N was not run: {reason}"] if reason else [], found=found)


if __name__ == "__main__":
    main()
