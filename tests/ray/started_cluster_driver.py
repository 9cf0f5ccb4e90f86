"""The driver of test_started_cluster: three fits on a cluster that neither has the package nor sees this environment."""

from __future__ import annotations

import json
import os
import sys

import ray
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer


def train_func(config):
    import torch
    import torch.distributed as dist

    from ray_nccl_guard import current_report

    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    if dist.get_rank() == 0:
        with open(config["note"], "w") as file:
            json.dump({"backend": dist.get_backend(), "sum": tensor.item(), "guarded": current_report() is not None}, file)


def main() -> None:
    address, package, storage = sys.argv[1:4]
    # The package and the torch fault helpers travel to controller and workers by Ray; nothing is installed there.
    ray.init(address=address, runtime_env={"py_modules": [package]}, log_to_driver=True)
    for name, variables in (
        ("off", {"RAY_NCCL_GUARD": "off"}),
        ("by_name", {"RAY_NCCL_GUARD_POLICY": "fallback"}),
    ):
        os.environ.update(variables)
        from ray_nccl_guard import GuardedTorchConfig

        backend = "gloo" if name == "off" else "nccl"
        TorchTrainer(
            train_func,
            train_loop_config={"note": f"{storage}/{name}.json"},
            torch_config=GuardedTorchConfig(backend=backend),
            scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(name=name, storage_path=storage),
        ).fit()
        for variable in variables:
            del os.environ[variable]


if __name__ == "__main__":
    main()
