"""Measures the fatbin reader against cuobjdump: equality on installed libraries and published wheels, CPU and wall time.

    python benchmarks/arch_scan.py equal LIBRARY... --cuobjdump TOOL [--cuobjdump TOOL]
    python benchmarks/arch_scan.py wheels --cuobjdump TOOL [--only 2.26] [--cache DIR]
    python benchmarks/arch_scan.py timing LIBRARY --cuobjdump TOOL [--rounds 5]
    python benchmarks/arch_scan.py verb [--rounds 5]                # the command, as a whole process
    python benchmarks/arch_scan.py publish                          # rewrites compat/wheels.py and docs/gpu-support.md

`wheels` downloads one wheel at a time through pip, scans it, deletes it, and appends one JSON line: it may be stopped and
started again. cuobjdump comes from the package nvidia-cuda-cuobjdump; releases from 13.5 on refuse libraries built with CUDA
12.3 and older, so a second, older tool may be named (triton ships one), and the first that exits 0 is believed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import zipfile
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from ray_nccl_guard.compat.fatbin import Images, scan  # noqa: E402

RECORD = ROOT / "benchmarks" / "results" / "nccl_wheels_x86_64_202611.jsonl"
PACKAGES = ("nvidia-nccl-cu11", "nvidia-nccl-cu12", "nvidia-nccl-cu13")
TOOL_DEADLINE_S = 600  # the longest seen is 34 s of wall on a loaded 2-core box
_ARCH = re.compile(r"\.(sm_\d+[af]?)\.(?:cubin|ptx)$")


def ask_cuobjdump(tools: list[str], library: str) -> tuple[Counter[str], str]:
    """Image counts as the vendor's tool lists them ("sm_90" or "compute_90" -> count), and the tool that answered.

    `-all` is needed: the default lists .nv_fatbin only and answers "no PTX" for every NCCL up to 2.26.5.
    """
    for tool in tools:
        counts: Counter[str] = Counter()
        for option, prefix in (("--list-elf", "sm_"), ("--list-ptx", "compute_")):
            done = subprocess.run(
                [tool, "-all", option, library], check=False, capture_output=True, text=True, timeout=TOOL_DEADLINE_S
            )
            if done.returncode != 0:
                break  # 13.5 prints half of the list before it gives up
            found = (match for line in done.stdout.splitlines() if (match := _ARCH.search(line.strip())))
            counts.update(prefix + match[1].removeprefix("sm_") for match in found)
        else:
            return counts, tool
    raise SystemExit(f"no tool among {tools} can read {library}")


def differences(images: Images, counts: Counter[str]) -> list[str]:
    """What the reader and the tool say differently. `--list-elf` prints an sm_100f image as sm_100, so "f" is folded."""
    ours: Counter[str] = Counter()
    theirs: Counter[str] = Counter()
    for table, source in ((ours, images.counts), (theirs, counts)):
        for name, count in source.items():
            table[name.removesuffix("f")] += count
    return [
        f"{name}: reader {ours[name]}, cuobjdump {theirs[name]}"
        for name in sorted(ours | theirs)
        if ours[name] != theirs[name]
    ]


def as_record(images: Images) -> dict[str, object]:
    return {
        "nccl_version": images.nccl_version,
        "cuda_build": images.cuda_build,
        "machine": images.machine,
        "size_bytes": images.size_bytes,
        "sass": [[a.number, a.suffix] for a in images.sass],
        "ptx": [[a.number, a.suffix, *images.ptx_isa[a]] for a in images.ptx],
        "extra_sass": [[a.number, a.suffix] for a in images.extra_sass],
    }


def equal(args: argparse.Namespace) -> int:
    unequal = 0
    for library in args.libraries:
        images = scan(library)
        counts, tool = ask_cuobjdump(args.cuobjdump, library)
        wrong = differences(images, counts)
        unequal += bool(wrong)
        print(f"{'DIFFERS' if wrong else 'equal'}  {library}  {dict(images.counts)}  ({tool})", *wrong, sep="\n    ")
    print(f"{len(args.libraries) - unequal} of {len(args.libraries)} equal, image by image count")
    return int(unequal > 0)


def published(package: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-m", "pip", "index", "versions", package], capture_output=True, text=True, timeout=120, check=True
    )
    line = next(line for line in done.stdout.splitlines() if line.startswith("Available versions:"))
    return line.split(":", 1)[1].replace(" ", "").split(",")[::-1]


def wheels(args: argparse.Namespace) -> int:
    record = Path(args.record)
    seen = (
        {(r["package"], r["version"]) for r in map(json.loads, record.read_text().splitlines())}
        if record.exists()
        else set()
    )
    unequal = 0
    for package in args.packages or PACKAGES:
        for version in published(package):
            if (package, version) in seen or not re.search(args.only, version):
                continue
            with tempfile.TemporaryDirectory(dir=args.cache) as room:
                line = _scan_wheel(package, version, Path(room), args.cuobjdump)
            with record.open("a") as out:
                out.write(json.dumps(line) + "\n")
            unequal += bool(line["differences"])
            print(package, version, line.get("error") or line["differences"] or "equal", flush=True)
    return int(unequal > 0)


def _scan_wheel(package: str, version: str, room: Path, tools: list[str]) -> dict[str, object]:
    line: dict[str, object] = {"package": package, "version": version, "differences": []}
    fetch = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--only-binary=:all:", "--dest", str(room)]
    got = subprocess.run(
        [*fetch, f"{package}=={version}"], check=False, capture_output=True, text=True, timeout=TOOL_DEADLINE_S
    )
    wheel = next(room.glob("*.whl"), None)
    if wheel is None:
        return line | {"error": f"no wheel for this machine: {got.stderr.strip().splitlines()[-1:]}"}
    with zipfile.ZipFile(wheel) as archive:
        name = next((n for n in archive.namelist() if re.search(r"libnccl\.so\.\d+$", n)), None)
        if name is None:
            return line | {"error": "the wheel holds no libnccl.so.*"}
        library = archive.extract(name, room)
    wheel.unlink()
    images = scan(library)
    line |= as_record(images)
    if tools:
        counts, tool = ask_cuobjdump(tools, library)
        line |= {"differences": differences(images, counts), "compared_with": _tool_version(tool)}
    return line


def _tool_version(tool: str) -> str:
    said = subprocess.run([tool, "--version"], check=True, capture_output=True, text=True, timeout=60).stdout
    found = re.search(r"V(\d+\.\d+\.\d+)", said)
    return f"cuobjdump {found[1] if found else 'of unknown version'}"


def timing(args: argparse.Namespace) -> int:
    """Alternate reader and tool in one run; print medians of wall and CPU seconds, and their ratios."""
    library = args.libraries[0]
    own: list[tuple[float, float]] = []
    tool: list[tuple[float, float]] = []
    scan(library)  # both find the file in the page cache
    for _ in range(args.rounds):
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        scan(library)
        own.append((time.perf_counter() - wall_s, time.process_time() - cpu_s))
        wall_s, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
        ask_cuobjdump(args.cuobjdump[:1], library)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        tool.append((time.perf_counter() - wall_s, cpu_s))
    medians = {
        name: {"wall_s": statistics.median(r[0] for r in rows), "cpu_s": statistics.median(r[1] for r in rows)}
        for name, rows in (("reader", own), ("cuobjdump", tool))
    }
    ratio = {key: medians["cuobjdump"][key] / medians["reader"][key] for key in ("wall_s", "cpu_s")}
    print(json.dumps({"library": library, "rounds": args.rounds, "medians": medians, "ratio": ratio}, indent=1))
    return 0


def verb(args: argparse.Namespace) -> int:
    """Run the whole command and print medians of wall and CPU seconds and the highest peak memory (maximum resident set)."""
    command = [sys.executable, "-m", "ray_nccl_guard", "compat", "--target", "sm_120", "--json"]
    rows: list[tuple[float, float, int]] = []
    for _ in range(args.rounds + 1):
        start_s = time.perf_counter()
        child = subprocess.Popen(command, stdout=subprocess.DEVNULL, cwd=ROOT)
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        rows.append((time.perf_counter() - start_s, usage.ru_utime + usage.ru_stime, usage.ru_maxrss))
    rows = rows[1:]  # the first finds files and bytecode cold
    wall_s, cpu_s = (statistics.median(row[i] for row in rows) for i in (0, 1))
    answer = {
        "command": " ".join(command[1:]),
        "rounds": args.rounds,
        "exit": child.returncode,
        "wall_s": wall_s,
        "cpu_s": cpu_s,
    }
    print(json.dumps(answer | {"peak_mib": max(row[2] for row in rows) / 1024}, indent=1))
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["equal", "wheels", "timing", "verb", "publish"])
    parser.add_argument("libraries", nargs="*", metavar="LIBRARY")
    parser.add_argument("--cuobjdump", action="append", default=[], metavar="TOOL")
    parser.add_argument("--record", default=str(RECORD), help="JSON lines, one wheel each")
    parser.add_argument("--only", default="", metavar="REGEX", help="wheels: only versions that match")
    parser.add_argument("--packages", action="append")
    parser.add_argument("--cache", default=None, metavar="DIR", help="where a wheel lies while it is scanned (under 1 GB)")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    if args.what == "publish":
        import gpu_support

        return gpu_support.publish(Path(args.record))
    return {"equal": equal, "wheels": wheels, "timing": timing, "verb": verb}[args.what](args)


if __name__ == "__main__":
    raise SystemExit(main())
