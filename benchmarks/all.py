"""Runs every benchmark, keeps the results under results/, and writes the table of benchmarks/README.md anew.

    python benchmarks/all.py [--only NAME ...] [--table]

Each gets a time limit, and one that fails or takes longer leaves its older result in place. A result is three files, as the
table shows it (.md), as numbers (.json) and drawn (.png), named by benchmark, cores and month.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
README = HERE / "README.md"
MARKS = ("<!-- results: written by `python benchmarks/all.py` -->", "<!-- end of results -->")


@dataclass(frozen=True, slots=True)
class Benchmark:
    """One run: the script with its arguments, the question it answers, and how long it may take (some twice what it takes
    alone on two cores)."""

    name: str
    question: str
    command: str
    limit_s: float


BENCHMARKS = (
    Benchmark("classify", "how well and how fast are failures named, beside grep", "classify.py", 240),
    Benchmark("arch_scan", "the fatbin reader beside cuobjdump, and the `compat` verb", "arch_scan.py --rounds 2", 300),
    Benchmark(
        "flight", "reading Flight Recorder dumps beside torchfrtrace, whom they convict; what recording costs",
        "flight.py --peer --rounds 2 --deadline-s 60 --accuracy --recording gloo nccl nccl-legacy", 420,
    ),
    Benchmark("reachability", "the peers check among hosts, healthy and with drops", "reachability.py", 240),
    Benchmark("locate_sim", "rounds and worlds of locating, beside DLRover's and all pairs", "locate_sim.py", 60),
    Benchmark("price", "how close `estimate_step_cost` comes to real steps on gloo", "price.py", 240),
    Benchmark("publish", "what publishing a report costs", "publish.py", 60),
    Benchmark("start_cost", "what the guard adds to a healthy start; fresh workers", "start_cost.py --rounds 7 --faults", 1500),
    Benchmark("time_to_verdict", "seconds from a fault to its sentence, and without the guard", "time_to_verdict.py --timeouts 10", 600),
    Benchmark("syncbn_cpu", "what SyncBatchNorm on gloo costs a step (CPU)", "syncbn.py --device cpu --largest 16M --minutes 2", 360),
)  # fmt: skip


def run(benchmark: Benchmark, results: Path = RESULTS) -> bool:
    """Run one and keep its result; False, with the reason printed, if it gave none."""
    kept = results / f"{benchmark.name}_{len(os.sched_getaffinity(0))}cores_{datetime.now(timezone.utc):%Y%m}"
    with tempfile.TemporaryDirectory() as folder, open(Path(folder, "json"), "w+") as said:
        out, plot = Path(folder, "md"), Path(folder, "drawn.png")
        script, *arguments = benchmark.command.split()
        command = [sys.executable, str(HERE / script), *arguments, "--json", "--out", str(out), "--plot", str(plot)]
        started_s = time.monotonic()
        child = subprocess.Popen(command, cwd=HERE.parent, stdout=said, start_new_session=True)
        try:
            code: int | str = child.wait(timeout=benchmark.limit_s)
        except subprocess.TimeoutExpired:
            code = f"not ended in {benchmark.limit_s:g} s"
        finally:
            _end(child)
        said.seek(0)
        # The result is the last line: Ray prints of workers that a benchmark lets die, to the same place.
        text = (said.read().strip().splitlines() or [""])[-1]
        took = f"{time.monotonic() - started_s:6.0f} s  {benchmark.name:16}"
        if code != 0 or not text.startswith("{"):
            print(f"{took} FAILED ({code}); its older result, if any, is kept", flush=True)
            return False
        for file, suffix in ((out, ".md"), (plot, ".png")):
            if file.exists():
                kept.with_suffix(suffix).write_bytes(file.read_bytes())
        kept.with_suffix(".json").write_text(json.dumps(json.loads(text), indent=1) + "\n")
    print(f"{took} ok", flush=True)
    return True


def _end(child: subprocess.Popen[bytes]) -> None:
    """Kill the benchmark and all that it started in its session."""
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass  # all have ended
    child.wait()


def table() -> str:
    """One row a benchmark: question, command, newest kept result and what was found there."""
    rows = ["| question | command | kept result | found |", "|---|---|---|---|"]
    for one in BENCHMARKS:
        newest = max(RESULTS.glob(f"{one.name}_*cores_*.json"), key=lambda path: path.stem.rpartition("_")[2], default=None)
        kept, found = "none yet", ""
        if newest is not None:
            data = json.loads(newest.read_text())
            drawn = newest.with_suffix(".png")
            plot = f", [drawn](results/{drawn.name})" if drawn.exists() else ""
            kept = f"[{newest.stem}](results/{newest.stem}.md){plot}"
            found = "<br>".join(sentence.replace("|", "\\|") for sentence in data["found"])
        rows.append(f"| {one.question} | `python benchmarks/{one.command}` | {kept} | {found} |")
    return "\n".join(rows)


def write_table() -> None:
    """Put the table between its marks in README.md."""
    before, _, rest = README.read_text().partition(MARKS[0])
    after = rest.partition(MARKS[1])[2]
    README.write_text(f"{before}{MARKS[0]}\n{table()}\n{MARKS[1]}{after}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [one.name for one in BENCHMARKS]
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--table", action="store_true", help="only write the table, from the results that are kept")
    args = parser.parse_args()
    started_s, failed = time.monotonic(), []
    for one in () if args.table else BENCHMARKS:
        if one.name in (args.only or names) and (HERE / one.command.split()[0]).exists() and not run(one):
            failed.append(one.name)
    write_table()
    print(f"{time.monotonic() - started_s:6.0f} s  in all{': failed ' + ', '.join(failed) if failed else ''}")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
