"""Seconds from a fault to the sentence that names it: every kind of fault of the fake GPUs and of the network lab.

    python benchmarks/time_to_verdict.py [--quick] [--timeouts 10 30] [--json]

Fake GPUs (tests/fakegpu): whole pre-flights with the guard's own deadlines, from the moment in which the fault strikes (where
nothing strikes, since facts decide, from the start) to the message: small worlds that locate it and the rungs that follow
included. `named` is when the first probe's verdict stood. Network lab (tests/net, root): from the first connection to the findings.
Without the guard: init_process_group and one all_reduce as TorchConfig and a first step make them, with a stated `timeout_s`,
until the first rank ends in an error or dies; on the lab, until every rank of gloo has said something. Real torch on a double:
when NCCL fails is modelled there, what torch then does is not.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import harness
from tests.fakegpu.double import Double, build
from tests.fakegpu.matrix import CASES, Case
from tests.fakegpu.ranks import Ended, Ranks
from tests.net.faults import FAULTS, Fault
from tests.net.netlab import REPOSITORY, Lab, read_line, why_not
from tests.net.stages import Stages

BACKEND = "nccl"
# What plain torch is shown: a fault that raises, one in the warm-up of the communicator, one in a collective, and a death.
PLAIN = ("story-4-workers", "init-hangs-on-one", "collective-hangs-on-one", "killed")
PLAIN_NETWORK = ("pair dropped",)
# Longest that plain torch is waited for, in timeouts: the watchdog adds its own waits to the timeout, a hang without one none.
PATIENCE = 3


def representatives(quick: bool) -> list[Case]:
    """The first case of each class, step and action that goes wrong; with `quick`, of each action, cured by a setting or not."""
    chosen: dict[tuple[str | None, ...], Case] = {}
    for case in CASES:
        if case.failure != "ok" and case.policy == "default" and not case.slow and "@shared" not in case.fault:
            action = re.search(r":([a-z-]+)", case.fault)
            kind = action[1] if action else case.name
            short = (kind.removesuffix("-gil"), str(bool(case.relief)))
            chosen.setdefault(short if quick else (case.failure, case.step, kind), case)
    return list(chosen.values())


def network_representatives(quick: bool) -> list[Fault]:
    """Every fault of the lab that is found; with `quick`, the first of each kind of finding."""
    chosen: dict[Any, Fault] = {}
    for fault in FAULTS:
        if fault.expected:
            chosen.setdefault(fault.expected[0][0] if quick else fault.name, fault)
    return list(chosen.values())


def guarded(server: Ranks, double: Double, case: Case) -> dict[str, Any]:
    """A row: one pre-flight of a fault."""
    with tempfile.TemporaryDirectory() as state:
        (ended,) = server.run(
            "tests.fakegpu.guarded:preflight", 1, deadline_s=240, env=_environment(double, case, state), ranks=case.ranks,
            backend=BACKEND, spec={}, devices=case.devices, asked_gpus=case.asked_gpus, policy=case.policy, touched=case.touched,
        )  # fmt: skip
        if ended.value is None:
            return {"table": "with the guard", "case": case.name, "named": f"no report: {ended.output[-200:]}"}
        began_s = ended.value["ended_at_s"] - ended.value["seconds"]
        struck_s = _struck(state) or began_s
    report = ended.value["report"]
    verdict = report["verdict"]
    return {
        "table": "with the guard, fake GPUs", "case": f"{case.name}, {case.ranks} ranks", "unit": "s to the sentence",
        "median": ended.value["ended_at_s"] - struck_s, "named s": began_s + report["attempts"][0]["seconds"] - struck_s,
        "named": f"{verdict['failure']}{_on(verdict['culprit_ranks'])}",
        "then": report["backend_chosen"] if report["action"] in ("proceed", "fall_back") else report["action"],
        "as the matrix expects": (verdict["failure"], tuple(verdict["culprit_ranks"])) == _expected(case),
    }  # fmt: skip


def _expected(case: Case) -> tuple[str, tuple[int, ...]]:
    said = case.expected(BACKEND)
    return said["failure"], tuple(said["culprits"])


def _on(ranks: Sequence[int]) -> str:
    return f" on {', '.join(map(str, ranks))}" if ranks else ""


def _environment(double: Double, case: Case, state: str) -> dict[str, str]:
    env = {**double.env(devices=8, state=state, fault=case.fault, **case.options), **case.env}
    return {name: value for name, value in env.items() if name.startswith(("FAKE_", "NCCL_", "CUDA_"))}


def _struck(state: str) -> float:
    """When the fault struck, in seconds of the epoch; 0 if it never did."""
    stamp = Path(state, "struck")
    return stamp.stat().st_mtime if stamp.exists() else 0.0


def plain(rank: int, world: int, *, backend: str, timeout_s: float) -> float:
    """One rank without the guard: the process group as TorchConfig forms it, and the first all_reduce of a step."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    torch.cuda.set_device(rank)
    dist.init_process_group(backend, rank=rank, world_size=world, timeout=timedelta(seconds=timeout_s))
    tensor = torch.zeros(8 << 20, device="cuda")
    dist.all_reduce(tensor)
    torch.cuda.synchronize()
    return float(tensor[0])


