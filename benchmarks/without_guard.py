"""The arms of time_to_verdict.py without the guard: the same faults met by plain torch, on the double and in the lab."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from tests.fakegpu.double import Double
from tests.fakegpu.matrix import Case
from tests.fakegpu.ranks import Ended, Ranks
from tests.net.faults import FAULTS
from tests.net.netlab import REPOSITORY, Lab, read_line

BACKEND = "nccl"
# What plain torch is shown: a fault that raises, one in the warm-up of the communicator, one in a collective, and a death.
PLAIN = ("story-4-workers", "init-hangs-on-one", "collective-hangs-on-one", "killed")
PLAIN_NETWORK = ("pair dropped",)
# Longest that plain torch is waited for, in timeouts: the watchdog adds its own waits to the timeout, a hang without one none.
PATIENCE = 3


def environment(double: Double, case: Case, state: str) -> dict[str, str]:
    env = {**double.env(devices=8, state=state, fault=case.fault, **case.options), **case.env}
    return {name: value for name, value in env.items() if name.startswith(("FAKE_", "NCCL_", "CUDA_"))}


def struck_at(state: str) -> float:
    """When the fault struck, in seconds of the epoch; 0 if it never did."""
    stamp = Path(state, "struck")
    return stamp.stat().st_mtime if stamp.exists() else 0.0


def ready(rank: int, world: int) -> None:
    """Nothing: the rank server answers once torch is imported."""


def plain(rank: int, world: int, *, backend: str, timeout_s: float) -> None:
    """One rank without the guard: the process group as TorchConfig forms it, and the first all_reduce of a step."""
    import torch
    import torch.distributed as dist

    torch.cuda.set_device(rank)
    dist.init_process_group(backend, rank=rank, world_size=world, timeout=timedelta(seconds=timeout_s))
    tensor = torch.zeros(8 << 20, device="cuda")
    dist.all_reduce(tensor)
    torch.cuda.synchronize()
    # A job goes on to its next step: the watchdog that has ended the collective ends the process half a second later.
    time.sleep(PATIENCE * timeout_s)


def unguarded(server: Ranks, double: Double, case: Case, timeout_s: float) -> dict[str, Any]:
    """A row: the same fault met by plain torch."""
    limit_s = PATIENCE * timeout_s
    with tempfile.TemporaryDirectory() as state:
        env = {**environment(double, case, state), "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
        started_s = time.time()
        ranks = server.run(
            "benchmarks.without_guard:plain", case.ranks, deadline_s=limit_s, env=env, backend=BACKEND, timeout_s=timeout_s
        )
        struck_s = struck_at(state) or started_s
    row = {
        "table": f"without it, fake GPUs, timeout_s={timeout_s:g}", "case": f"{case.name}, {case.ranks} ranks",
        "fault": f"`{case.fault}`", "unit": "s to an error",
    }  # fmt: skip
    spoke = sorted((one for one in ranks if not one.hung and one.exit_code != 0), key=lambda one: one.seconds)
    if not spoke:
        return {**row, "first error": f"none in {limit_s:g} s"}
    left = any(one.hung for one in ranks)
    first_s, last_s = (max(started_s + one.seconds - struck_s, 0.0) for one in (spoke[0], spoke[-1]))
    return {
        **row, "seconds": first_s, "first error": _said(spoke[0]), "all ended s": f"not in {limit_s:g}" if left else last_s,
    }  # fmt: skip


def _said(ended: Ended) -> str:
    text = f"{ended.error_type}: {ended.error_text}"
    if ended.error_type is None:
        text = f"dies of {signal.Signals(ended.signal).name}" if ended.signal else f"exits with {ended.exit_code}"
    return f"rank {ended.rank}: " + text.splitlines()[0][:90].replace("|", "/")


def plain_network(names: Sequence[str], timeout_s: float) -> list[dict[str, Any]]:
    """Rows: real gloo over faults of the lab."""
    command = [sys.executable, str(REPOSITORY / "tests/net/gloo_world.py")]
    world = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    rows = []
    try:
        if read_line(world, 120.0) != "ready":
            raise SystemExit("the processes that ask gloo did not start")
        for fault in (fault for fault in FAULTS if fault.name in names):
            with Lab(4, net=fault.net) as lab:
                fault.make(lab)
                # Its mesh waits five times the timeout (measured); the rest is room.
                question = {"pids": [lab.first_process(host) for host in range(4)], "store": f"{lab.ip(0)}:29500"}
                line = json.dumps({**question, "limit_s": 7 * timeout_s, "timeout_s": timeout_s})
                started_s = time.monotonic()
                assert world.stdin is not None
                world.stdin.write(line.encode() + b"\n")
                world.stdin.flush()
                said = json.loads(read_line(world, 8 * timeout_s) or "[]")
                seconds = time.monotonic() - started_s
            first = next(((rank, text) for rank, text in enumerate(said) if text), (None, "no error"))
            rows.append({
                "table": f"without it, network lab, timeout_s={timeout_s:g}", "case": f"{fault.name} (gloo)",
                "unit": "s to all ranks' errors", "seconds": seconds,
                "first error": f"rank {first[0]}: {first[1].splitlines()[0][:120].replace('|', '/')}",
            })  # fmt: skip
    finally:
        world.kill()
        world.wait()
    return rows
