"""How long the peers check takes: one host against many listeners, and N x N over the fault lab's hosts.

    python benchmarks/reachability.py [--json]

The N x N part needs the rights of tests/net (root, nftables) and says so if it lacks them. Figures of one machine: all
hosts of the lab share its cores, so a real cluster, with cores of its own per host, is faster.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, closing
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ray_nccl_guard.network.cells import Code, Target
from ray_nccl_guard.network.peers import probe
from ray_nccl_guard.network.plan import first_round
from tests.net.netlab import REPOSITORY, Lab, why_not
from tests.net.stages import Stages

HOST, RUN = "127.0.0.1", "benchmark"


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


def one_against(count: int, dropped: int = 0) -> dict[str, float]:
    """One host against `count` targets, `dropped` of which never answer (a full backlog drops SYNs as a firewall does)."""
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-c", SERVER, str(count - dropped), RUN]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True)
    try:
        assert server.stdout is not None
        ports = json.loads(server.stdout.readline())
        with ExitStack() as stack:
            full = stack.enter_context(closing(socket.create_server((HOST, 0), backlog=0)))
            for _ in range(4):
                filler = stack.enter_context(closing(socket.socket()))
                filler.setblocking(False)
                filler.connect_ex(full.getsockname())
            ports += [full.getsockname()[1]] * dropped
            targets = [Target(rank=rank, address=HOST, port=port) for rank, port in enumerate(ports)]
            begin_s, begin_cpu_s = time.monotonic(), time.process_time()
            cells = probe(count, targets, run_id=RUN)
            took = {
                "seconds": round(time.monotonic() - begin_s, 3),
                "cpu_s": round(time.process_time() - begin_cpu_s, 3),
            }
    finally:
        server.kill()
        server.communicate()
    answered = sum(cell.code is Code.OK for cell in cells)
    assert answered == count - dropped, f"{answered} of {count - dropped} answered"
    return took


def matrix(count: int, blocked: bool) -> float:
    """Seconds for all pairs of `count` lab hosts and the diagnosis."""
    with Lab(count) as lab:
        if blocked:
            lab.close_ports(count - 1)
        return Stages(lab, "gloo").peers().seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true")
    as_json = parser.parse_args().json
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 8192)), hard))
    result: dict[str, object] = {
        "one host": {str(count): one_against(count) for count in (63, 255, 1023)},
        "one host, a third dropped": {str(count): one_against(count, count // 3) for count in (255, 1023)},
        "connections per host, first round": {
            str(count): round(len(first_round(range(count))) / count, 1) for count in (64, 256, 1024)
        },
    }
    reason = why_not()
    if reason:
        result["N x N"] = f"not run: {reason}"
    else:
        result["N x N healthy_s"] = {str(count): matrix(count, blocked=False) for count in (4, 8, 16)}
        result["N x N one host blocked_s"] = {str(count): matrix(count, blocked=True) for count in (4, 8, 16)}
    if as_json:
        print(json.dumps(result))
        return
    for name, value in result.items():
        print(f"{name}: {value}")


if __name__ == "__main__":
    main()