def unguarded(server: Ranks, double: Double, case: Case, timeout_s: float) -> dict[str, Any]:
    """A row: the same fault met by plain torch."""
    limit_s = PATIENCE * timeout_s
    with tempfile.TemporaryDirectory() as state:
        env = {**_environment(double, case, state), "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
        started_s = time.time()
        ranks = server.run(
            "benchmarks.time_to_verdict:plain", case.ranks, deadline_s=limit_s, env=env, backend=BACKEND, timeout_s=timeout_s
        )
        struck_s = _struck(state) or started_s
    row = {
        "table": f"without it, fake GPUs, timeout_s={timeout_s:g}",
        "case": f"{case.name}, {case.ranks} ranks",
        "unit": "s to an error",
    }
    spoke = sorted((one for one in ranks if not one.hung and one.exit_code != 0), key=lambda one: one.seconds)
    if not spoke:
        return {**row, "first error": f"none in {limit_s:g} s: all ranks hang"}
    hang = sum(one.hung for one in ranks)
    seconds = max(started_s + spoke[0].seconds - struck_s, 0.0)
    return {
        **row,
        "median": seconds,
        "first error": _said(spoke[0]),
        "still hanging then": f"{hang} of {len(ranks)}" if hang else None,
    }


def _said(ended: Ended) -> str:
    text = f"{ended.error_type}: {ended.error_text}" if ended.error_type else f"dies of signal {ended.signal}"
    return f"rank {ended.rank}: " + text.splitlines()[0][:90].replace("|", "/")


def network(fault: Fault) -> dict[str, Any]:
    """A row: one fault of the lab through the address and peers stages."""
    with Lab(4, net=fault.net) as lab:
        fault.make(lab)
        outcome = Stages(lab, fault.backend).peers(between=lambda: fault.between(lab), deadline_s=fault.deadline_s)
    texts = [finding.text for finding in outcome.findings]
    return {
        "table": "with the guard, network lab", "case": f"{fault.name} ({fault.backend})", "unit": "s to the sentence",
        "median": outcome.seconds, "sentence": texts[0].replace("|", "/") if texts else "nothing found",
        "as the lab expects": [(f.kind, f.hosts) for f in outcome.findings] == [(k, h) for k, h, _ in fault.expected],
    }  # fmt: skip


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
                "unit": "s to all ranks' errors", "median": seconds,
                "first error": f"rank {first[0]}: {first[1].splitlines()[0][:120].replace('|', '/')}",
            })  # fmt: skip
    finally:
        world.kill()
        world.wait()
    return rows


def main() -> None:
    parser = harness.arguments(__doc__)
    parser.add_argument("--quick", action="store_true", help="one case of each kind of action and finding, within 4 minutes")
    parser.add_argument(
        "--timeouts", type=float, nargs="+", metavar="S", help="timeout_s of plain torch (default: 10 30; 10)"
    )
    args = parser.parse_args()
    timeouts = args.timeouts or ([10.0] if args.quick else [10.0, 30.0])
    top, rows, notes = harness.head("From a fault to the sentence that names it"), [], []
    with tempfile.TemporaryDirectory() as ledger:
        double = build()
        with Ranks(double.env(devices=8, ops=True, state=ledger)) as server:
            rows += [guarded(server, double, case) for case in representatives(args.quick)]
            for timeout_s in timeouts:
                rows += [unguarded(server, double, case, timeout_s) for case in CASES if case.name in PLAIN]
    reason = why_not()
    if reason is None:
        rows += [network(fault) for fault in network_representatives(args.quick)]
        rows += plain_network(PLAIN_NETWORK, 3.0 if args.quick else timeouts[0])
    else:
        notes.append(f"The network lab was not run: {reason}.")
    harness.show(args, top, rows, notes, found=_found(rows))


def _found(rows: Sequence[dict[str, Any]]) -> list[str]:
    found = []
    for table in dict.fromkeys(row["table"] for row in rows):
        timed = [row for row in rows if row["table"] == table and "median" in row]
        if table.startswith("with the guard") and timed:
            slowest, all_s = max(timed, key=lambda row: row["median"]), harness.summary([row["median"] for row in timed])
            found.append(
                f"{table[0].upper()}{table[1:]}: {len(timed)} kinds of fault, median {all_s['median']:.2g} s to the sentence, "
                f"slowest {slowest['median']:.2g} s ({slowest['case']})."
            )
        elif timed or table.startswith("without"):
            told = "; ".join(
                f"{row['case'].partition(',')[0]} {row['median']:.2g} s"
                if "median" in row
                else f"{row['case'].partition(',')[0]} never"
                for row in rows
                if row["table"] == table
            )
            found.append(f"{table[0].upper()}{table[1:]}: {told}.")
    return found


if __name__ == "__main__":
    main()
