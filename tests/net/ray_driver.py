"""The driver of a guarded fit() on the lab's Ray cluster: reads one JSON case a line, writes one JSON line with its report."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import ray
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from ray_nccl_guard import GuardedTorchConfig, ProbeSpec

TIMEOUT_S = 3.0
# The network's deadlines are what is tested; those of the children only have to be far above what four of them need on
# shared cores, and small messages are enough for that.
SPEC = ProbeSpec(
    store_s=TIMEOUT_S, peers_s=TIMEOUT_S, comm_init_s=20, comm_init_per_rank_s=0, collective_s=20, sizes_bytes=(4, 1 << 20)
)


def train(config: dict[str, Any]) -> None:
    import torch.distributed as dist

    with open(f"{config['notes']}/{dist.get_rank()}", "w") as file:
        file.write(dist.get_backend())


def fit(case: dict[str, Any], number: int) -> dict[str, Any]:
    folder = Path(sys.argv[3]) / f"case{number}"
    folder.mkdir()
    started_s, error = time.monotonic(), ""
    try:
        TorchTrainer(
            train,
            train_loop_config={"notes": str(folder)},
            torch_config=GuardedTorchConfig(backend=case["backend"], probe=SPEC),
            scaling_config=ScalingConfig(num_workers=case["workers"], use_gpu=True),
            run_config=RunConfig(name=f"case{number}", storage_path=str(folder / "storage")),
        ).fit()
    except Exception as raised:  # the test looks at it
        error = f"{type(raised).__name__}: {raised}"
    seconds = time.monotonic() - started_s
    path = folder / "storage" / f"case{number}" / "nccl_guard" / "report.json"
    return {
        "name": case["name"],
        "error": error[:3000],
        "seconds": seconds,
        "report": json.loads(path.read_text()) if path.exists() else None,
        "trained_on": sorted(note.read_text() for note in folder.iterdir() if note.is_file()),
    }


if __name__ == "__main__":
    ray.init(address=sys.argv[1], log_to_driver=False)
    end_s = time.monotonic() + 120
    while sum(node["Alive"] for node in ray.nodes()) < int(sys.argv[2]):
        assert time.monotonic() < end_s, "the other nodes did not join"
        time.sleep(0.2)
    print("ready", flush=True)
    for number, line in enumerate(iter(sys.stdin.readline, "")):
        print(json.dumps(fit(json.loads(line), number)), flush=True)
