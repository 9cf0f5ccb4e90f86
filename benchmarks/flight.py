"""What reading Flight Recorder dumps costs, beside torch's own analyser, and what recording them costs.

    python benchmarks/flight.py [--sizes 64x200 1024x200] [--peer] [--recording [BACKEND ...]] [--json]

Dumps are synthetic, in the bytes that torch's pickler writes (tests/unit/flight_builders.py): one default group on NCCL,
three frames of stack a record, rank 3 one call behind. Each reader runs in a process of its own; CPU seconds and peak
memory are that process's, start of the interpreter and imports included. `torchfrtrace` is that of the installed torch.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

CULPRIT = 3
SIZES = ("64x200", "64x2000", "256x2000", "1024x200", "1024x2000")
OURS = (
    "import sys; from ray_nccl_guard import flight; v = flight.diagnose(flight.load([sys.argv[1]]));"
    "print(v.kind.value, list(v.culprit_ranks))"
)
PEER = "from torch.distributed.flight_recorder.fr_trace import main; main()"


def make_dumps(folder: Path, ranks: int, entries: int) -> int:
    """Write the dumps of one job and return their size in bytes. All ranks but one write the same bytes."""
    from tests.unit.flight_builders import dump

    groups = {("0", "default_pg"): range(ranks)}
    same = dump(_records(entries, ranks), groups, first=1)
    behind = dump(_records(entries, ranks, missing=1), groups)
    for rank in range(ranks):
        (folder / f"rank_{rank}").write_bytes(behind if rank == CULPRIT else same)
    return (ranks - 1) * len(same) + len(behind)


def _records(entries: int, ranks: int, missing: int = 0) -> list[dict[str, Any]]:
    """The last `entries` calls of a loop of five; `missing` drops the newest and starts as much earlier."""
    from tests.unit.flight_builders import record

    calls = [
        ("all_reduce", [1 << 20]),
        ("all_reduce", [4096, 1024]),
        ("_all_gather_base", [512]),
        ("broadcast", [8]),
        ("barrier", [1]),
    ]
    torchs = [
        {"name": name, "filename": "/opt/torch/distributed/c10d.py", "line": line}
        for name, line in (("wrapper", 83), ("call", 7))
    ]
    found = []
    for seq in range(1 - missing + 1, entries + 2 - missing):
        op, size = calls[seq % len(calls)]
        last = seq == entries + 1
        out = [512 * ranks] if op == "_all_gather_base" else None
        one = record(op, seq, "scheduled" if last else "completed", size=size, line=seq % len(calls), out=out)
        one["frames"] = [*torchs, *one["frames"]]
        if not last:
            one["time_discovered_started_ns"] = one["time_discovered_completed_ns"] = one["time_created_ns"] + 1000
        found.append(one)
    return found


def measure(code: str, arguments: list[str], deadline_s: float) -> dict[str, Any]:
    """CPU seconds, wall seconds and peak MB of `python -c code`, and what it printed."""
    tail = (
        "\nimport resource\nu = resource.getrusage(resource.RUSAGE_SELF)"
        "\nprint('\\nUSED', u.ru_utime + u.ru_stime, u.ru_maxrss)"
    )
    start_s = time.monotonic()
    command = [sys.executable, "-c", code + tail, *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=deadline_s, cwd=ROOT)
    except subprocess.TimeoutExpired:
        return {"ended": False, "wall_s": deadline_s}
    output = done.stdout + done.stderr
    used = re.search(r"^USED ([\d.]+) (\d+)", output, re.MULTILINE)
    if used is None:
        return {"ended": False, "error": output.strip().splitlines()[-1:]}
    wall_s = round(time.monotonic() - start_s, 2)
    return {
        "ended": True,
        "cpu_s": round(float(used[1]), 2),
        "wall_s": wall_s,
        "peak_mb": int(used[2]) // 1024,
        "output": output,
    }


def compare(size: str, peer: bool, deadline_s: float) -> dict[str, Any]:
    """Both readers on one set of dumps, one after the other."""
    ranks, entries = (int(part) for part in size.split("x"))
    with tempfile.TemporaryDirectory() as folder:
        row: dict[str, Any] = {
            "ranks": ranks,
            "entries": entries,
            "mb": round(make_dumps(Path(folder), ranks, entries) / 1e6, 1),
        }
        row["guard"] = ours = measure(OURS, [folder], deadline_s)
        ours["right"] = f"missing_rank [{CULPRIT}]" in ours.pop("output", "")
        if peer:
            row["torchfrtrace"] = theirs = measure(PEER, [folder, "-p", "rank_"], deadline_s)
            theirs["right"] = bool(re.search(rf"missing ranks: \{{{CULPRIT}\}}", theirs.pop("output", "")))
    return row


_MODES = {"off": ("0", "0"), "on": ("2000", "0"), "on, C++ stacks": ("2000", "1")}


def recording(count: int, repeats: int, backend: str = "gloo") -> dict[str, Any]:
    """CPU microseconds that a 4-byte all_reduce between two ranks takes of the calling thread, which is where records are
    made: with the recorder off, on (with Python stacks, which are part of it), and on with C++ stacks.

    On NCCL the devices and the library are the double of tests/fakegpu under torch's real code, so the calling thread's
    work is real but for what the driver and libnccl would do in it: the ratio is an upper bound.
    """
    taken: dict[str, list[float]] = {name: [] for name in _MODES}
    for _ in range(repeats):  # interleaved, so that a busy moment of the machine falls on all
        for name, (buffer, stacks) in _MODES.items():
            taken[name].append(_all_reduce_us(count, buffer, stacks, backend))
    best = {name: min(values) for name, values in taken.items()}
    return {
        "backend": backend,
        "all_reduce_cpu_us": best,
        "spread_us": {name: [min(values), max(values)] for name, values in taken.items()},
        "ratio_to_off": {name: round(value / best["off"], 3) for name, value in best.items()},
    }


def _all_reduce_us(count: int, buffer: str, stacks: str, backend: str) -> float:
    code = (
        "import os, sys, time, torch, torch.distributed as dist\n"
        "rank, folder, count, backend = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4]\n"
        "torch.set_num_threads(1)\n"
        "on_gpu = backend != 'gloo'\n"
        "device = torch.device('cuda', rank) if on_gpu else torch.device('cpu')\n"
        "bound = {'device_id': device} if on_gpu else {}\n"
        "if on_gpu: torch.cuda.set_device(device)\n"
        "dist.init_process_group(backend, init_method=f'file://{folder}/store', rank=rank, world_size=2, **bound)\n"
        "x = torch.ones(1).to(device)\n"
        "def settle():\n"
        "    if on_gpu: torch.cuda.synchronize()\n"
        "for _ in range(100): dist.all_reduce(x)\n"
        "settle()\n"
        "start = time.thread_time()\n"
        "for _ in range(count): dist.all_reduce(x)\n"
        "print((time.thread_time() - start) / count * 1e6, flush=True)\n"
        "settle(); dist.barrier(); os._exit(0)\n"
    )
    sizes = {name: buffer for name in ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")}
    cpp = {name: stacks for name in ("TORCH_FR_CPP_STACK", "TORCH_NCCL_TRACE_CPP_STACK")}
    with tempfile.TemporaryDirectory() as folder:
        env = {
            **os.environ,
            **sizes,
            **cpp,
            "GLOO_SOCKET_IFNAME": "lo",
            **(_double_env(folder) if backend != "gloo" else {}),
        }
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", code, str(rank), folder, str(count), backend],
                stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=env,
            )
            for rank in range(2)
        ]  # fmt: skip
        try:
            return round(float(ranks[0].communicate(timeout=300)[0].splitlines()[-1]), 1)
        finally:
            for process in ranks:
                process.kill()
                process.wait()


def _double_env(folder: str) -> dict[str, str]:
    from tests.fakegpu.double import build

    shm = Path(folder, "shm")
    shm.mkdir()
    return dict(build().env(devices=2, state=folder, shm=shm))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="*", default=list(SIZES), metavar="RANKSxENTRIES")
    parser.add_argument("--peer", action="store_true", help="run torchfrtrace of the installed torch on the same dumps")
    parser.add_argument("--deadline-s", type=float, default=600, help="for one reader on one set")
    parser.add_argument(
        "--recording",
        nargs="*",
        metavar="BACKEND",
        help="measure what recording costs a collective of gloo, nccl, nccl-legacy",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    result: dict[str, Any] = {"reading": []}
    for size in args.sizes:
        row = compare(size, args.peer, args.deadline_s)
        result["reading"].append(row)
        if not args.json:
            print(f"{row['ranks']} ranks x {row['entries']} records, {row['mb']} MB", flush=True)
            for name in ("guard", "torchfrtrace"):
                if name in row:
                    print(f"  {name:<13}{row[name]}", flush=True)
    if args.recording is not None:
        result["recording"] = [recording(count=2000, repeats=3, backend=name) for name in args.recording or ["gloo"]]
        if not args.json:
            print(*(f"recording: {row}" for row in result["recording"]), sep="\n")
    result["max_rss_of_children_mb"] = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // 1024
    if args.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
