"""`ray-nccl-guard` with a fault in torch: `python -m tests.process.faulty_probe FAULT probe --ranks 4 ...`.

The fault is made in the command's own process before it forks its ranks, so that every child has it; nothing of the guard is
replaced. FAULT is one of `hang@R`, `raise@R` (rank R of this host, in any world of two and more) and `raise-from@N` (every
rank of a world of N and more).
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import torch.distributed as dist

from ray_nccl_guard.cli import main


def install(fault: str) -> None:
    how, _, number = fault.partition("@")
    original = dist.all_reduce

    def faulty(*args: Any, **kwargs: Any) -> Any:
        world = dist.get_world_size()
        mine = os.environ.get("LOCAL_RANK") == number and world > 1
        if how == "hang" and mine:
            time.sleep(3600)
        if (how == "raise" and mine) or (how == "raise-from" and world >= int(number)):
            raise RuntimeError("a fault that the test made")
        return original(*args, **kwargs)

    dist.all_reduce = faulty


if __name__ == "__main__":
    install(sys.argv[1])
    sys.exit(main(sys.argv[2:]))
