"""Seconds from a fault to the sentence that names it: every kind of fault of the fake GPUs and of the network lab.

    python benchmarks/time_to_verdict.py [--quick] [--timeouts 10 30] [--json]

Fake GPUs (tests/fakegpu): whole pre-flights with the guard's own deadlines, from the moment in which the fault strikes (where
nothing strikes, since facts decide, from the start) to the message: small worlds that locate it and the rungs that follow
included. `named s` is when the first probe's verdict stood, `whole s` is counted from the start of the pre-flight. Network lab
(tests/net, root): from the first connection to the findings.
Without the guard: init_process_group and one all_reduce as TorchConfig and a first step make them, with a stated `timeout_s`,
until the first rank ends in an error or dies; on the lab, until every rank of gloo has said something. Real torch on a double:
when NCCL fails is modelled there, what torch then does is not.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import harness
from benchmarks.without_guard import BACKEND, PLAIN, PLAIN_NETWORK, environment, plain_network, struck_at, unguarded
from tests.fakegpu.double import Double, build
from tests.fakegpu.matrix import CASES, Case
from tests.fakegpu.ranks import Ranks
from tests.net.faults import FAULTS, Fault
from tests.net.netlab import REPOSITORY, Lab, why_not
from tests.net.stages import Stages

HEALTHY = ("healthy-4",)


def representatives(quick: bool) -> list[Case]:
    """The first case of each class, step and action that goes wrong; with `quick`, of each action, cured by a setting or not."""
    chosen: dict[tuple[str | None, ...], Case] = {}
    for case in CASES:
        if case.failure != "ok" and case.policy == "default" and "@shared" not in case.fault:
            action = re.search(r":([a-z-]+)", case.fault)
            kind = action[1] if action else case.name
            short = (kind.removesuffix("-gil"), str(bool(case.relief)))
            chosen.setdefault(short if quick else (case.failure, case.step, kind, *short), case)
    return [*(case for case in CASES if case.name in HEALTHY), *chosen.values()]


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
            "tests.fakegpu.guarded:preflight", 1, deadline_s=240, env=environment(double, case, state), ranks=case.ranks,
            backend=BACKEND, spec={}, devices=case.devices, asked_gpus=case.asked_gpus, policy=case.policy, touched=case.touched,
        )  # fmt: skip
        if ended.value is None:
            return {"table": "with the guard", "case": case.name, "named": f"no report: {ended.output[-200:]}"}
        began_s = ended.value["ended_at_s"] - ended.value["seconds"]
        struck_s = struck_at(state) or began_s
    report = ended.value["report"]
    verdict = report["verdict"]
    return {
        "table": "with the guard, fake GPUs", "case": f"{case.name}, {case.ranks} ranks", "unit": "s to the sentence",
        "median": ended.value["ended_at_s"] - struck_s, "named s": began_s + report["attempts"][0]["seconds"] - struck_s,
        "whole s": ended.value["seconds"], "named": f"{verdict['failure']}{_on(verdict['culprit_ranks'])}", "then": _then(report),
        "as the matrix expects": (verdict["failure"], tuple(verdict["culprit_ranks"])) == _expected(case),
    }  # fmt: skip


def _then(report: dict[str, Any]) -> str:
    """How a pre-flight ended, in a word: as it was asked for, with a setting, on another backend, or not at all."""
    return "relief" if report["relief"] else (report["backend_chosen"] or report["action"])


def _expected(case: Case) -> tuple[str, tuple[int, ...]]:
    said = case.expected(BACKEND)
    return said["failure"], tuple(said["culprits"])


def _on(ranks: Sequence[int]) -> str:
    return f" on {', '.join(map(str, ranks))}" if ranks else ""


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


def building() -> float:
    """Seconds to build the double where no cache has it."""
    program = (
        "import time; from tests.fakegpu.double import build; s = time.monotonic(); build(); print(time.monotonic() - s)"
    )
    with tempfile.TemporaryDirectory() as cache:
        env = {**os.environ, "XDG_CACHE_HOME": cache}
        done = subprocess.run(
            [sys.executable, "-c", program], cwd=REPOSITORY, env=env, capture_output=True, text=True, check=True
        )
    return float(done.stdout)


def main() -> None:
    parser = harness.arguments(__doc__)
    parser.add_argument("--quick", action="store_true", help="one case of each kind of action and finding")
    parser.add_argument(
        "--timeouts", type=float, nargs="+", metavar="S", help="timeout_s of plain torch (default: 10 30; 10)"
    )
    args = parser.parse_args()
    timeouts = args.timeouts or ([10.0] if args.quick else [10.0, 30.0])
    top, rows, notes = harness.head("From a fault to the sentence that names it"), [], []
    notes.append(f"Building the double from its sources takes {building():.2g} s, once.")
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
        of_table = [row for row in rows if row["table"] == table]
        timed = [row for row in of_table if "median" in row and row.get("named") != "ok"]
        start = f"{table[0].upper()}{table[1:]}"
        if table.startswith("without"):
            first_s = {
                row["case"].split(", ")[0]: f"{row['median']:.2g} s" if "median" in row else "never" for row in of_table
            }
            found.append(f"{start}: {'; '.join(f'{case} {seconds}' for case, seconds in first_s.items())}.")
        elif timed:
            slowest, all_s = max(timed, key=lambda row: row["median"]), harness.summary([row["median"] for row in timed])
            found.append(
                f"{start}: {len(timed)} kinds, median {all_s['median']:.2g} s to the sentence, slowest {slowest['median']:.2g} s "
                f"({slowest['case']})."
            )
            whole: dict[str, list[float]] = {}
            for row in of_table:
                whole.setdefault(row.get("then", ""), []).append(row.get("whole s", 0.0))
            medians = {end: harness.summary(seconds)["median"] for end, seconds in whole.items() if end}
            if medians:
                found.append(
                    f"Whole pre-flights by how they end, s: {', '.join(f'{e} {m:.2g}' for e, m in medians.items())}."
                )
    return found


if __name__ == "__main__":
    main()
