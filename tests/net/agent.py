"""One host's side of the network stages, driven by lines: what a launcher does there, without Ray and without torch.

Reads one JSON command a line on stdin, writes one base64 pickle a line on stdout. Ends when stdin does.
"""

from __future__ import annotations

import base64
import json
import os
import pickle
import socket
import sys
from typing import Any

from ray_nccl_guard.network import addresses
from ray_nccl_guard.network.reach import connect
from ray_nccl_guard.network.stage import peers_stage


def answer(value: Any) -> None:
    print(base64.b64encode(pickle.dumps(value)).decode(), flush=True)


def exchange(name: str, mine: bytes, deadline_s: float) -> dict[int, bytes]:
    """Through whoever started us, who knows all hosts."""
    answer((name, mine, deadline_s))
    given: dict[int, bytes] = pickle.loads(base64.b64decode(sys.stdin.readline()))
    return given


def main(rank: int, backend: str, node_ip: str) -> None:
    opened: list[Any] = []
    # Not `for line in sys.stdin`, which reads ahead of the exchange's own lines.
    while line := sys.stdin.readline():
        command = json.loads(line)
        what = command.pop("do")
        if what == "peers":
            choice = addresses.gather(os.environ, node_ip=node_ip, deadline_s=2.0)
            row = peers_stage(
                rank=rank, speakers=command["speakers"], choice=choice, backend=backend, run_id="lab", exchange=exchange,
                deadline_s=command["deadline_s"],
            )  # fmt: skip
            answer(row)
        elif what == "serve":
            server = socket.create_server((node_ip, command["port"]), reuse_port=False)
            opened.append(server)
            answer(True)
        elif what == "connect":
            answer(connect(command["host"], command["port"], command["deadline_s"]))
    for thing in opened:
        thing.close()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
