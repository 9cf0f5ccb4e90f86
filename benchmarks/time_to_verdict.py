"""Seconds from a fault to the sentence that names it: every kind of fault of the fake GPUs and of the network lab.

    python benchmarks/time_to_verdict.py [--quick] [--timeouts 10 30] [--json]

Fake GPUs (tests/fakegpu): whole pre-flights with the guard's own deadlines, from the moment in which the fault strikes (where
nothing strikes, since facts decide, from the start) to the message: small worlds that locate it and the rungs that follow
included. Network lab (tests/net, root): from the first connection to the findings. Each row is one run. What computes runs
alone; what waits for deadlines (hangs, the lab, plain torch) waits side by side, which two cores hardly notice.
Without the guard: init_process_group and one all_reduce as TorchConfig and a first step make them, with a stated `timeout_s`,
until the first rank ends in an error or dies; on the lab, until every rank of gloo has said something. Real torch on a double:
when NCCL fails is modelled there, what torch then does is not.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import harness
from benchmarks.without_guard import BACKEND, PLAIN, PLAIN_NETWORK, environment, plain_network, struck_at, unguarded
from tests.fakegpu.double import Double, build
from tests.fakegpu.matrix import CASES, Case
from tests.fakegpu.ranks import Ranks, abandoned_shared_memory
from tests.net.faults import FAULTS, Fault
from tests.net.netlab import REPOSITORY, Lab, why_not
from tests.net.stages import Stages

HEALTHY = ("healthy-4",)
FAKE, NETWORK = "with the guard, fake GPUs", "with the guard, network lab"
Rows = list[dict[str, Any]]
Lane = Callable[[], Rows]
LABS = 2  # at once: their hosts wait for lost packets
NOTES = (
    "`seconds` end with the message; where the fault is something that strikes they begin then, else with the pre-flight. `named "
    "s` end when the first probe's verdict stands; small worlds that locate a fault and the other rungs follow. `whole s` are "
    "those of the pre-flight. The guard's deadlines are its defaults: 30 s for a device and for a communicator, 10 s for collectives.",
    "Without the guard: `seconds` end with the first rank's error or death, `all ended s` when no rank is left.",
)


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


def waits(case: Case) -> bool:
    """Whether ranks hang, so that its seconds are deadlines that pass: the matrix gives such cases short ones of their own."""
    return "collective_s" in case.spec


def guarded(server: Ranks, double: Double, case: Case) -> dict[str, Any]:
    """A row: one pre-flight of a fault."""
    fault = f"`{case.fault}`" if case.fault else "none" if case.failure == "ok" else "the machine's own"
    row = {"table": FAKE, "case": f"{case.name}, {case.ranks} ranks", "fault": fault, "unit": "s to the sentence"}
    with tempfile.TemporaryDirectory() as state:
        (ended,) = server.run(
            "tests.fakegpu.guarded:preflight", 1, deadline_s=240, env=environment(double, case, state), ranks=case.ranks,
            backend=BACKEND, spec={}, devices=case.devices, asked_gpus=case.asked_gpus, policy=case.policy, touched=case.touched,
        )  # fmt: skip
        if ended.value is None:  # an error of this benchmark or of the double, and no time to a verdict
            raise SystemExit(f"the pre-flight of {case.name} gave no report: {ended.output[-2000:]}")
        began_s = ended.value["ended_at_s"] - ended.value["seconds"]
        struck_s = struck_at(state) or began_s
    report = ended.value["report"]
    verdict = report["verdict"]
    return {
        **row, "seconds": ended.value["ended_at_s"] - struck_s,
        "named s": began_s + report["attempts"][0]["seconds"] - struck_s, "whole s": ended.value["seconds"],
        "named": f"{verdict['failure']}{_on(verdict['culprit_ranks'])}", "then": _then(report),
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
        "table": NETWORK, "case": f"{fault.name} ({fault.backend})", "unit": "s to the sentence", "seconds": outcome.seconds,
        "sentence": texts[0].replace("|", "/") if texts else "nothing found",
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


def side_by_side(lanes: Sequence[Lane]) -> Rows:
    """The rows of all lanes, which run at the same time."""
    with ThreadPoolExecutor(len(lanes)) as pool:
        return [row for lane in [pool.submit(lane) for lane in lanes] for row in lane.result()]


def _told(row: dict[str, Any]) -> dict[str, Any]:
    said = f"{row['seconds']:.1f} s" if "seconds" in row else "no error"
    harness.progress(f"{row['table']}: {row['case']}: {said}")
    return row


def waiting_on_fake_gpus(
    ranks: Callable[[], Ranks], double: Double, cases: Sequence[Case], timeouts: Sequence[float]
) -> list[Lane]:
    """A lane for each case that waits, and one for plain torch at each timeout."""

    def guard(server: Ranks, case: Case) -> Lane:
        return lambda: [_told(guarded(server, double, case))]

    def plain(server: Ranks, timeout_s: float) -> Lane:
        met = [case for case in CASES if case.name in PLAIN]
        return lambda: [_told(unguarded(server, double, case, timeout_s)) for case in met]

    return [*(guard(ranks(), case) for case in cases), *(plain(ranks(), timeout_s) for timeout_s in timeouts)]


def on_networks(timeout_s: float) -> list[Lane]:
    """Lanes with every fault of the lab, and one with gloo alone."""
    faults = [fault for fault in FAULTS if fault.expected]
    lanes: list[Lane] = [lambda n=n: [_told(network(fault)) for fault in faults[n::LABS]] for n in range(LABS)]  # type: ignore[misc]
    return [*lanes, lambda: [_told(row) for row in plain_network(PLAIN_NETWORK, timeout_s)]]


def measure(quick: bool, timeouts: Sequence[float], with_networks: bool) -> Rows:
    """All rows: first the cases that compute, one after another, then at once all that waits."""
    double, cases = build(), representatives(quick)
    with contextlib.ExitStack() as stack:

        def ranks() -> Ranks:
            ledger = stack.enter_context(tempfile.TemporaryDirectory())
            server = stack.enter_context(Ranks(double.env(devices=8, ops=True, state=ledger)))
            server.run("benchmarks.without_guard:ready", 1, deadline_s=60)  # torch is imported before anything is timed
            return server

        first = ranks()
        rows = [_told(guarded(first, double, case)) for case in cases if not waits(case)]
        lanes = waiting_on_fake_gpus(ranks, double, [case for case in cases if waits(case)], timeouts)
        rows += side_by_side([*lanes, *(on_networks(timeouts[0] if not quick else 3.0) if with_networks else ())])
    tables = list(dict.fromkeys(row["table"] for row in rows))
    order = {f"{fault.name} ({fault.backend})": number for number, fault in enumerate(FAULTS)}
    return sorted(rows, key=lambda row: (tables.index(row["table"]), order.get(row["case"], 0)))


def main() -> None:
    parser = harness.arguments(__doc__)
    parser.add_argument("--quick", action="store_true", help="of the fake GPUs one case of each kind of action")
    parser.add_argument(
        "--timeouts", type=float, nargs="+", metavar="S", help="timeout_s of plain torch (default: 10 30; 10)"
    )
    args = parser.parse_args()
    timeouts = args.timeouts or ([10.0] if args.quick else [10.0, 30.0])
    top = harness.head("From a fault to the sentence that names it")
    notes = [*NOTES, f"Building the double from its sources takes {building():.2g} s, once."]
    reason = why_not()
    if reason is not None:
        notes.append(f"The network lab was not run: {reason}.")
    shared_before = abandoned_shared_memory()
    try:
        rows = measure(args.quick, timeouts, with_networks=reason is None)
    finally:  # plain torch's ranks that hang are killed, and nobody but the guard cleans up behind a rank that is
        for name in abandoned_shared_memory() - shared_before:
            Path("/dev/shm", name).unlink(missing_ok=True)
    harness.show(args, top, rows, [line for note in notes for line in (note, "")][:-1], found=_found(rows), value="seconds")


def _found(rows: Rows) -> list[str]:
    found = []
    for table in dict.fromkeys(row["table"] for row in rows):
        of_table = [row for row in rows if row["table"] == table]
        start = f"{table[0].upper()}{table[1:]}"
        if table.startswith("without"):
            ends = "; ".join(f"{row['case'].split(', ')[0]} {_ended(row)}" for row in of_table)
            found.append(f"{start}, until all ranks have ended: {ends}.")
            continue
        timed = [row for row in of_table if "seconds" in row and row.get("named") != "ok"]
        slowest = max(timed, key=lambda row: row["seconds"])
        median = harness.summary([row["seconds"] for row in timed])["median"]
        wrong = [row["case"] for row in of_table if not row.get("as the matrix expects", row.get("as the lab expects"))]
        said = f"not as expected: {'; '.join(wrong)}" if wrong else "all named as expected"
        found.append(
            f"{start}: {len(timed)} kinds, {said}; median {median:.2g} s to the sentence, slowest {slowest['seconds']:.3g} s "
            f"({slowest['case']})."
        )
        found += _by_end(of_table)
    return found


def _ended(row: dict[str, Any]) -> str:
    """When the last rank of plain torch had ended. gloo's row is of that moment itself."""
    ended_s = row.get("all ended s", row.get("seconds"))
    if not isinstance(ended_s, float):
        return "never"
    return "at once" if ended_s < 0.5 else f"{ended_s:.2g} s"


def _by_end(rows: Rows) -> list[str]:
    """A sentence of how long whole pre-flights take, by how they end; none where the rows are no pre-flights."""
    whole: dict[str, list[float]] = {}
    for row in rows:
        if "whole s" in row:
            whole.setdefault(row["then"], []).append(row["whole s"])
    medians = ", ".join(f"{end} {harness.summary(seconds)['median']:.3g}" for end, seconds in whole.items())
    return [f"Whole pre-flights by how they end, s: {medians}."] if medians else []


if __name__ == "__main__":
    main()
