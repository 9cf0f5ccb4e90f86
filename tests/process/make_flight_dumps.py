"""Makes Flight Recorder dumps of real gloo jobs that go wrong on purpose: `python make_flight_dumps.py OUT [NAME...]`.

Each scenario runs on forked ranks with real torch. A rank dumps when its body has ended or raised, or when it has made no
new call for a while; all ranks stay until all have dumped, so that no dump shows the end of a test instead of the hang.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

QUIET_S = 2.5  # without a new call: longer than a loaded two-core machine keeps a rank from running (seen: below 1 s)
DEADLINE_S = 60.0  # of one scenario, start to end
CONCURRENT = 3


@dataclass(frozen=True)
class Scenario:
    """What is done to which ranks, and what a reader of the dumps has to find.

    Attributes:
        kind: the right answer, as `flight --json` spells it.
        culprits: the ranks that were made to misbehave.
        silent: ranks that leave no dump.
    """

    body: Callable[[int, int], None]
    kind: str
    culprits: tuple[int, ...]
    world_size: int = 4
    silent: tuple[int, ...] = ()


def _steps(count: int = 3) -> None:
    import torch
    import torch.distributed as dist

    for _ in range(count):
        dist.all_reduce(torch.ones(16))
        dist.broadcast(torch.ones(4), 0)


def healthy(rank: int, world_size: int) -> None:
    _steps()


def skips(rank: int, world_size: int) -> None:
    import torch
    import torch.distributed as dist

    _steps()
    if rank != 2:
        dist.all_reduce(torch.ones(16))


def skips_and_goes_on(rank: int, world_size: int) -> None:
    import torch
    import torch.distributed as dist

    _steps()
    if rank != 1:
        dist.barrier()
    dist.all_reduce(torch.ones(16))


def one_more(rank: int, world_size: int) -> None:
    import torch
    import torch.distributed as dist

    _steps()
    if rank == 1:
        dist.all_reduce(torch.ones(16))


def one_more_of_another_kind(rank: int, world_size: int) -> None:
    import torch
    import torch.distributed as dist

    _steps()
    if rank == 3:
        dist.barrier()
    dist.all_reduce(torch.ones(16))
    dist.all_reduce(torch.ones(8))


def other_operation(rank: int, world_size: int) -> None:
    import torch
    import torch.distributed as dist

    _steps()
    if rank == 1:
        dist.all_gather([torch.ones(16) for _ in range(world_size)], torch.ones(16))
    else:
        dist.all_reduce(torch.ones(16))


def other_size(rank: int, world_size: int) -> None:
    import torch
    import torch.distributed as dist

    _steps()
    # Broadcast from another root than the odd rank: gloo aborts the process in a reduction of unequal sizes.
    dist.broadcast(torch.ones(64 if rank == 2 else 16), 0)
    dist.barrier()


def other_dtype(rank: int, world_size: int) -> None:
    import torch
    import torch.distributed as dist

    _steps()
    dist.all_reduce(torch.ones(16, dtype=torch.int32 if rank == 3 else torch.float32))


def dies(rank: int, world_size: int) -> None:
    import torch
    import torch.distributed as dist

    _steps()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(16))


def sleeps_in_the_data_loader(rank: int, world_size: int) -> None:
    import torch
    import torch.distributed as dist

    _steps()
    if rank == 5:
        time.sleep(DEADLINE_S)
    dist.all_reduce(torch.ones(16))


def two_of_eight_sleep(rank: int, world_size: int) -> None:
    import torch
    import torch.distributed as dist

    _steps()
    if rank in (2, 7):
        time.sleep(DEADLINE_S)
    dist.all_reduce(torch.ones(16))


def _mesh(rank: int) -> tuple[object, object]:
    """Rows [0, 1], [2, 3] and columns [0, 2], [1, 3], as a 2 x 2 device mesh makes them."""
    import torch.distributed as dist

    rows = [dist.new_group(ranks, group_desc="tp") for ranks in ([0, 1], [2, 3])]
    columns = [dist.new_group(ranks, group_desc="dp") for ranks in ([0, 2], [1, 3])]
    return rows[rank // 2], columns[rank % 2]


def mesh_other_operation(rank: int, world_size: int) -> None:
    import torch
    import torch.distributed as dist

    row, column = _mesh(rank)
    for step in range(3):
        if rank == 3 and step == 2:
            dist.all_gather([torch.ones(8) for _ in range(2)], torch.ones(8), group=row)
        else:
            dist.all_reduce(torch.ones(8), group=row)
        dist.all_reduce(torch.ones(32), group=column)


def mesh_skips(rank: int, world_size: int) -> None:
    import torch
    import torch.distributed as dist

    row, column = _mesh(rank)
    for step in range(3):
        if rank == 0 and step == 2:
            time.sleep(DEADLINE_S)
        dist.all_reduce(torch.ones(8), group=row)
        dist.all_reduce(torch.ones(32), group=column)
    dist.barrier()


def ddp_unused_branch(rank: int, world_size: int) -> None:
    import torch
    from torch.nn.parallel import DistributedDataParallel

    class Branched(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.common, self.branch = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.common(x)
            return x if rank == 1 else self.branch(x)

    model = DistributedDataParallel(Branched())
    model(torch.ones(2, 8)).sum().backward()


def pair_skips(rank: int, world_size: int) -> None:
    import torch
    import torch.distributed as dist

    _steps()
    if rank != 1:
        dist.all_reduce(torch.ones(16))


SCENARIOS = {
    "healthy": Scenario(healthy, "none", ()),
    "skips": Scenario(skips, "missing_rank", (2,)),
    "skips_and_goes_on": Scenario(skips_and_goes_on, "op_mismatch", (1,)),
    "one_more": Scenario(one_more, "missing_rank", (1,)),
    "one_more_of_another_kind": Scenario(one_more_of_another_kind, "op_mismatch", (3,)),
    "other_operation": Scenario(other_operation, "op_mismatch", (1,)),
    "other_size": Scenario(other_size, "size_mismatch", (2,)),
    "other_dtype": Scenario(other_dtype, "dtype_mismatch", (3,)),
    "dies": Scenario(dies, "missing_rank", (1,), silent=(1,)),
    "sleeps_in_the_data_loader": Scenario(sleeps_in_the_data_loader, "missing_rank", (5,), world_size=8),
    "two_of_eight_sleep": Scenario(two_of_eight_sleep, "missing_rank", (2, 7), world_size=8),
    "mesh_other_operation": Scenario(mesh_other_operation, "op_mismatch", (3,)),
    "mesh_skips": Scenario(mesh_skips, "missing_rank", (0,)),
    "ddp_unused_branch": Scenario(ddp_unused_branch, "missing_rank", (1,), world_size=3),
    "pair_skips": Scenario(pair_skips, "missing_rank", (1,), world_size=2),
}


def _rank(scenario: Scenario, rank: int, folder: Path) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    ended = threading.Event()
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=scenario.world_size)
    threading.Thread(target=_dump_when_quiet, args=(scenario, rank, folder, ended), daemon=True).start()
    try:
        scenario.body(rank, scenario.world_size)
    except RuntimeError as error:  # a peer died: the body ends here, its records stay
        print(f"rank {rank}: {str(error)[:200]}", file=sys.stderr)
    ended.set()
    time.sleep(DEADLINE_S)


def _dump_when_quiet(scenario: Scenario, rank: int, folder: Path, ended: threading.Event) -> None:
    from torch._C._distributed_c10d import _dump_fr_trace

    size, since_s = -1, time.monotonic()
    while time.monotonic() - since_s < QUIET_S and not ended.wait(0.25):
        data = _dump_fr_trace()
        if len(data) != size:
            size, since_s = len(data), time.monotonic()
    partial = folder / f".fr_rank_{rank}"
    partial.write_bytes(_dump_fr_trace())
    partial.rename(folder / f"fr_rank_{rank}")
    give_up_s = time.monotonic() + DEADLINE_S
    dumping = [folder / f"fr_rank_{other}" for other in range(scenario.world_size) if other not in scenario.silent]
    while time.monotonic() < give_up_s and not all(path.exists() for path in dumping):
        time.sleep(0.05)
    os._exit(0)


def make(names: list[str], out: Path) -> None:
    """Run the scenarios, a few at a time, and write each rank's dump to `out/NAME/fr_rank_N`."""
    # Once, before the ranks are forked: an import inside a body may take longer than a rank is given to be quiet. The last
    # one is what the first dump of a process with records imports (1.3 CPU seconds, torch 2.15).
    import torch._inductor.codecache
    import torch.distributed
    import torch.nn.parallel  # noqa: F401

    for start in range(0, len(names), CONCURRENT):
        children: list[int] = []
        for name in names[start : start + CONCURRENT]:
            folder = out / name
            folder.mkdir(parents=True)
            for rank in range(SCENARIOS[name].world_size):
                pid = os.fork()
                if pid == 0:
                    try:
                        _rank(SCENARIOS[name], rank, folder)
                    finally:
                        os._exit(1)
                children.append(pid)
        _reap(children)
        for name in names[start : start + CONCURRENT]:
            (out / name / "store").unlink(missing_ok=True)


def _reap(children: list[int]) -> None:
    give_up_s = time.monotonic() + DEADLINE_S
    while children:
        children[:] = [pid for pid in children if os.waitpid(pid, os.WNOHANG)[0] == 0]
        if time.monotonic() > give_up_s:
            for pid in children:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            return
        time.sleep(0.05)


if __name__ == "__main__":
    make(sys.argv[2:] or list(SCENARIOS), Path(sys.argv[1]))
