"""A Ray Train script that knows nothing of the guard. README.md shows three ways to run it guarded, without an edit."""

from __future__ import annotations

import argparse
import tempfile

import ray
import torch
import torch.distributed as dist
from ray.train import Checkpoint, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model


def train_func(config: dict[str, int]) -> None:
    torch.manual_seed(0)
    model = prepare_model(torch.nn.Linear(8, 1))
    device = next(model.parameters()).device
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    inputs = torch.randn(64, 8, generator=torch.Generator().manual_seed(dist.get_rank())).to(device)
    for _ in range(config["steps"]):
        loss = torch.nn.functional.mse_loss(model(inputs), inputs.sum(dim=1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = None
        if dist.get_rank() == 0:
            torch.save(model.state_dict(), f"{folder}/model.pt")
            checkpoint = Checkpoint.from_directory(folder)
        ray.train.report({"loss": loss.item(), "backend": dist.get_backend()}, checkpoint=checkpoint)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--storage", default=tempfile.gettempdir())
    parser.add_argument("--name", default="unmodified")
    args = parser.parse_args()
    ray.init()
    use_gpu = ray.cluster_resources().get("GPU", 0) >= args.workers
    trainer = TorchTrainer(
        train_func,
        train_loop_config={"steps": args.steps},
        scaling_config=ScalingConfig(num_workers=args.workers, use_gpu=use_gpu),
        run_config=RunConfig(name=args.name, storage_path=args.storage),
    )
    result = trainer.fit()
    print(f"trained on {result.metrics['backend']}, loss {result.metrics['loss']:.4f}: {result.path}")


if __name__ == "__main__":
    main()
