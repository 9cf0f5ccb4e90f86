"""PyTorch Lightning inside train_func under the guard. Needs `pip install lightning`.

    python examples/lightning_trainer.py --workers 4

Ray's strategy joins the process group that is there, so Lightning trains on the backend that the guard has chosen. Leave
`process_group_backend` of the strategy alone: it would be of no effect.
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
    import lightning.pytorch as pl
    import ray.train
    import torch
    import torch.distributed as dist
    from ray.train.lightning import RayDDPStrategy, RayLightningEnvironment, prepare_trainer

    class Mean(pl.LightningModule):
        """Learns the mean of its inputs."""

        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(8, 1)

        def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
            (inputs,) = batch
            return torch.nn.functional.mse_loss(self.layer(inputs), inputs.mean(dim=1, keepdim=True))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    inputs = torch.randn(256, 8, generator=torch.Generator().manual_seed(0))
    trainer = pl.Trainer(
        max_epochs=config["epochs"],
        accelerator="auto",
        devices="auto",
        strategy=RayDDPStrategy(),
        plugins=[RayLightningEnvironment()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Mean()
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs), batch_size=32)
    prepare_trainer(trainer).fit(model, loader)
    with torch.no_grad():
        loss = torch.nn.functional.mse_loss(model.cpu().layer(inputs), inputs.mean(dim=1, keepdim=True))
    if dist.get_rank() == 0:
        # A worker's print() is shown twice by Ray Train V2; its log lines once.
        logging.info("trained on %s, loss %.4f", dist.get_backend(), loss.item())
    ray.train.report({"loss": loss.item(), "backend": dist.get_backend()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--storage", default=None, help="where the run is kept (default: a new temporary folder)")
    args = parser.parse_args()

    # A running cluster has its own size; one made here gets room for the workers whatever this machine has.
    room = {} if os.environ.get("RAY_ADDRESS") else {"num_cpus": max(4, args.workers)}
    ray.init(**room)
    use_gpu = ray.cluster_resources().get("GPU", 0) >= args.workers
    trainer = TorchTrainer(
        train_func,
        train_loop_config={"epochs": args.epochs},
        torch_config=GuardedTorchConfig(collectives=["ddp"]),
        scaling_config=ScalingConfig(num_workers=args.workers, use_gpu=use_gpu),
        run_config=RunConfig(name="lightning", storage_path=args.storage or tempfile.mkdtemp(prefix="nccl-guard-pl-")),
    )
    result = trainer.fit()
    print(f"the guard's report: {result.path}/nccl_guard/report.json")


if __name__ == "__main__":
    main()
