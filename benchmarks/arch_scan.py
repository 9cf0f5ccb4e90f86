"""Measures the fatbin reader against cuobjdump: equality on installed libraries and published wheels, CPU and wall time.

    python benchmarks/arch_scan.py timing [LIBRARY...] [--rounds 5]  # reader and tool in turn, and the `compat` verb whole
    python benchmarks/arch_scan.py equal LIBRARY... [--cuobjdump TOOL]
    python benchmarks/arch_scan.py wheels [--cuobjdump TOOL] [--only 2.26] [--cache DIR]
    python benchmarks/arch_scan.py publish                           # rewrites compat/wheels.py and docs/gpu-support.md

`timing` takes the installed libnccl and libtorch_cuda where none is named, and compares what both say too. `wheels` downloads
one wheel at a time through pip, scans it, deletes it, and appends one JSON line: it may be stopped and started again.
cuobjdump is the one that triton brings, unless another is named (package nvidia-cuda-cuobjdump); releases from 13.5 on refuse
libraries built with CUDA 12.3 and older, so two may be named, and the first that exits 0 is believed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import resource
import subprocess
import sys
import tempfile
import time
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import harness  # noqa: E402
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
    """Alternate reader and tool on each library, and run the whole verb."""
    libraries = args.libraries or installed()
    top, rows, found = harness.head("The fatbin reader and `compat`, beside cuobjdump"), [], []
    for library in libraries:
        name, wrong = Path(library).name, differences(scan(library), ask_cuobjdump(args.cuobjdump, library)[0])
        cases = {"reader": lambda lib=library: timed(scan, lib)}
        cases["cuobjdump"] = lambda lib=library: timed(ask_cuobjdump, args.cuobjdump, lib)
        taken = harness.alternate(cases, rounds=args.rounds, warm_up=0)  # both find the file in the page cache
        for case, values in taken.items():
            cpu, wall_s = harness.summary([c for _, c in values]), harness.summary([w for w, _ in values])["median"]
            rows.append({"table": "reading a library", "case": f"{name}, {case}", "unit": "CPU s", **cpu, "wall s": wall_s})
        ratios = [harness.ratio([v[i] for v in taken["cuobjdump"]], [v[i] for v in taken["reader"]]) for i in (0, 1)]
        wall, cpu_times = map(harness.times, ratios)
        same = "differently" if wrong else "alike"
        found.append(
            f"{name}: cuobjdump takes {wall} of the reader's wall time and {cpu_times} of its CPU; both count images {same}."
        )
    verb = [harness.measured(VERB) for _ in range(args.rounds + 1)][1:]  # the first finds files and bytecode cold
    cpu, peak_mib = harness.summary([used.cpu_s for used in verb]), max(used.peak_mib for used in verb)
    wall = harness.summary([used.wall_s for used in verb])["median"]
    row = {"table": "the verb, whole process", "case": "compat --target sm_120 --json", "unit": "CPU s", **cpu}
    rows.append({**row, "wall s": wall, "peak MiB": round(peak_mib), "exit code": verb[0].code})
    found.append(f"`ray-nccl-guard compat` as a whole process: {cpu['median']:.2g} CPU s, {peak_mib:.0f} MiB at its peak.")
    harness.show(args, top, rows, [f"cuobjdump: {_tool_version(args.cuobjdump[0])}."], found=found)
    return 0


VERB = (
    "import runpy, sys; sys.argv[1:] = ['compat', '--target', 'sm_120', '--json'];"
    "runpy.run_module('ray_nccl_guard', run_name='__main__')"
)


def timed(run: Any, *arguments: Any) -> tuple[float, float]:
    """Wall and CPU seconds of a call, its child processes included."""
    wall_s, before = time.perf_counter(), _cpu_s()
    run(*arguments)
    return time.perf_counter() - wall_s, _cpu_s() - before


def _cpu_s() -> float:
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def installed() -> list[str]:
    """The libraries of the installed torch that hold GPU code."""
    site = _folder("torch").parent
    return [
        str(path)
        for path in (*site.glob("nvidia/nccl/lib/libnccl.so.*"), site / "torch/lib/libtorch_cuda.so")
        if path.exists()
    ]


def shipped_tool() -> list[str]:
    """triton's cuobjdump, where triton is installed."""
    tool = _folder("triton") / "backends/nvidia/bin/cuobjdump"
    return [str(tool)] if tool.exists() else []


def _folder(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    return Path(spec.origin).parent if spec and spec.origin else Path("not installed")


def main() -> int:
    parser = harness.arguments(__doc__)
    parser.add_argument("what", nargs="?", default="timing", choices=["timing", "equal", "wheels", "publish"])
    parser.add_argument("libraries", nargs="*", metavar="LIBRARY")
    parser.add_argument("--cuobjdump", action="append", default=[], metavar="TOOL")
    parser.add_argument("--record", default=str(RECORD), help="JSON lines, one wheel each")
    parser.add_argument("--only", default="", metavar="REGEX", help="wheels: only versions that match")
    parser.add_argument("--packages", action="append")
    parser.add_argument("--cache", default=None, metavar="DIR", help="where a wheel lies while it is scanned (under 1 GB)")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    args.cuobjdump = args.cuobjdump or shipped_tool()
    if args.what == "publish":
        import gpu_support

        return gpu_support.publish(Path(args.record))
    if not args.cuobjdump and args.what != "wheels":
        parser.error("no cuobjdump is installed: install triton or nvidia-cuda-cuobjdump, or name one with --cuobjdump")
    return {"equal": equal, "wheels": wheels, "timing": timing}[args.what](args)


if __name__ == "__main__":
    raise SystemExit(main())
