"""FSDP under the guard: parameters are gathered and gradients scattered, so just that is what a backend has to prove.

    python examples/fsdp.py --workers 4

Whether gloo can do it with GPU tensors depends on the version of torch. The probe finds out: it falls back to what works, or refuses.
"""

from __future__ import annotations

import argparse
import logging
import os
import tempfile

import ray
from ray.train import Checkpoint, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from ray_nccl_guard import GuardedTorchConfig


def train_func(config: dict[str, int]) -> None:
    import ray.train.torch
    import torch
    import torch.distributed as dist
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    device = ray.train.torch.get_device()
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1)).to(device)
    # The mesh of all ranks is the group that the guard has proved and formed.
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in model:
        if isinstance(layer, torch.nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    inputs = torch.randn(64, 16, generator=torch.Generator().manual_seed(dist.get_rank())).to(device)
    targets = inputs.mean(dim=1, keepdim=True)
    for _ in range(config["steps"]):
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if dist.get_rank() == 0:
        # A worker's print() is shown twice by Ray Train V2; its log lines once.
        logging.info("trained on %s, loss %.4f", dist.get_backend(), loss.item())
    # Every rank takes part in gathering the parameters; rank 0 has them.
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = None
        if dist.get_rank() == 0:
            torch.save(whole, f"{folder}/model.pt")
            checkpoint = Checkpoint.from_directory(folder)
        ray.train.report({"loss": loss.item(), "backend": dist.get_backend()}, checkpoint=checkpoint)


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
        torch_config=GuardedTorchConfig(collectives=["fsdp"]),
        scaling_config=ScalingConfig(num_workers=args.workers, use_gpu=use_gpu),
        run_config=RunConfig(name="fsdp", storage_path=args.storage or tempfile.mkdtemp(prefix="nccl-guard-fsdp-")),
    )
    result = trainer.fit()
    print(f"the guard's report: {result.path}/nccl_guard/report.json")


if __name__ == "__main__":
    main()
