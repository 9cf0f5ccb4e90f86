"""What the guard adds to a healthy start, and how soon it speaks when something is broken: gloo, CPU workers, a local Ray.

    python benchmarks/start_cost.py [--workers 2 4] [--rounds 7] [--faults] [--json]
    python benchmarks/start_cost.py --device cuda --workers 1                     # NCCL, a GPU for each worker

Plain `TorchConfig` and `GuardedTorchConfig` start in turn, each in a fit() of its own, so that first imports are paid as a
user pays them. Ray looks at its workers every 0.2 s here (default: 2 s), or each fit() would wait for that at its end.
`on_start` is timed in the controller. Memory is what a worker holds privately when `train_func` begins, and what the probe's
children hold privately at their peak. `--faults` measures the verdict: seconds from the moment in which a rank raises, dies
or hangs to the verdict over all ranks, at the level of children.
"""

from __future__ import annotations

import compileall
import json
import os
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import ray
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from ray.train.torch.config import _TorchBackend

from benchmarks import harness
from ray_nccl_guard import GuardedTorchConfig
from ray_nccl_guard.ray_train.backend import GuardedBackend

ROOT = Path(__file__).resolve().parent.parent
NOTES = "START_COST_NOTES"
FRESH = "a worker dies while the training group forms, 2 workers"


def _note(name: str, value: dict[str, Any]) -> None:
    Path(os.environ[NOTES], f"{name}-{os.getpid()}").write_text(json.dumps(value))


class TimedPlain(_TorchBackend):
    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        started_s = time.monotonic()
        super().on_start(worker_group, backend_config)
        _note("on_start", {"seconds": time.monotonic() - started_s})


class TimedGuarded(GuardedBackend):
    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        started_s = time.monotonic()
        try:
            super().on_start(worker_group, backend_config)
        finally:  # an attempt that ends in fresh workers leaves its note too; the last one stands
            _note("on_start", {"seconds": time.monotonic() - started_s})
            _note(f"ended-{started_s}", {"at_s": time.monotonic()})


# Ray sends a config to every worker. A class of this script goes by value, with all that it refers to: so these refer to the
# timed backends by name, as the real configs do, and a worker does not import the controller's half.
class PlainConfig(TorchConfig):
    @property
    def backend_cls(self) -> Any:
        from benchmarks import start_cost

        return start_cost.TimedPlain


class GuardedConfig(GuardedTorchConfig):
    @property
    def backend_cls(self) -> Any:
        from benchmarks import start_cost

        return start_cost.TimedGuarded


def private_mib(pid: int | str) -> float:
    """Memory that only this process holds, in MiB."""
    total = 0
    with open(f"/proc/{pid}/smaps_rollup") as file:
        for line in file:
            if line.startswith(("Private_Clean", "Private_Dirty")):
                total += int(line.split()[1])
    return total / 1024


def train_func(config: dict[str, Any]) -> None:
    import ray.train.torch
    import torch
    import torch.distributed as dist

    began_s = time.monotonic()
    # As the first step of any training does: a collective. Only then do both arms hold the same library pages.
    dist.all_reduce(torch.ones(1).to(ray.train.torch.get_device()))
    time.sleep(0.2)
    _note("worker", {"private_mib": private_mib("self"), "began_s": began_s})


