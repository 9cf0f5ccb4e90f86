"""What reading Flight Recorder dumps costs, beside torch's own analyser, and what recording them costs.

    python benchmarks/flight.py [--sizes 64x200 1024x200] [--peer] [--accuracy [FOLDER ...]] [--recording [BACKEND ...]] [--json]

Dumps are synthetic, in the bytes that torch's pickler writes (tests/unit/flight_builders.py): one default group on NCCL,
three frames of stack a record, rank 3 one call behind. Each reader runs in a process of its own; CPU seconds and peak
memory are that process's, start of the interpreter and imports included. `torchfrtrace` is that of the installed torch.
Recording is measured in the calling thread, where records are made: with the recorder off, on (with Python stacks, which
are part of it), and on with C++ stacks. On NCCL the devices and the library are the double of tests/fakegpu under torch's
real code, so the thread's work is real but for what the driver and libnccl would do in it: the share is an upper bound.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import harness
from benchmarks.flight_accuracy import accuracy

CULPRIT = 3
SIZES = ("64x2000", "256x2000", "1024x200", "1024x2000")
OURS = (
    "import sys; from ray_nccl_guard import flight; v = flight.diagnose(flight.load([sys.argv[1]]));"
    "print(v.kind.value, list(v.culprit_ranks))"
)
PEER = "from torch.distributed.flight_recorder.fr_trace import main; main()"
ANSWERS = {
    "guard": rf"missing_rank \[{CULPRIT}\]",
    "torchfrtrace": rf"missing ranks: \{{{CULPRIT}\}}",
}
MODES = {"off": ("0", "0"), "on": ("2000", "0"), "on, C++ stacks": ("2000", "1")}


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


def reading(size: str, peer: bool, rounds: int, deadline_s: float) -> tuple[list[dict[str, Any]], str]:
    """Rows of one set of dumps, the readers in turn, and a sentence. A reader without an answer gets no second round."""
    ranks, entries = (int(part) for part in size.split("x"))
    with tempfile.TemporaryDirectory() as folder:
        mb = make_dumps(Path(folder), ranks, entries) / 1e6
        programs = {"guard": (OURS, folder), **({"torchfrtrace": (PEER, folder, "-p", "rank_")} if peer else {})}
        taken: dict[str, list[harness.Used]] = {name: [] for name in programs}

        def read(name: str) -> None:
            if not taken[name] or taken[name][-1].code is not None:
                taken[name].append(harness.measured(*programs[name], deadline_s=deadline_s))

        harness.alternate({name: lambda name=name: read(name) for name in programs}, rounds=rounds, warm_up=0)  # type: ignore[misc]
    rows = []
    for name, used in taken.items():
        row = {"table": "reading", "case": f"{ranks} x {entries}, {name}", "MB": round(mb, 1)}
        if any(one.code is None for one in used):
            rows.append({**row, "right": f"no answer in {deadline_s:g} s"})
            continue
        right = all(re.search(ANSWERS[name], one.output) for one in used)
        cpu, peak_mb = harness.summary([one.cpu_s for one in used]), max(one.peak_mib for one in used) * 1.048576
        wall_s = harness.summary([one.wall_s for one in used])["median"]
        rows.append({**row, "unit": "CPU s", **cpu, "wall s": wall_s, "peak MB": round(peak_mb), "right": right})
    return rows, _sentence(f"{ranks} ranks x {entries} records", rows, taken, deadline_s)


def _sentence(size: str, rows: Sequence[dict[str, Any]], taken: dict[str, list[harness.Used]], deadline_s: float) -> str:
    """What the guard takes, and the peer beside it, if it was asked."""
    if any(one.code is None for one in taken["guard"]):
        return f"{size}: no answer in {deadline_s:g} s."
    said = f"{size}: {rows[0]['median']:.2g} CPU s, {rows[0]['peak MB']} MB"
    if "torchfrtrace" not in taken:
        return f"{said}."
    peer = taken["torchfrtrace"]
    if any(one.code is None for one in peer):
        return f"{said}; torchfrtrace has no answer in {deadline_s:g} s."
    ratio = harness.ratio([one.cpu_s for one in peer], [one.cpu_s for one in taken["guard"]])
    beside = "cannot be told from that" if ratio is None else f"takes {harness.times(ratio)} of that"
    return f"{said}; torchfrtrace {beside}."


def recording(backends: Sequence[str], count: int, rounds: int) -> tuple[list[dict[str, Any]], list[str]]:
    """Rows and sentences: CPU microseconds that a 4-byte all_reduce between two ranks takes of the calling thread."""
    from tests.fakegpu.double import build
    from tests.fakegpu.ranks import Ranks

    rows, found = [], []
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory(dir="/dev/shm") as shm:
        with Ranks(build().env(devices=2, state=folder, shm=shm)) as server:
            for backend in backends:

                def one(mode: str, backend: str = backend) -> float:
                    return _all_reduce_us(server, backend, count, *MODES[mode])

                taken = harness.alternate({mode: lambda mode=mode: one(mode) for mode in MODES}, rounds=rounds)  # type: ignore[misc]
                rows += [
                    {
                        "table": "recording",
                        "case": f"{backend}, {mode}",
                        "unit": "us of CPU a call",
                        **harness.summary(values),
                    }
                    for mode, values in taken.items()
                ]
                shares = {mode: harness.ratio(taken[mode], taken["off"]) for mode in MODES if mode != "off"}
                said = ", ".join(f"{mode} {harness.times(ratio)}" for mode, ratio in shares.items())
                found.append(f"Recording a call of {backend}, against the recorder off: {said}.")
    return rows, found


def _all_reduce_us(server: Any, backend: str, count: int, buffer: str, stacks: str) -> float:
    sizes = dict.fromkeys(("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"), buffer)
    cpp = dict.fromkeys(("TORCH_FR_CPP_STACK", "TORCH_NCCL_TRACE_CPP_STACK"), stacks)
    env = {**sizes, **cpp, "GLOO_SOCKET_IFNAME": "lo"}
    ended = server.run("benchmarks.flight:calls", 2, deadline_s=120, env=env, backend=backend, count=count)
    if ended[0].value is None:
        raise SystemExit(f"the calls on {backend} did not end: {ended[0].output[-2000:]}")
    return float(ended[0].value)


def calls(rank: int, world: int, *, backend: str, count: int) -> float:
    """One rank: CPU microseconds of this thread for a 4-byte all_reduce."""
    import time

    import torch
    import torch.distributed as dist

    on_gpu = backend != "gloo"
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group(backend, rank=rank, world_size=world, **({"device_id": device} if on_gpu else {}))
    tensor = torch.ones(1).to(device)
    for _ in range(100):
        dist.all_reduce(tensor)
    if on_gpu:
        torch.cuda.synchronize()
    start_s = time.thread_time()
    for _ in range(count):
        dist.all_reduce(tensor)
    took_s = time.thread_time() - start_s
    if on_gpu:
        torch.cuda.synchronize()
    dist.barrier()
    return took_s / count * 1e6


def main() -> None:
    parser = harness.arguments(__doc__)
    parser.add_argument("--sizes", nargs="*", default=list(SIZES), metavar="RANKSxENTRIES")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peer", action="store_true", help="run torchfrtrace of the installed torch on the same dumps")
    parser.add_argument("--deadline-s", type=float, default=600, help="for one reader on one set")
    backends = ("gloo", "nccl", "nccl-legacy")
    parser.add_argument(
        "--recording", nargs="*", choices=backends, metavar="BACKEND",
        help=f"measure what recording costs a collective of {', '.join(backends)} (none named: gloo)",
    )  # fmt: skip
    parser.add_argument(
        "--accuracy", nargs="*", type=Path, metavar="FOLDER",
        help="say who is named and who should be, over sets with a known truth (no folder: this repository's own)",
    )  # fmt: skip
    args = parser.parse_args()
    top = harness.head("Flight Recorder dumps: reading them beside torchfrtrace, whom they convict, and recording them")
    rows: list[dict[str, Any]] = []
    found = []
    for size in args.sizes:
        more, sentence = reading(size, args.peer, args.rounds, args.deadline_s)
        rows += more
        found.append(sentence)
    if args.accuracy is not None:
        more, sentences = accuracy(args.accuracy, args.peer)
        rows += more
        found += sentences
    if args.recording is not None:
        more, sentences = recording(args.recording or ["gloo"], count=2000, rounds=args.rounds)
        rows += more
        found += sentences
    harness.show(args, top, rows, found=found)


if __name__ == "__main__":
    main()
