"""A driver under the double: one local Ray with fake GPUs, and guarded fit() calls on request (a line of JSON each).

The request names what differs from a healthy guarded fit(): FAKE_FAULT, workers, the training function in `fit_bodies`, the
policy. The answer is what came of it: the error, the report, what each rank noted, what the controller logged, what is left.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from ray_nccl_guard import GuardedTorchConfig, Policy, ProbeSpec
from tests.fakegpu.ranks import abandoned_shared_memory


def fit(request: dict[str, Any], folder: Path) -> dict[str, Any]:
    """One guarded fit() as `request` says."""
    folder.mkdir()
    notes = folder / "notes"
    notes.mkdir()
    bodies = importlib.import_module("tests.fakegpu.fit_bodies")
    loop: dict[str, Any] = {"notes": str(notes), **request.get("loop", {})}
    if (module := request.get("brings")) is not None:
        loop["from_a_module"] = importlib.import_module(module).Setting()  # unpickled, and so imported, in every worker
    before = abandoned_shared_memory()
    started_s = time.monotonic()
    error = None
    try:
        TorchTrainer(
            getattr(bodies, request.get("train", "note")),
            train_loop_config=loop,
            torch_config=GuardedTorchConfig(
                backend=request.get("backend"),
                policy=Policy(**policy) if isinstance(policy := request.get("policy"), dict) else policy,
                collectives=request.get("collectives"),
                probe=ProbeSpec(**request.get("spec", {})),
                eager_init=request.get("eager_init", True),
            ),
            scaling_config=ScalingConfig(
                num_workers=request.get("workers", 2),
                use_gpu=True,
                resources_per_worker={"CPU": 1, "GPU": request.get("gpus", 1)},
            ),
            run_config=RunConfig(
                name="run",
                storage_path=str(folder),
                failure_config=FailureConfig(max_failures=request.get("max_failures", 0)),
                worker_runtime_env={"env_vars": {"FAKE_CUDA_STATE": str(folder), **request.get("env", {})}},
            ),
        ).fit()
    except Exception as raised:  # what the test looks at
        traceback.print_exc()
        error = getattr(raised, "controller_failure", None) or raised
    seconds = time.monotonic() - started_s
    path = folder / "run" / "nccl_guard" / "report.json"
    return {
        "error": None if error is None else [type(error).__name__, str(error)],
        "report": json.loads(path.read_text()) if path.exists() else {},
        "notes": [json.loads(file.read_text()) for file in sorted(notes.iterdir())],
        "seconds": seconds,
        "left": left(before),
    }


def left(before: set[str], within_s: float = 20.0) -> list[str]:
    """What is still taken `within_s` behind a fit(): CPUs, GPUs, processes of a probe of this session, NCCL's files."""
    end_s = time.monotonic() + within_s
    while True:
        free, all_of = ray.available_resources(), ray.cluster_resources()
        found = [
            f"{kind}: {free.get(kind, 0)} of {all_of[kind]}" for kind in ("CPU", "GPU") if free.get(kind) != all_of[kind]
        ]
        found += [f"process {pid}" for pid in probes()] + sorted(abandoned_shared_memory() - before)
        if not found or time.monotonic() > end_s:
            return found
        time.sleep(0.1)


def probes() -> list[int]:
    """Processes of this Ray that hold a probe's journal: a child, or a launcher in the middle of one."""
    mine = f"FAKE_FIT={os.environ['FAKE_FIT']}".encode()
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if mine in (entry / "environ").read_bytes().split(b"\0"):
                if any("memfd:nccl-guard-journal" in os.readlink(fd) for fd in (entry / "fd").iterdir()):
                    found.append(int(entry.name))
        except OSError:
            continue  # it ended while we looked
    return found


def main(answers: int, folder: Path) -> None:
    logging.getLogger("ray.train").setLevel(logging.WARNING)
    # How often the controller asks whether the workers are through: at Ray's 2 s every fit() here would wait for the next time.
    os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.2")
    ray.init(num_cpus=4, include_dashboard=False, object_store_memory=100 << 20)
    for number, line in enumerate(sys.stdin):
        answer = fit(json.loads(line), folder / str(number))
        os.write(answers, (json.dumps(answer) + "\n").encode())
    ray.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
