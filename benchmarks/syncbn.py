"""What a fall-back from NCCL to gloo costs in training with SyncBatchNorm: a guarded Ray Train job, both backends in turn.

    python benchmarks/syncbn.py [--workers 1 2 4] [--batches 16 64] [--models resnet18 resnet50] [--dtypes fp32 bf16]
    python benchmarks/syncbn.py --address auto --storage /shared/runs --workers 16      # on a cluster of several nodes
    ray job submit --address http://HEAD:8265 --working-dir . -- python benchmarks/syncbn.py
    python benchmarks/syncbn.py --device cpu                                            # gloo alone, where there is no GPU

Each number of workers is one fit(). In it, every network trains on NCCL and on gloo, with SyncBatchNorm and with BatchNorm
left to itself, and on one rank alone; a few steps of each in turn, over and over. Every blocking collective of a step is
marked (CUDA events on a GPU), which splits the step into compute, gradients and statistics. Then single collectives.
Exit code 2 where no GPU is: throughput of GPUs is not guessed. On the test suite's fake GPUs everything runs and all that is
printed says that it is no measurement.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import ray
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

import ray_nccl_guard
from benchmarks import harness, syncbn_plot, syncbn_report
from benchmarks.syncbn_names import LARGEST, OWN_MODELS, TORCHVISION, sizes

ROOT = harness.ROOT
WRONG_USAGE = 2
GROUP_TIMEOUT_S = 240
DEFAULTS: dict[str, dict[str, Any]] = {
    "cuda": {
        "models": ["resnet18", TORCHVISION], "batches": [16, 64], "dtypes": ["fp32", "bf16"], "image": 224,
        "backends": ["nccl", "gloo"], "steps": 5, "rounds": 6,
    },
    "cpu": {
        "models": ["resnet20"], "batches": [4, 16], "dtypes": ["fp32"], "image": 32, "backends": ["gloo"], "steps": 2,
        "rounds": 8,
    },
}  # fmt: skip


class Collector:
    """An actor that takes the answer of rank 0 and keeps it for the driver, on whichever node either is."""

    def __init__(self) -> None:
        self._answer: Any = None

    def put(self, answer: Any) -> None:
        self._answer = answer

    def get(self) -> Any:
        return self._answer


def one_fit(given: argparse.Namespace, workers: int, storage: str) -> dict[str, Any]:
    """One guarded fit() of `workers` workers; what they measured."""
    from benchmarks.syncbn_worker import train_func

    collector = ray.remote(num_cpus=0)(Collector).remote()
    asked = ("models", "batches", "dtypes", "image", "backends", "steps", "rounds", "minutes")
    config = {name: getattr(given, name) for name in asked}
    gpus = {"GPU": given.gpus_per_worker} if given.device == "cuda" else {}
    TorchTrainer(
        train_func,
        train_loop_config={**config, "sizes": sizes(given.largest), "collector": collector},
        torch_config=ray_nccl_guard.from_args(given, backend=given.backends[0], timeout_s=GROUP_TIMEOUT_S),
        scaling_config=ScalingConfig(
            num_workers=workers, use_gpu=given.device == "cuda", resources_per_worker={"CPU": 1, **gpus}
        ),
        run_config=RunConfig(name=f"syncbn-{workers}", storage_path=storage),
    ).fit()
    answer: dict[str, Any] = ray.get(collector.get.remote(), timeout=60)
    ray.kill(collector)
    return answer


def arguments() -> argparse.ArgumentParser:
    parser = harness.arguments(__doc__)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--workers", type=int, nargs="+", help="default: 1, 2, 4 ... as many as there are GPUs (cores)")
    parser.add_argument("--gpus-per-worker", type=float, default=1.0, help="0.5 puts two gloo workers on one GPU")
    parser.add_argument("--models", nargs="+", choices=[*OWN_MODELS, TORCHVISION], help="resnet50 is torchvision's")
    parser.add_argument("--batches", type=int, nargs="+", help="images for each worker")
    parser.add_argument("--dtypes", nargs="+", choices=["fp32", "bf16"])
    parser.add_argument("--image", type=int, help="side of an image in pixels")
    parser.add_argument("--backends", nargs="+", choices=["nccl", "nccl-legacy", "gloo"], help="the first is the job's own")
    parser.add_argument("--steps", type=int, help="steps of an arm before the next one's turn")
    parser.add_argument("--rounds", type=int, help="turns of each arm")
    parser.add_argument("--largest", type=_bytes, default=LARGEST, help="largest collective; 0 for none (default 256M)")
    parser.add_argument("--minutes", type=float, default=15.0, help="start no new case of a fit() after these (default 15)")
    parser.add_argument("--address", help="a running cluster (auto in a job or on a node of it); default: a local one")
    parser.add_argument("--storage", help="where runs are kept: shared by all nodes of a cluster")
    ray_nccl_guard.add_argument(parser)
    parser.set_defaults(nccl_guard="fallback")
    return parser


def _bytes(text: str) -> int:
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    return int(text[:-1]) * units[text[-1]] if text[-1:] in units else int(text)


def start_ray(given: argparse.Namespace) -> None:
    """Join the cluster that is asked for, or of which this is a job; else start one here."""
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if address := given.address or os.environ.get("RAY_ADDRESS"):
        in_job = "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ  # its working directory has brought both packages
        packages = [str(ROOT / "benchmarks"), ray_nccl_guard.__path__[0]]
        ray.init(address=address, log_to_driver=False, runtime_env=None if in_job else {"py_modules": packages})
        return
    os.environ["PYTHONPATH"] = ":".join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    cores = max([len(os.sched_getaffinity(0)), *(given.workers or [])])
    ray.init(num_cpus=cores, include_dashboard=False, log_to_driver=False)


def refusal(given: argparse.Namespace, resources: dict[str, float]) -> str | None:
    """Why this cannot be measured here, or None. Placements that never happen would be waited for for ever."""
    if given.device == "cpu":
        other = [backend for backend in given.backends if backend != "gloo"]
        return f"{', '.join(other)} needs GPUs, and --device is cpu" if other else None
    gpus = resources.get("GPU", 0.0)
    if not gpus:
        return "no GPU in this cluster, so there is no throughput of GPUs to measure; --device cpu measures gloo on the CPU"
    most = max(given.workers)
    if most * given.gpus_per_worker > gpus:
        return f"{most} workers with {given.gpus_per_worker:g} GPUs each do not fit on {gpus:g}"
    return None


def doubled(most: int) -> list[int]:
    """1, 2, 4 ... and `most` itself."""
    return [*(n for n in (1 << k for k in range(most.bit_length())) if n < most), most]


def main() -> int:
    given = arguments().parse_args()
    for name, value in DEFAULTS[given.device].items():
        if getattr(given, name) is None:
            setattr(given, name, value)
    top = harness.head("")
    start_ray(given)
    try:
        resources = ray.cluster_resources()
        if given.workers is None:
            most = resources.get("GPU", 0) / given.gpus_per_worker if given.device == "cuda" else resources["CPU"]
            given.workers = doubled(max(1, int(most)))
        if reason := refusal(given, resources):
            print(f"benchmarks/syncbn.py: {reason}", file=sys.stderr)
            return WRONG_USAGE
        with tempfile.TemporaryDirectory() as folder:
            answers = [one_fit(given, workers, given.storage or folder) for workers in given.workers]
    finally:
        ray.shutdown()
    top = {
        **top,
        "what": syncbn_report.title(answers),
        "measurement": not syncbn_report.is_fake(answers),
        "answers": answers,
    }
    notes, found = syncbn_report.notes(answers), syncbn_report.found(answers)
    harness.show(given, top, syncbn_report.rows(answers), notes, found=found, draw=syncbn_plot.draw)
    return 0


if __name__ == "__main__":
    sys.exit(main())
