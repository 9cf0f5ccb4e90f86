"""A healthy peers stage of many hosts, put together from its parts: what one host does for it, and what all do to the store.

Every part is the code that a run executes, at the full number of hosts; only the hosts' machines are missing, so each part is
given in the CPU seconds of the one process that it keeps busy (real hosts have cores of their own). The network's own delay is
not in it: a healthy stage waits for some fifteen answers one after another, 0.2 ms each within a data centre.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

from ray_nccl_guard.network.addresses import AddressChoice, choose
from ray_nccl_guard.network.cells import Cell, Code, Target, pack
from ray_nccl_guard.network.findings import Host
from ray_nccl_guard.network.interfaces import Interface
from ray_nccl_guard.network.listener import Listener
from ray_nccl_guard.network.peers import probe
from ray_nccl_guard.network.plan import first_round, row
from ray_nccl_guard.network.stage import PeersRow, diagnose_rows
from ray_nccl_guard.network.steadiness import wants_more_rounds
from ray_nccl_guard.probe.exchange import Exchange

ADDRESS, RUN = "127.0.0.1", "wide"

# Every host of the world calls rank 0's, one after another; rank 0's own time is what counts here.
_CALLERS = """
import sys
from ray_nccl_guard.network.cells import Target
from ray_nccl_guard.network.peers import probe
count, port = int(sys.argv[1]), int(sys.argv[2])
cells = [probe(r, [Target(rank=0, address="127.0.0.1", port=port)], run_id="wide", deadline_s=20.0)[0] for r in range(1, count)]
sys.exit(not all(cell.ok for cell in cells))
"""

_STORE = """
import sys
from datetime import timedelta
import torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, None, True, timeout=timedelta(seconds=60), wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


def parts(count: int, servers: Callable[[int], Any]) -> dict[str, float]:
    """CPU seconds of each part of the stage with `count` hosts; they follow one another, so they add up.

    Args:
        servers: a context manager that serves that many hosts' listeners and gives their ports.
    """
    pairs = first_round(range(count))
    with servers(count) as ports:
        targets = [Target(rank=rank, address=ADDRESS, port=port) for rank, port in enumerate(ports)]
        called_s = _called(count)
        calling_s = _cpu(lambda: _all_ok(probe(0, targets, run_id=RUN, deadline_s=30.0)))
        mine = row(pairs, count // 2)
        _all_ok(probe(count // 2, [targets[peer] for peer in mine], run_id=RUN))
    # What a host says in a healthy stage (network.stage): where it listens, nothing of the round, and that it is through.
    words = {"listen": json.dumps(["10.100.200.30", 65535]).encode(), "round 1": pack(()), "done": b""}
    store_s, host_s = exchanges(count, words)
    return {
        "the plan: who connects to whom": _cpu(lambda: row(first_round(range(count)), count // 2)),
        f"{len(words)} exchanges, the store's part": store_s,
        f"{len(words)} exchanges, one host's part": host_s,
        f"rank 0's host connects to {count - 1}": calling_s,
        f"rank 0's host answers {count - 1}": called_s,
        "one host looks at all cells of the round": _cpu(lambda: wants_more_rounds(_cells(pairs))),
        "the diagnosis of all rows": _diagnosis(count, pairs),
    }


def connections(count: int) -> int:
    """Connections of the first round that an ordinary host begins."""
    return len(row(first_round(range(count)), count // 2))


def exchanges(count: int, words: Mapping[str, bytes]) -> tuple[float, float]:
    """CPU seconds of the store, and of one host, until all hosts know what all said, word after word."""
    # torch's store looks up the name of whoever calls, a thousand times here: one lost answer must not cost 5 s each.
    os.environ |= {"TORCH_CPP_LOG_LEVEL": "ERROR", "RES_OPTIONS": "timeout:1 attempts:1"}
    import torch.distributed as dist

    def client(port: int) -> Any:
        return dist.TCPStore(ADDRESS, port, None, False, timeout=timedelta(seconds=60), wait_for_workers=False)

    server = subprocess.Popen([sys.executable, "-c", _STORE], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert server.stdout is not None
        port = int(server.stdout.readline())
        with ThreadPoolExecutor(count) as pool:
            stores = list(pool.map(lambda _: client(port), range(count)))
            hosts = [Exchange(store, rank, range(count)) for rank, store in enumerate(stores)]
            begin_s, store_begin_s = time.process_time(), _cpu_of(server.pid)
            for name, word in words.items():
                said = list(pool.map(lambda one, name=name, word=word: one(name, word, 60.0), hosts))  # type: ignore[misc]
                assert all(len(one) == count for one in said), "a host missed what another said"
            return _cpu_of(server.pid) - store_begin_s, (time.process_time() - begin_s) / count
    finally:
        server.kill()
        server.communicate()


def _cpu_of(pid: int) -> float:
    """CPU seconds of another process so far: utime and stime of proc(5)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _called(count: int) -> float:
    """CPU seconds of rank 0's host while all others call it."""
    with Listener(ADDRESS, rank=0, run_id=RUN, deadline_s=120.0) as listener:
        command = [sys.executable, "-c", _CALLERS, str(count), str(listener.port)]
        return _cpu(lambda: subprocess.run(command, check=True, timeout=120))


def _diagnosis(count: int, pairs: frozenset[tuple[int, int]]) -> float:
    rows: dict[int, list[Cell]] = {rank: [] for rank in range(count)}
    for cell in _cells(pairs):
        rows[cell.src].append(cell)
    said = [PeersRow(rank=rank, choice=_choice(rank), rounds=(tuple(cells),)) for rank, cells in rows.items()]
    hosts = [Host(rank=rank, name=f"h{rank}", ranks=(rank,)) for rank in range(count)]
    found: list[object] = []
    took_s = _cpu(lambda: found.extend(diagnose_rows(said, hosts, "nccl")))
    assert not found, found
    return took_s


def _cells(pairs: frozenset[tuple[int, int]]) -> list[Cell]:
    return [Cell(src=a, dst=b, code=Code.OK, connect_s=1e-3, rtt_s=1e-3) for a, b in pairs]


def _choice(rank: int) -> AddressChoice:
    address = f"10.0.{rank // 250}.{rank % 250 + 1}"
    return choose({}, [Interface(name="eth0", address=address)], own_name=address, node_ip=address)


def _all_ok(cells: tuple[Cell, ...]) -> None:
    assert all(cell.ok for cell in cells), {cell.code for cell in cells}


def _cpu(work: Callable[[], object]) -> float:
    begin_s = time.process_time()
    work()
    return time.process_time() - begin_s
