"""DDP with SyncBatchNorm under the guard: the job says which collectives it needs, and a backend must have proved them all.

    python examples/ddp_syncbn.py --workers 4

SyncBatchNorm is for GPUs alone (torch refuses CPU tensors); without GPUs the batch statistics of this example stay local.
"""

from __future__ import annotations

import argparse
import logging
import os
import tempfile

import ray
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from ray_nccl_guard import GuardedTorchConfig


def train_func(config: dict[str, int]) -> None:
    import ray.train.torch
    import torch
    import torch.distributed as dist

    from ray_nccl_guard import current_report, estimate_step_cost

    torch.manual_seed(0)
    device = ray.train.torch.get_device()
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.BatchNorm2d(8), torch.nn.ReLU(),
        torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(8, 1),
    )  # fmt: skip
    if device.type == "cuda":
        model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)
    model = ray.train.torch.prepare_model(model)
    if (report := current_report()) and report["action"] == "fall_back" and dist.get_rank() == 0:
        logging.warning("not on NCCL as asked: %s", estimate_step_cost(model, report))

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    images = torch.randn(16, 3, 8, 8, generator=torch.Generator().manual_seed(dist.get_rank())).to(device)
    targets = images.mean(dim=(1, 2, 3)).unsqueeze(1)
    for _ in range(config["steps"]):
        loss = torch.nn.functional.mse_loss(model(images), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if dist.get_rank() == 0:
        # A worker's print() is shown twice by Ray Train V2; its log lines once.
        logging.info("trained on %s, loss %.4f", dist.get_backend(), loss.item())
    ray.train.report({"loss": loss.item(), "backend": dist.get_backend()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--storage", default=None, help="where the run is kept (default: a new temporary folder)")
    args = parser.parse_args()

    # A running cluster has its own size; one made here gets room for the workers whatever this machine has.
    room = {} if os.environ.get("RAY_ADDRESS") else {"num_cpus": max(4, args.workers)}
    ray.init(**room)
    use_gpu = ray.cluster_resources().get("GPU", 0) >= args.workers
    trainer = TorchTrainer(
        train_func,
        train_loop_config={"steps": args.steps},
        torch_config=GuardedTorchConfig(collectives=["ddp", "syncbn"]),
        scaling_config=ScalingConfig(num_workers=args.workers, use_gpu=use_gpu),
        run_config=RunConfig(name="ddp_syncbn", storage_path=args.storage or tempfile.mkdtemp(prefix="nccl-guard-ddp-")),
    )
    result = trainer.fit()
    print(f"the guard's report: {result.path}/nccl_guard/report.json")


if __name__ == "__main__":
    main()
