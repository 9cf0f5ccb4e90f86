"""A drill: a fit() whose probe acts out a fault of NCCL, so that you see what your policy does about it, before it is needed.

Needs no GPU. NCCL is not touched; the message, the report, the metrics and the backend that it trains on are real (docs/drills.md).

    python examples/drill.py
    python examples/drill.py --fault init:hang@rank1 --policy strict
"""

from __future__ import annotations

import argparse
import logging
import os
import tempfile

import ray
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from ray_nccl_guard import GuardedTorchConfig, ProbeSpec


def train_func() -> None:
    import ray.train
    import torch
    import torch.distributed as dist

    from ray_nccl_guard import current_report

    device = ray.train.torch.get_device()
    total = torch.ones(1, device=device)
    dist.all_reduce(total)
    drill = (current_report() or {}).get("drill")  # a job that must not go on after a drill can look here
    if dist.get_rank() == 0:
        # A worker's print() is shown twice by Ray Train V2; its log lines once.
        logging.info("trained on %s after the drill %s", dist.get_backend(), drill)
    ray.train.report({"backend": dist.get_backend(), "sum": total.item()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--fault", default="allreduce:cuda700@rank1")
    parser.add_argument("--policy", default="default", help="default, fallback, strict, observe, or a TOML file")
    parser.add_argument("--storage", default=None, help="where the run is kept (default: a new temporary folder)")
    args = parser.parse_args()

    # A running cluster has its own size; one made here gets room for the workers whatever this machine has.
    room = {} if os.environ.get("RAY_ADDRESS") else {"num_cpus": max(4, args.workers)}
    ray.init(**room)
    use_gpu = ray.cluster_resources().get("GPU", 0) >= args.workers
    trainer = TorchTrainer(
        train_func,
        torch_config=GuardedTorchConfig(
            backend="nccl",
            policy=args.policy,
            drill=args.fault,
            # A hang is acted out in full: short deadlines make the rehearsal short.
            probe=ProbeSpec(comm_init_s=5, collective_s=5),
        ),
        scaling_config=ScalingConfig(num_workers=args.workers, use_gpu=use_gpu),
        run_config=RunConfig(name="drill", storage_path=args.storage or tempfile.mkdtemp(prefix="nccl-guard-drill-")),
    )
    result = trainer.fit()
    print(f"the guard's report: {result.path}/nccl_guard/report.json")


if __name__ == "__main__":
    main()
