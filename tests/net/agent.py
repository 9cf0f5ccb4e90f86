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
from ray_nccl_guard.network.cells import Target
from ray_nccl_guard.network.listener import Listener
from ray_nccl_guard.network.peers import probe
from ray_nccl_guard.network.reach import connect

RUN_ID = "lab"


def answer(value: Any) -> None:
    print(base64.b64encode(pickle.dumps(value)).decode(), flush=True)


def main(rank: int, backend: str, node_ip: str) -> None:
    opened: list[Any] = []
    for line in sys.stdin:
        command = json.loads(line)
        what = command.pop("do")
        if what == "listen":
            choice = addresses.gather(os.environ, node_ip=node_ip, deadline_s=2.0)
            address = choice.of(addresses.Library.GLOO if backend == "gloo" else addresses.Library.NCCL).address
            port = 0
            if address:
                listener = Listener(address, rank=rank, run_id=RUN_ID, deadline_s=60.0).__enter__()
                opened.append(listener)
                port = listener.port
            answer((choice, Target(rank=rank, address=address, port=port) if port else None))
        elif what == "probe":
            targets = [Target(**target) for target in command["targets"]]
            answer(probe(rank, targets, run_id=RUN_ID, deadline_s=command["deadline_s"]))
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
