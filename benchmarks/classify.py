"""How well and how fast failures are named: on public reports, on a big log, on 4,096 ranks in memory.

    python benchmarks/classify.py [--reports FILE] [--megabytes N] [--json]

Figures come with what they stand on: `first` are the reports that the rules were written against, `second` were added
later, with logs of healthy start-ups and of unrelated failures among them. `third` to `fifth` were collected and
labelled before any rule had been looked at for them, and measured then (results/classify_blind_202611.md); rules have been
written since with half of the third and fourth in sight, so what this prints of those is no blind figure either.
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
    args = parser.parse_args()
    top = harness.head("Naming failures: how well, and how fast")
    rows, notes = accuracy(args.reports)
    if args.megabytes:
        notes += [
            f"- one log: {_words(big_log(args.megabytes))}",
            f"- in memory: {_words(in_memory(ranks=4096, lines=200))}",
        ]
    harness.show(args, top, rows, notes)
    return 0


def _words(figures: dict[str, object]) -> str:
    return ", ".join(f"{name} {value}" for name, value in figures.items())


def accuracy(path: Path) -> tuple[list[dict[str, object]], list[str]]:
    """A row for each set: share of verdicts among the accepted answers, confident and wrong, gloo promised where it cannot help.

    The notes name the reports that were not named as accepted.
    """
    groups: dict[str, list[tuple[dict[str, Any], Verdict]]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        groups.setdefault(f"{row.get('set', 'all')}, {row.get('basis', 'any')}", []).append((row, classify_text(row["log"])))
    rows, notes = [], []
    for name, pairs in sorted(groups.items()):
        wrong = [(row, v) for row, v in pairs if v.failure.value not in row["accepted"]]
        rows.append({
            "set": name,
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
    return rows, notes


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


def big_log(megabytes: int) -> dict[str, object]:
    """Speed and memory of `classify` on one file, beside `grep -E` with the same patterns on the same file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "driver.log"
        _write(path, megabytes * MB)
        program = (
            "import sys,resource,time\n"
            "from ray_nccl_guard.diagnosis.gather import scanner_for\n"
            "from ray_nccl_guard.logs.evidence import read_logs\n"
            "from ray_nccl_guard.verdict import classify\n"
            "s=time.monotonic(); c=time.process_time()\n"
            f"v=classify(read_logs([{str(path)!r}], scanner_for(None)))\n"
            "print(v.failure.value, time.monotonic()-s, time.process_time()-c, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
        )
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=600, check=True,
                              cwd=Path(__file__).resolve().parent.parent)  # fmt: skip
        failure, wall_s, cpu_s, peak_kib = done.stdout.split()
        grep_s = _grep(path, Path(folder) / "patterns")
    return {
        "megabytes": megabytes, "failure": failure, "wall_s": round(float(wall_s), 2), "cpu_s": round(float(cpu_s), 2),
        "mb_per_s_of_cpu": round(megabytes / float(cpu_s), 1), "peak_mib": int(peak_kib) // 1024,
        "grep_cpu_s": round(grep_s, 2), "times_grep": round(float(cpu_s) / grep_s, 2),
    }  # fmt: skip


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


def in_memory(ranks: int, lines: int) -> dict[str, object]:
    """Seconds to classify results that a probe of `ranks` ranks has already brought together."""
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
    started_s, cpu_s = time.monotonic(), time.process_time()
    verdict = classify(evidence)
    return {
        "ranks": ranks, "lines_each": lines, "failure": verdict.failure.value, "culprit_ranks": list(verdict.culprit_ranks),
        "wall_s": round(time.monotonic() - started_s, 2), "cpu_s": round(time.process_time() - cpu_s, 2),
    }  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(main())
