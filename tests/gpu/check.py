"""What only a real GPU shows: real NCCL under the probe, a context lost for real beside a healthy parent, the cost of a start.

Run by check.sh. This process never touches CUDA, as a worker has not before its probe: everything happens in its children.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from ray_nccl_guard import facts
from ray_nccl_guard.evidence import align
from ray_nccl_guard.probe.operations import OPERATIONS
from ray_nccl_guard.probe.spec import Outcome, ProbeResult, ProbeSpec, Start
from ray_nccl_guard.verdict import Verdict, classify
from tests.fakegpu.ranks import abandoned_shared_memory
from tests.process.ranks import run_ranks

# A GPU that has just been handed over may need long for its first context; what is slow is printed, not refused.
SPEC = ProbeSpec(device_s=60, comm_init_s=60, collective_s=30)
CHILD_S = 120.0


def on_the_double() -> bool:
    """Whether this process has, or will load, the test suite's fake CUDA runtime: by LD_PRELOAD or by LD_LIBRARY_PATH.

    The library is read, not loaded: a loaded one would be taken for torch's own.
    """
    mark = "fakegpu_set_faults"
    found = [Path(folder, "libcudart.so.13") for folder in os.environ.get("LD_LIBRARY_PATH", "").split(":") if folder]
    return hasattr(ctypes.CDLL(None), mark) or any(mark.encode() in path.read_bytes() for path in found if path.is_file())


ON_THE_DOUBLE = on_the_double()


class Failed(Exception):
    """A check saw something else than it must."""


def must(holds: bool, text: str) -> None:
    if not holds:
        raise Failed(text)


def probe(ranks: int = 1, **options: object) -> list[ProbeResult]:
    """A probe of `ranks` ranks, all on the first GPU."""
    return run_ranks(ranks, **{"backend": "nccl", "spec": SPEC, "device_index": 0, "deadline_s": 200.0, **options})  # type: ignore[arg-type]


def verdict_of(results: list[ProbeResult]) -> Verdict:
    return classify(align(results, world_size=len(results), backend="nccl"))


def told(result: ProbeResult) -> str:
    steps = ", ".join(f"{s.step.value} {s.seconds:.2f}" for s in result.steps)
    sizes = ", ".join(f"{size} B {1000 * s:.2f} ms" for size, s in result.all_reduce_s.items())
    return f"{result.seconds:.2f} s by {result.start.value} ({steps}; all_reduce {sizes})"


def good(results: list[ProbeResult]) -> ProbeResult:
    bad = [r for r in results if r.outcome is not Outcome.OK]
    must(not bad, f"{[(r.rank, r.outcome.value, r.step, r.error) for r in bad]} {verdict_of(results).summary}")
    return results[0]


def the_facts() -> str:
    started_s = time.monotonic()
    fact = facts.collect(0, device_index=0)
    must(fact.gpu is not None, f"NVML names no GPU: {dict(fact.not_run)}")
    assert fact.gpu is not None
    return (
        f"{fact.gpu.name}, compute capability {fact.gpu.capability}, driver {fact.driver_version} (CUDA {fact.driver_cuda}), "
        f"torch {fact.torch_version}, NCCL {fact.libnccl.get('version', '?')} at {fact.libnccl.get('path', '?')}; findings "
        f"{[f.text for f in fact.findings]}; not run {dict(fact.not_run)}; {time.monotonic() - started_s:.2f} s"
    )


def an_eager_group_proves_every_collective() -> str:
    result = good(probe(collectives=OPERATIONS))
    must(set(result.proved) == set(OPERATIONS), f"proved only {result.proved}")
    held = (result.free_before_bytes or 0) - (result.free_after_bytes or 0)
    return f"{told(result)}; {held >> 20} MiB of GPU memory while it lived"


def the_second_probe_is_the_usual_cost() -> str:
    return told(good(probe(collectives=("broadcast", "all_gather", "barrier", "object_gather"))))


def a_fresh_process_proves_the_same() -> str:
    result = good(probe(spec=ProbeSpec(device_s=60, comm_init_s=60, collective_s=30, start=Start.SPAWN)))
    return told(result)


def the_older_backend_proves_the_same() -> str:
    import torch

    if tuple(int(p) for p in torch.__version__.split("+")[0].split(".")[:2]) < (2, 15):
        return "not run: this torch has one nccl backend"
    return told(good(probe(backend="nccl-legacy")))


def a_worker_that_has_asked_for_cuda_is_probed_by_spawn() -> str:
    def ask(rank: int) -> None:
        import torch

        must(torch.cuda.is_available(), "torch.cuda.is_available() is False")

    result = good(probe(before=ask))
    must(result.start is Start.SPAWN, f"started by {result.start.value}: a fork after the parent's first CUDA call was used")
    return told(result)


LOSE_THE_CONTEXT = """
import ctypes, sys, torch
torch.cuda.init(); torch.ones(1).to("cuda")
if hasattr(ctypes.CDLL(None), "fakegpu_set_faults"):
    ctypes.CDLL(None).fakegpu_set_faults(b"devsync:cuda700")
