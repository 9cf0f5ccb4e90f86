"""The script of test_old_ray: it knows nothing of the guard, and prints what it trained on."""

from __future__ import annotations

import json
import os
import sys

import ray
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer


def train_func(config):
    import torch
    import torch.distributed as dist

    from ray_nccl_guard import current_report

    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    report = current_report()
    if dist.get_rank() == 0:
        with open(config["note"], "w") as file:
            json.dump({"backend": dist.get_backend(), "sum": tensor.item(), "action": report and report["action"]}, file)


def main() -> None:
    storage = sys.argv[1]
    ray.init(num_cpus=4, include_dashboard=False)
    result = TorchTrainer(
        train_func,
        train_loop_config={"note": f"{storage}/note.json"},
        torch_config=TorchConfig(backend="nccl"),
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(name="old", storage_path=storage),
    ).fit()
    with open(f"{storage}/note.json") as file:
        note = json.load(file)
    written = os.path.exists(f"{result.path}/nccl_guard/report.json")
    print("NOTE " + json.dumps({**note, "ray": ray.__version__, "written": written}))


if __name__ == "__main__":
    main()
