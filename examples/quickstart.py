"""A guarded fit() on whatever machine this is: four workers train a small model, and the guard shows what it found.

With GPUs it proceeds on NCCL. Without, NCCL's real refusal is named, the policy allows gloo, gloo is proved on every worker,
and the model trains. Run it with `make quickstart`, or: python examples/quickstart.py
"""

from __future__ import annotations

import argparse
import logging
import os
import tempfile

import ray
from ray.train import Checkpoint, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from ray_nccl_guard import GuardedTorchConfig, Policy


def train_func(config: dict[str, int]) -> None:
    import ray.train
    import ray.train.torch
    import torch
    import torch.distributed as dist

    from ray_nccl_guard import current_report

    torch.manual_seed(0)
    model = ray.train.torch.prepare_model(
        torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    )
    device = ray.train.torch.get_device()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    inputs = torch.randn(256, 8, generator=torch.Generator().manual_seed(dist.get_rank())).to(device)
    targets = inputs.sum(dim=1, keepdim=True)
    for step in range(config["steps"]):
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0 and step % 20 == 0:
            # A worker's print() is shown twice by Ray Train V2; its log lines once.
            logging.info("step %3d  loss %.4f  on %s", step, loss.item(), dist.get_backend())
    report = current_report() or {}
    metrics = {"loss": round(loss.item(), 4), "backend": dist.get_backend(), "proved": report.get("collectives_proved")}
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = None
        if dist.get_rank() == 0:
            torch.save(model.state_dict(), f"{folder}/model.pt")
            checkpoint = Checkpoint.from_directory(folder)
        ray.train.report(metrics, checkpoint=checkpoint)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--storage", default=None, help="where the run is kept (default: a new temporary folder)")
    args = parser.parse_args()

    ray.init(**({} if _cluster() else {"num_cpus": max(4, args.workers)}))
    # A placement that can never happen is outside what the guard sees: Ray warns "worker group startup timed out ...
    # waiting for N workers" every minute and retries for ever. So GPUs are asked for only if the cluster has them.
    use_gpu = ray.cluster_resources().get("GPU", 0) >= args.workers
    print(f"{args.workers} workers, GPUs: {'yes' if use_gpu else 'no, so NCCL will refuse and gloo has to prove itself'}")
    storage = args.storage or tempfile.mkdtemp(prefix="nccl-guard-quickstart-")
    trainer = TorchTrainer(
        train_func,
        train_loop_config={"steps": args.steps},
        torch_config=GuardedTorchConfig(backend="nccl", policy=Policy.fallback()),
        scaling_config=ScalingConfig(num_workers=args.workers, use_gpu=use_gpu),
        run_config=RunConfig(name="quickstart", storage_path=storage),
    )
    result = trainer.fit()
    print(f"trained: {result.metrics}")
    print(f"the guard's report: {result.path}/nccl_guard/report.json, and report.html beside it to look at")


def _cluster() -> bool:
    """Whether a running cluster is there to connect to; its size is its own."""
    return bool(os.environ.get("RAY_ADDRESS"))


if __name__ == "__main__":
    main()