else:
    kernel = torch.cuda._compile_kernel('extern "C" __global__ void poke() { *(volatile int *)16 = 1; }', "poke")
    kernel((1, 1, 1), (1, 1, 1), ())
seen = []
for call in (torch.cuda.synchronize, lambda: torch.empty(1 << 22, device="cuda"), lambda: torch.ones(4).to("cuda")):
    try:
        call(); seen.append("no error")
    except RuntimeError as error:
        seen.append(str(error).splitlines()[0])
print("|".join(seen), flush=True)
import os; os._exit(0)
"""


def a_context_lost_in_one_process_leaves_others_usable() -> str:
    done = subprocess.run(
        [sys.executable, "-c", LOSE_THE_CONTEXT], capture_output=True, text=True, timeout=CHILD_S, check=False
    )
    said = done.stdout.strip().splitlines()[-1:] or [done.stderr[-500:]]
    must(said[0].count("illegal memory access") == 3, f"the calls after the fault said {said[0]!r}")
    return f"three later calls said {said[0].split('|')[0]!r}; then on the same GPU: {told(good(probe()))}"


def two_ranks_on_one_gpu_are_refused_by_nccl_and_named() -> str:
    started_s = time.monotonic()
    results = probe(2)
    verdict = verdict_of(results)
    must(
        verdict.failure.value == "duplicate_gpu",
        f"called {verdict.failure.value}: {verdict.summary} {[r.error for r in results]}",
    )
    quote = verdict.evidence[0].text if verdict.evidence else ""
    return f"{time.monotonic() - started_s:.1f} s, from {quote!r}"


def everything_is_handed_back() -> str:
    import pynvml

    pynvml.nvmlInit()
    used = pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0)).used
    after_s = time.monotonic() + 10
    while used > USED_BEFORE + (64 << 20) and time.monotonic() < after_s:
        time.sleep(0.1)
        used = pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0)).used
    must(used <= USED_BEFORE + (64 << 20), f"{(used - USED_BEFORE) >> 20} MiB of GPU memory are not back")
    while (left := abandoned_shared_memory() - SHM_BEFORE) and time.monotonic() < after_s:
        time.sleep(0.1)  # another job's file may be about to be mapped
    must(not left, f"left in /dev/shm: {sorted(left)}")
    return f"GPU memory in use {USED_BEFORE >> 20} MiB before, {used >> 20} MiB behind; nothing in /dev/shm"


def _used() -> int:
    import pynvml

    pynvml.nvmlInit()
    return int(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0)).used)


CHECKS: tuple[Callable[[], str], ...] = (
    the_facts,
    an_eager_group_proves_every_collective,
    the_second_probe_is_the_usual_cost,
    a_fresh_process_proves_the_same,
    the_older_backend_proves_the_same,
    a_worker_that_has_asked_for_cuda_is_probed_by_spawn,
    a_context_lost_in_one_process_leaves_others_usable,
    two_ranks_on_one_gpu_are_refused_by_nccl_and_named,
    everything_is_handed_back,
)


def main() -> int:
    started_s = time.monotonic()
    import torch

    print(
        f"# tests/gpu/check.sh {'on the double: no figure here says anything about a GPU' if ON_THE_DOUBLE else 'on a GPU'}"
    )
    print(f"\nimport torch {torch.__version__}: {time.monotonic() - started_s:.1f} s; {os.cpu_count()} CPUs\n")
    print("| check | result | seconds | seen |\n|---|---|---|---|")
    failures = 0
    for check in CHECKS:
        check_s, result = time.monotonic(), "ok"
        try:
            seen = check()
        except Failed as failure:
            result, seen = "FAILED", str(failure)
        except Exception:  # a check that cannot be made is a failure too, and the next ones still run
            result, seen = "FAILED", traceback.format_exc()[-800:].replace("\n", " / ")
        failures += result != "ok"
        cell = seen.replace("|", "\\|").replace("\n", " ")
        print(f"| {check.__name__.replace('_', ' ')} | {result} | {time.monotonic() - check_s:.1f} | {cell} |", flush=True)
    print(f"\n{failures} of {len(CHECKS)} failed; {time.monotonic() - started_s:.0f} s in all")
    return 1 if failures else 0


if __name__ == "__main__":
    USED_BEFORE, SHM_BEFORE = _used(), abandoned_shared_memory()
    sys.exit(main())
