"""How well and how fast failures are named: on public reports, on a big log, on 4,096 ranks in memory.

    python benchmarks/classify.py [--reports FILE] [--megabytes N] [--rounds 3] [--json]

Figures come with what they stand on: `first` are the reports that the rules were written against, `second` were added
later, with logs of healthy start-ups and of unrelated failures among them. `third` to `eleventh` were collected
(the seventh, half of the eighth and the eleventh: made) and labelled before any rule had been looked at for them, and measured then
(results/classify_blind_202611.md); rules have been written since with half of the third and fourth and all of the sixth to
ninth and the eleventh in sight, so what this prints of those is no blind figure either.
"""

from __future__ import annotations

import json
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import harness
from ray_nccl_guard.diagnosis.gather import scanner_for
from ray_nccl_guard.evidence import Evidence, Origin, RankEvidence
from ray_nccl_guard.logs.evidence import read_logs
from ray_nccl_guard.probe.spec import LogLine, Outcome
from ray_nccl_guard.rulebook import shipped_rules
from ray_nccl_guard.verdict import Certainty, Verdict, classify

REPORTS = Path(__file__).parent / "data" / "reports.jsonl"
MB = 1_000_000


def main() -> int:
    parser = harness.arguments(__doc__)
    parser.add_argument("--reports", type=Path, default=REPORTS, help="reports as JSON lines (default: the shipped ones)")
    parser.add_argument("--megabytes", type=int, default=500, help="size of the big log; 0 leaves the speed out")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    top = harness.head("Naming failures: how well, and how fast")
    rows, notes, found = accuracy(args.reports)
    if args.megabytes:
        for more, sentence in (
            big_log(args.megabytes, args.rounds),
            in_memory(ranks=4096, lines=200, rounds=args.rounds),
        ):
            rows += more
            found.append(sentence)
    harness.show(args, top, rows, notes, found=found)
    return 0


