"""One Ray for all tests of a file, and a fit() whose outcome can be asked."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

ray = pytest.importorskip("ray", reason="ray is not installed")
# gloo ends a call after this; it is also how long a rank waits for another to join the warm-up on a busy machine.
HANG_S = 15
MARK = "TESTS_RAY_STARTED_BY"
ROOT = str(Path(__file__).resolve().parents[2])


@dataclass
class Fit:
    """What came of one fit()."""

    error: BaseException | None
    report: dict[str, Any]
    seconds: float
    metrics: list[dict[str, Any]] = field(default_factory=list)
    pids: set[int] = field(default_factory=set)

    @property
    def refused(self) -> Any:
        """The guard's own error behind Ray's."""
        return getattr(self.error, "controller_failure", None) or getattr(self.error, "__cause__", None)


@pytest.fixture(scope="module")
def cluster():
    os.environ["RAY_AUTH_MODE"] = "disabled"
    os.environ["PYTHONPATH"] = ROOT
    os.environ[MARK] = str(os.getpid())
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=True, configure_logging=False)
    yield ray
    ray.shutdown()


@pytest.fixture
def fit(cluster, tmp_path):
    """Run a guarded fit() of 2 workers and give back what came of it; checks that everything was handed back."""
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    runs: list[str] = []

    def run(config, *, train=train_and_note, workers=2, loop=None, failure=None, name=None) -> Fit:
        name = name or f"run{len(runs)}"
        runs.append(name)
        notes = tmp_path / f"{name}-notes"
        notes.mkdir()
        started_s = time.monotonic()
        error = None
        try:
            TorchTrainer(
                train,
                train_loop_config={"notes": str(notes), **(loop or {})},
                torch_config=config,
                scaling_config=ScalingConfig(num_workers=workers),
                run_config=RunConfig(
                    name=name, storage_path=str(tmp_path / "storage"), failure_config=failure or FailureConfig()
                ),
            ).fit()
        except Exception as raised:  # the tests look at it
            error = raised
        seconds = time.monotonic() - started_s
        path = tmp_path / "storage" / name / "nccl_guard" / "report.json"
        report = json.loads(path.read_text()) if path.exists() else {}
        metrics = [json.loads(file.read_text()) for file in sorted(notes.iterdir())]
        everything_is_back()
        return Fit(error=error, report=report, seconds=seconds, metrics=metrics)

    return run


@pytest.fixture
def hang(fit, tmp_path, capfd):
    """Train on gloo workers with one of flight_loops; gives back the outcome, the driver's output, the folder of the dumps."""
    from ray_nccl_guard import GuardedTorchConfig, ProbeSpec

    def run(loop, workers=3):
        capfd.readouterr()
        config = GuardedTorchConfig(backend="gloo", timeout_s=HANG_S, probe=ProbeSpec())
        outcome = fit(config, train=loop, workers=workers, name="hung", loop={"hang_s": HANG_S})
        out, err = capfd.readouterr()
        folder = tmp_path / "storage" / "hung" / "nccl_guard" / "flight" / "1"
        assert len(outcome.metrics) == workers
        assert not any(os.path.exists(os.path.dirname(m["dumps"])) for m in outcome.metrics), "the node's folder is removed"
        return outcome, out + err, folder

    return run


def train_and_note(config: dict[str, Any]) -> None:
    """A train_func that notes what it ran on."""
    import ray.train
    import torch
    import torch.distributed as dist

    from ray_nccl_guard import current_report

    tensor = torch.full((8,), float(dist.get_rank() + 1))
    dist.all_reduce(tensor)
    rank = ray.train.get_context().get_world_rank()
    report = current_report()
    note = {
        "rank": rank,
        "backend": dist.get_backend(),
        "sum": tensor[0].item(),
        "world_size": dist.get_world_size(),
        "action": report["action"] if report else None,
        "pid": os.getpid(),
    }
    with open(f"{config['notes']}/{rank}", "w") as file:
        json.dump(note, file)


def everything_is_back(within_s: float = 20.0) -> None:
    """All CPUs are free again and no process of a probe is left. Only of this Ray: other tests may run on the machine."""
    end_s = time.monotonic() + within_s
    assert any(_is_of_this_ray(int(pid)) for pid in filter(str.isdigit, os.listdir("/proc"))), "its processes are not known"
    while ray.available_resources().get("CPU") != ray.cluster_resources()["CPU"]:
        assert time.monotonic() < end_s, f"resources are not back: {ray.available_resources()}"
        time.sleep(0.1)
    while probing := probe_processes():
        assert time.monotonic() < end_s, f"processes of a probe are left: {probing}"
        time.sleep(0.1)


def probe_processes() -> set[int]:
    """Processes that hold a probe's journal: a child, or a launcher in the middle of one."""
    found = set()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            for fd in os.listdir(f"/proc/{pid}/fd"):
                if "memfd:nccl-guard-journal" in os.readlink(f"/proc/{pid}/fd/{fd}") and _is_of_this_ray(int(pid)):
                    found.add(int(pid))
        except OSError:
            continue  # it ended while we looked
    return found


def _is_of_this_ray(pid: int) -> bool:
    """Started with the mark that `cluster` gives its Ray, whose workers and their children inherit it."""
    try:
        return f"{MARK}={os.getpid()}\0".encode() in Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False
