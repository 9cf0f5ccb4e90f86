"""Tune + Train under the guard: each trial is a guarded fit() with a report of its own.

    python examples/tune_train.py

A trial that the guard refuses ends with NcclInitRefused, and Tune goes on with the next one.
"""

from __future__ import annotations

import argparse
import os
import tempfile

import ray
from ray import tune
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from ray.tune.integration.ray_train import TuneReportCallback

from ray_nccl_guard import GuardedTorchConfig


def train_func(config: dict[str, float]) -> None:
    import ray.train.torch
    import torch
    import torch.distributed as dist

    torch.manual_seed(0)
    device = ray.train.torch.get_device()
    model = ray.train.torch.prepare_model(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"])
    inputs = torch.randn(64, 8, generator=torch.Generator().manual_seed(dist.get_rank())).to(device)
    for _ in range(20):
        loss = torch.nn.functional.mse_loss(model(inputs), inputs.mean(dim=1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    ray.train.report({"loss": loss.item(), "backend": dist.get_backend()})


def trial(config: dict[str, object]) -> None:
    """One trial: runs in a process of its own, which is the driver of its fit()."""
    trainer = TorchTrainer(
        train_func,
        train_loop_config={"lr": config["lr"]},
        torch_config=GuardedTorchConfig(),
        scaling_config=ScalingConfig(num_workers=int(str(config["workers"])), use_gpu=bool(config["use_gpu"])),
        run_config=RunConfig(
            # A name of its own, or the trials would write their reports into one folder.
            name=f"trial-{tune.get_context().get_trial_id()}",
            storage_path=str(config["storage"]),
            callbacks=[TuneReportCallback()],
        ),
    )
    trainer.fit()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--storage", default=None, help="where the runs are kept (default: a new temporary folder)")
    args = parser.parse_args()

    # A running cluster has its own size; one made here gets room for the workers whatever this machine has.
    room = {} if os.environ.get("RAY_ADDRESS") else {"num_cpus": args.workers + 2}  # a trial takes one itself
    ray.init(**room)
    storage = args.storage or tempfile.mkdtemp(prefix="nccl-guard-tune-")
    use_gpu = ray.cluster_resources().get("GPU", 0) >= args.workers
    tuner = tune.Tuner(
        trial,
        param_space={
            "lr": tune.grid_search([0.01, 0.1]), "workers": args.workers, "use_gpu": use_gpu, "storage": storage
        },
        tune_config=tune.TuneConfig(metric="loss", mode="min", max_concurrent_trials=1),
        run_config=tune.RunConfig(name="tune", storage_path=storage),
    )  # fmt: skip
    results = tuner.fit()
    for result in results:
        print(f"lr {result.config['lr']}: loss {result.metrics['loss']:.4f} on {result.metrics['backend']}")
    print(f"each trial's report: {storage}/trial-*/nccl_guard/report.json")


if __name__ == "__main__":
    main()
