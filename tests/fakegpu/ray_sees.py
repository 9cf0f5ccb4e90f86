"""Prints as JSON what a local Ray cluster makes of the double: its resources, and what two one-GPU actors do with NCCL."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import ray


class Rank:
    def gpu(self) -> list[Any]:
        """The PCI bus of the one GPU that Ray gave this actor, and how many it sees."""
        import torch

        return [torch.cuda.get_device_properties(0).pci_bus_id, torch.cuda.device_count()]

    def all_reduce(self, rank: int, world: int, port: int) -> float | str:
        import torch
        import torch.distributed as dist

        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world))
        try:
            dist.init_process_group("nccl", device_id=torch.device("cuda", 0))
            x = torch.full((3,), float(rank + 1)).to("cuda")
            dist.all_reduce(x)
            torch.cuda.synchronize()
            return float(x.cpu().sum())
        except RuntimeError as error:
            return str(error)


def main(port: int) -> None:
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=100 << 20)
    actor = ray.remote(num_gpus=1, num_cpus=0)(Rank)
    resources = ray.cluster_resources()
    ill = {"env_vars": {"FAKE_FAULT": "init:preset=p2p"}}
    healthy = [actor.remote() for _ in range(2)]
    result = {
        "gpus": resources.get("GPU"),
        "types": [name for name in resources if name.startswith("accelerator_type:")],
        "seen": ray.get([a.gpu.remote() for a in healthy], timeout=120),
        "sums": ray.get([a.all_reduce.remote(i, 2, port) for i, a in enumerate(healthy)], timeout=120),
    }
    faulty = actor.options(runtime_env=ill).remote()
    result["faulty"] = ray.get(faulty.all_reduce.remote(0, 1, port + 1), timeout=120)
    ray.shutdown()
    print(json.dumps(result))


if __name__ == "__main__":
    main(int(sys.argv[1]))