def accuracy(path: Path) -> tuple[list[dict[str, Any]], list[str], list[str]]:
    """A row for each set: share of verdicts among the accepted answers, confident and wrong, gloo promised where it cannot help.

    The notes name the reports that were not named as accepted; the sentence is over all of them.
    """
    groups: dict[str, list[tuple[dict[str, Any], Verdict]]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        groups.setdefault(f"{row.get('set', 'all')}, {row.get('basis', 'any')}", []).append((row, classify_text(row["log"])))
    rows, notes = [], []
    for name, pairs in sorted(groups.items()):
        wrong = [(row, v) for row, v in pairs if v.failure.value not in row["accepted"]]
        rows.append({
            "table": "how well", "set": name,
            "reports": len(pairs),
            "accepted": round(1 - len(wrong) / len(pairs), 4),
            "exact": round(sum(v.failure.value == row["accepted"][0] for row, v in pairs) / len(pairs), 4),
            "confident and wrong": sum(v.certainty is not Certainty.OPEN for _, v in wrong),
            "gloo promised wrongly": sum(v.gloo_can_help is True and row["gloo"] is False for row, v in pairs),
        })  # fmt: skip
        notes += [
            f"- {name}, {row['id']}: named {v.failure.value} ({v.certainty.value}), accepted {', '.join(row['accepted'])}"
            for row, v in wrong
        ]
    every = [pair for pairs in groups.values() for pair in pairs]
    accepted = sum(v.failure.value in row["accepted"] for row, v in every)
    bold = sum(int(row["confident and wrong"]) for row in rows)
    found = f"{accepted} of {len(every)} shipped reports are named as accepted, {bold} confidently wrong (no blind figure)."
    return rows, notes, [found]


def classify_text(log: str) -> Verdict:
    with tempfile.NamedTemporaryFile("w", suffix=".log", encoding="utf-8") as file:
        file.write(log)
        file.flush()
        return classify(read_logs([file.name], scanner_for(None)))


def healthy_lines(ranks: int) -> Iterator[str]:
    """A healthy NCCL_DEBUG=INFO start-up of `ranks` ranks, interleaved, without end; pids, pointers and channels vary."""
    turn = 0
    while True:
        for rank in range(ranks):
            host, dev = f"node-{rank // 8:02d}", rank % 8
            head = f"{host}:{4000 + rank}:{9000 + rank + turn} [{dev}] NCCL INFO "
            peer = (rank + 1) % ranks
            yield f"{head}Channel {turn % 32:02d}/{turn % 2} : {rank}[{dev}] -> {peer}[{peer % 8}] via P2P/CUMEM/read"
            pointer = (turn * 2654435761 + rank * 40503) & 0xFFFFFFFFFF  # as scattered as addresses are
            yield f"{head}AllReduce: opCount {turn:x} sendbuff 0x7f{pointer:010x} recvbuff 0x7f{pointer:010x} count 1048576"
            if turn % 64 == 0:
                yield f"{head}comm 0x{turn * 64 + rank:012x} rank {rank} nranks {ranks} cudaDev {dev} nvmlDev {dev} - Init COMPLETE"
        turn += 1


PROGRAM = """
import sys
from ray_nccl_guard.diagnosis.gather import scanner_for
from ray_nccl_guard.logs.evidence import read_logs
from ray_nccl_guard.verdict import classify
print(classify(read_logs([sys.argv[1]], scanner_for(None))).failure.value)
"""


def big_log(megabytes: int, rounds: int) -> tuple[list[dict[str, Any]], str]:
    """Rows and a sentence: `classify` on one file and `grep -E` with the same patterns on it, in turn."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "driver.log"
        _write(path, megabytes * MB)
        peaks, named = [], set()

        def ours() -> float:
            used = harness.measured(PROGRAM, str(path))
            peaks.append(used.peak_mib)
            named.add(used.output.strip())
            return used.cpu_s

        taken = harness.alternate(
            {"classify": ours, "grep -E": lambda: _grep(path, Path(folder) / "patterns")}, rounds=rounds, warm_up=0
        )
    rows = [
        {"table": f"one log of {megabytes} MB", "case": name, "unit": "CPU s", **harness.summary(values),
         "MB per CPU s": megabytes / harness.summary(values)["median"], "named": None}
        for name, values in taken.items()
    ]  # fmt: skip
    rows[0].update({"peak MiB": round(max(peaks)), "named": ", ".join(sorted(named))})
    times = harness.times(harness.ratio(taken["classify"], taken["grep -E"]))
    return rows, (
        f"A log of {megabytes} MB is classified at {rows[0]['MB per CPU s']:.0f} MB a CPU second in {max(peaks):.0f} MiB; "
        f"CPU against grep -E with the same patterns: {times}."
    )


def _write(path: Path, size: int) -> None:
    lines, written = healthy_lines(256), 0
    with path.open("w", encoding="utf-8") as file:
        while written < size:
            block = "".join(f"{next(lines)}\n" for _ in range(10_000))
            file.write(block)
            written += len(block)
        file.write("node-31:4255:9999 [7] include/alloc.h:178 NCCL WARN Cuda failure 2 'out of memory'\n")


def _grep(path: Path, patterns: Path) -> float:
    """CPU seconds of grep with every pattern that POSIX can express, in the C locale."""
    texts = [p.text for rule in shipped_rules() for p in rule.patterns]
    plain = [re.sub(r"\(\?P<\w+>", "(", t).replace(r"\d", "[0-9]").replace(r"\w", "[A-Za-z0-9_]") for t in texts]
    patterns.write_text("".join(f"{t}\n" for t in plain if "(?" not in t and "*?" not in t and r"\S" not in t))
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(["grep", "-i", "-c", "-E", "-f", str(patterns), str(path)], env={"LC_ALL": "C"}, timeout=900,
                   capture_output=True, check=False)  # fmt: skip
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def in_memory(ranks: int, lines: int, rounds: int) -> tuple[list[dict[str, Any]], str]:
    """A row and a sentence: classifying results that a probe of `ranks` ranks has already brought together."""
    records = []
    source = healthy_lines(ranks)
    for rank in range(ranks):
        texts = [next(source) for _ in range(lines - 1)]
        texts.append(f"[rank{rank}]: socketProgress: Connection closed by remote peer node-0<{rank}>")
        if rank == ranks // 2:
            texts[-1] = "host:1:2 [0] include/alloc.h:178 NCCL WARN Cuda failure 'out of memory'"
        records.append(RankEvidence(
            rank=rank, outcome=Outcome.FAILED,
            lines=tuple(LogLine(source="nccl", number=i + 1, text=t) for i, t in enumerate(texts)),
        ))  # fmt: skip
    evidence = Evidence(origin=Origin.PROBE, backend="nccl", world_size=ranks, ranks=tuple(records))
    walls, verdict = [], None

    def once() -> float:
        nonlocal verdict
        started_s, cpu_s = time.monotonic(), time.process_time()
        verdict = classify(evidence)
        walls.append(time.monotonic() - started_s)
        return time.process_time() - cpu_s

    (values,) = harness.alternate({"classify": once}, rounds=rounds, warm_up=0).values()
    cpu = harness.summary(values)
    row = {"table": "in memory", "case": f"{ranks} ranks x {lines} lines", "unit": "CPU s", **cpu,
           "wall s": harness.summary(walls)["median"], "named": f"{verdict.failure.value} on {list(verdict.culprit_ranks)}"}  # fmt: skip
    return [row], f"{ranks} ranks x {lines} lines in memory take {cpu['median']:.2g} CPU s."


if __name__ == "__main__":
    raise SystemExit(main())