class PeakOfChildren(threading.Thread):
    """Samples the private memory of probe children, found by their journal. Looking costs a core: never beside what is timed."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak_mib = 0.0
        self.stop = threading.Event()

    def run(self) -> None:
        while not self.stop.wait(0.01):
            holders = {pid for pid in filter(str.isdigit, os.listdir("/proc")) if _holds_a_pulse(pid)}
            for pid in holders:
                try:
                    parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]
                    if parent in holders:  # the launcher holds the journal's descriptors too; the child is below it
                        self.peak_mib = max(self.peak_mib, private_mib(pid))
                except OSError:
                    continue  # it ended while we looked


def _holds_a_pulse(pid: str) -> bool:
    """Whether a process has a probe's pulse open."""
    try:
        return any("memfd:nccl-guard-pulse" in os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return False  # it ended while we looked, or is another user's


def peak_of_children_mib(workers: int, backend: str) -> float:
    """Private MiB of the largest probe child of one more guarded fit(), which is not timed."""
    children = PeakOfChildren()
    children.start()
    one_fit(GuardedConfig(backend=backend), workers, f"memory-{workers}")
    children.stop.set()
    children.join(5)
    return children.peak_mib


def one_fit(config: TorchConfig, workers: int, name: str, loop: dict[str, Any] | None = None) -> dict[str, float]:
    """One fit(): seconds of on_start, of the whole fit, and until train_func began; mean private MiB of a worker.

    `replaced_s` is from the end of the first worker group's start to the beginning of train_func: what fresh workers cost.
    """
    with tempfile.TemporaryDirectory() as folder:
        notes = Path(folder, "notes")
        notes.mkdir()
        started_s = time.monotonic()
        TorchTrainer(
            train_func,
            train_loop_config=loop or {},
            torch_config=config,
            scaling_config=ScalingConfig(num_workers=workers, use_gpu=config.backend == "nccl"),
            run_config=RunConfig(name=name, storage_path=folder, worker_runtime_env={"env_vars": {NOTES: str(notes)}}),
        ).fit()
        seconds = time.monotonic() - started_s
        own = json.loads(next(Path(os.environ[NOTES]).glob("on_start-*")).read_text())
        for file in Path(os.environ[NOTES]).glob("on_start-*"):
            file.unlink()
        ends = [json.loads(file.read_text())["at_s"] for file in Path(os.environ[NOTES]).glob("ended-*")]
        for file in Path(os.environ[NOTES]).glob("ended-*"):
            file.unlink()
        workers_notes = [json.loads(file.read_text()) for file in notes.glob("worker-*")]
        began_s = max(note["began_s"] for note in workers_notes)
        return {
            "on_start_s": own["seconds"],
            "worker_mib": sum(note["private_mib"] for note in workers_notes) / len(workers_notes),
            "fit_s": seconds,
            "until_training_s": began_s - started_s,
            "replaced_s": began_s - min(ends) if ends else 0.0,
        }


def healthy(workers: int, rounds: int, backend: str, *, first: bool) -> tuple[list[dict[str, Any]], str]:
    """Rows and a sentence for one number of workers: plain and guarded in turn. The first number warms up for all, and its
    fit() is that in which a probe's child is weighed, which has the same to hold in any world."""
    taken: dict[str, list[dict[str, float]]] = {"plain": [], "guarded": []}

    def run(arm: str) -> float:
        config = PlainConfig(backend=backend) if arm == "plain" else GuardedConfig(backend=backend)
        taken[arm].append(one_fit(config, workers, f"{arm}-{workers}-{len(taken[arm])}"))
        return taken[arm][-1]["on_start_s"]

    warm_up = int(first and rounds > 1)
    values = harness.alternate({arm: lambda arm=arm: run(arm) for arm in taken}, rounds=rounds, warm_up=warm_up)  # type: ignore[misc]
    kept = {arm: results[-rounds:] for arm, results in taken.items()}
    added = [g - p for g, p in zip(values["guarded"], values["plain"], strict=True)]
    seconds = {
        **{f"on_start, {arm}": values[arm] for arm in values},
        "added to on_start": added,
        "whole fit(), plain": [result["fit_s"] for result in kept["plain"]],
    }
    memory = {
        **{f"a worker in training, {arm}": [result["worker_mib"] for result in kept[arm]] for arm in kept},
        **({"a probe's child at its peak": [peak_of_children_mib(workers, backend)]} if first else {}),
    }
    rows = [
        {"table": table, "case": f"{name}, {workers} workers", "unit": unit, **harness.summary(taken_of)}
        for table, unit, cases in (("time", "s", seconds), ("private memory", "MiB", memory))
        for name, taken_of in cases.items()
    ]
    extra = harness.summary(added)
    noise = " (not told from the noise)" if extra["spread"] >= abs(extra["median"]) else ""
    return rows, f"The guard adds {extra['median']:.2g} s to the start of {workers} workers{noise}."


def replaced(rounds: int) -> tuple[list[dict[str, Any]], str]:
    """A worker dies while the training group forms: the next attempt's way to train_func beside a plain fit()'s."""
    from tests.ray.faults import Fault

    def plain() -> float:
        return one_fit(PlainConfig(backend="gloo"), 2, f"plain-{time.monotonic_ns()}")["until_training_s"]

    def fresh() -> float:
        with tempfile.TemporaryDirectory() as folder:
            fault = Fault("worker", "init_process_group", "abort", rank=1, once=f"{folder}/once")
            name = f"fresh-{time.monotonic_ns()}"
            return one_fit(GuardedConfig(backend="gloo"), 2, name, loop={"fault": fault})["replaced_s"]

    values = harness.alternate({"plain": plain, "fresh": fresh}, rounds=rounds, warm_up=0)  # healthy() has warmed up
    times = harness.times(harness.ratio(values["fresh"], values["plain"]))
    rows = [
        {"table": FRESH, "case": "fit() to train_func, plain", "unit": "s", **harness.summary(values["plain"])},
        {"table": FRESH, "case": "verdict to train_func on fresh workers", "unit": "s", **harness.summary(values["fresh"])},
    ]
    return rows, f"From a verdict to train_func on fresh workers, against a plain fit()'s way to it: {times}."


def verdicts(rounds: int) -> list[dict[str, Any]]:
    """Seconds from a fault to the verdict, without Ray: three ranks, the fault on one of them."""
    import ctypes

    from ray_nccl_guard.evidence import align
    from ray_nccl_guard.verdict import classify
    from tests.process.ranks import QUICK, in_child, run_ranks

    def fail() -> None:
        raise RuntimeError("a fault of the benchmark")

    faults = {"raise": fail, "die": os.abort, "hang": lambda: ctypes.PyDLL(None).pause()}
    rows = []
    for name, fault in faults.items():
        seconds = []
        for _ in range(rounds):
            with tempfile.NamedTemporaryFile() as stamp:

                def strike(fault: Any = fault, path: str = stamp.name) -> None:
                    if not Path(path).read_text():  # the signal that asks a hung child for its stack wakes it once more
                        Path(path).write_text(str(time.monotonic()))
                    fault()

                results = run_ranks(3, before=lambda rank, strike=strike: in_child(rank, 1, "all_reduce", strike))
                verdict = classify(align(results, world_size=3, backend="gloo"))
                seconds.append(time.monotonic() - float(Path(stamp.name).read_text()))
                assert verdict.culprit_ranks == (1,), verdict
        deadline = f" (deadline {QUICK.collective_s:g} s)" if name == "hang" else ""
        rows.append(
            {"table": "fault to verdict, 3 ranks", "case": f"{name}{deadline}", "unit": "s", **harness.summary(seconds)}
        )
    return rows


def main() -> None:
    parser = harness.arguments(__doc__)
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--faults", action="store_true", help="also measure fault to verdict")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="cuda: NCCL, each worker on its GPU")
    given = parser.parse_args()
    backend = "nccl" if given.device == "cuda" else "gloo"
    top = harness.head(f"What the guard adds to a healthy start on {backend}, and how soon it speaks")
    rows: list[dict[str, Any]] = []
    found = []
    # As pip does at install; where PYTHONDONTWRITEBYTECODE is set, each worker would compile a checkout's sources anew.
    compileall.compile_dir(ROOT / "ray_nccl_guard", quiet=1)
    with tempfile.TemporaryDirectory() as notes:
        os.environ[NOTES] = notes
        os.environ["PYTHONPATH"] = ":".join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        os.environ.setdefault("RAY_AUTH_MODE", "disabled")
        os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.2")
        ray.init(num_cpus=max(given.workers), include_dashboard=False, log_to_driver=False)
        try:
            if given.device == "cuda" and ray.cluster_resources().get("GPU", 0) < max(given.workers):
                parser.error(f"--device cuda: there are no {max(given.workers)} GPUs here")  # Ray would wait for ever
            for workers in given.workers:
                more, sentence = healthy(workers, given.rounds, backend, first=workers == given.workers[0])
                rows += more
                found.append(sentence)
            if given.faults:
                more, sentence = replaced(min(given.rounds, 3))
                rows += more
                found.append(sentence)
        finally:
            ray.shutdown()
        if given.faults:
            rows += verdicts(min(given.rounds, 3))
    harness.show(given, top, rows, found=found)


if __name__ == "__main__":
    main()
