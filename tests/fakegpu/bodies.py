"""What the ranks of the double's own tests run."""

from __future__ import annotations

import datetime
import os
import time
from typing import Any

import torch
import torch.distributed as dist


def join(rank: int, backend: str = "nccl", timeout_s: float = 20.0) -> torch.device:
    """The process group, formed eagerly on GPU `rank` (LOCAL_RANK where that differs)."""
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", rank)))
    torch.cuda.set_device(device)
    dist.init_process_group(backend, device_id=device, timeout=datetime.timedelta(seconds=timeout_s))
    return device


def init_only(rank: int, world: int, **kwargs: Any) -> str:
    join(rank, **kwargs)
    dist.destroy_process_group()
    return "formed"


def all_reduce(rank: int, world: int, elements: int = 4, rounds: int = 1, **kwargs: Any) -> list[float]:
    """The first and last element of the sum of (rank + 1) over all ranks."""
    device = join(rank, **kwargs)
    x = torch.zeros(0)
    for _ in range(rounds):
        x = torch.full((elements,), float(rank + 1)).to(device)
        dist.all_reduce(x)
        torch.cuda.synchronize()
        x = x.cpu()
    dist.destroy_process_group()
    return [x[0].item(), x[-1].item()]


def inputs(world: int, size: int, dtype: str, seed: int) -> list[torch.Tensor]:
    """What each rank contributes: small integers, exact in every type."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 5, (size,), generator=generator).to(getattr(torch, dtype)) for _ in range(world)]


def every_collective(rank: int, world: int, dtype: str, size: int, backend: str = "nccl") -> list[str]:
    """The names of the collectives whose result differs from the one computed on the CPU."""
    device = join(rank, backend=backend)
    mine = inputs(world, size, dtype, seed=size)
    exact = torch.stack([x.double() for x in mine])
    wrong: list[str] = []

    def check(name: str, got: torch.Tensor, expected: torch.Tensor) -> None:
        if not torch.equal(got.cpu().double(), expected.to(got.dtype).double()):
            wrong.append(name)

    x = mine[rank].to(device)
    dist.all_reduce(x)
    check("all_reduce sum", x, exact.sum(0))
    for name, op in {"max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN, "product": dist.ReduceOp.PRODUCT}.items():
        x = mine[rank].to(device)
        dist.all_reduce(x, op=op)
        check(f"all_reduce {name}", x, {"max": exact.amax(0), "min": exact.amin(0), "product": exact.prod(0)}[name])
    if x.is_floating_point():
        x = mine[rank].to(device)
        dist.all_reduce(x, op=dist.ReduceOp.AVG)
        check("all_reduce average", x, exact.mean(0))
    for root in range(world):
        x = mine[rank].to(device)
        dist.broadcast(x, root)
        check(f"broadcast from {root}", x, exact[root])
        x = mine[rank].to(device)
        dist.reduce(x, root)
        if rank == root:
            check(f"reduce to {root}", x, exact.sum(0))
    gathered = [torch.empty(size, dtype=x.dtype).to(device) for _ in range(world)]
    dist.all_gather(gathered, mine[rank].to(device))
    check("all_gather", torch.cat([g.cpu() for g in gathered]), exact.reshape(-1))
    whole, part = torch.cat(mine).to(device), torch.empty(size, dtype=x.dtype).to(device)
    dist.reduce_scatter_tensor(part, whole)
    check("reduce_scatter", part, exact[rank] * world)
    swapped = torch.empty(size * world, dtype=x.dtype).to(device)
    dist.all_to_all_single(swapped, torch.cat([mine[rank]] * world).to(device))
    check("all_to_all", swapped, exact.reshape(-1))
    received = torch.empty(size, dtype=x.dtype).to(device)
    pair = [
        dist.P2POp(dist.isend, mine[rank].to(device), (rank + 1) % world),
        dist.P2POp(dist.irecv, received, (rank - 1) % world),
    ]
    for work in dist.batch_isend_irecv(pair):
        work.wait()
    check("send and receive around the ring", received, exact[(rank - 1) % world])
    halves = [dist.new_group(list(range(start, world, 2))) for start in range(2)]
    x = mine[rank].to(device)
    dist.all_reduce(x, group=halves[rank % 2])
    check("all_reduce in half of the world", x, exact[rank % 2 :: 2].sum(0))
    dist.barrier()
    dist.destroy_process_group()
    return wrong


def every_point(rank: int, world: int, backend: str = "nccl") -> list[str]:
    """What `every_collective` calls and what it leaves out, down to an abort: torch's way to each point of the fault language."""
    wrong = every_collective(rank, world, "float32", 100, backend)
    os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)
    device = join(rank, backend)
    x = torch.ones(8, pin_memory=True).to(device, non_blocking=True)
    parts = [torch.ones(8).to(device) for _ in range(world)]
    dist.all_gather_into_tensor(torch.cat(parts), x)
    dist.gather(x, parts if rank == 0 else None, dst=0)
    dist.scatter(x, parts if rank == 0 else None, src=0)
    torch.cuda.current_stream().query()
    event = torch.cuda.Event()
    event.record()
    event.synchronize()
    torch.zeros(1 << 20, device=device).add_(1)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.mem_get_info()
    torch.distributed.distributed_c10d._abort_process_group()
    return wrong


def sticky(rank: int, world: int, **kwargs: Any) -> list[str]:
    """The texts of the errors after a faulted all_reduce, of calls that have nothing to do with it."""
    device = join(rank, **kwargs)
    x = torch.ones(4).to(device)
    try:
        dist.all_reduce(x)
    except RuntimeError:  # it may meet the error before it returns
        pass
    texts = []
    for call in (torch.cuda.synchronize, lambda: torch.empty(1 << 22, device=device), torch.cuda.mem_get_info):
        try:
            call()
            texts.append("no error")
        except RuntimeError as error:
            texts.append(str(error).splitlines()[0])
    os.write(1, "".join(f"\ncall: {text}\n" for text in texts).encode())
    os._exit(7)  # tearing the group down in a lost context may abort


def devices(rank: int, world: int) -> dict[str, Any]:
    count = torch.cuda.device_count()
    properties = [torch.cuda.get_device_properties(i) for i in range(count)]
    return {
        "count": count,
        "pci": [p.pci_bus_id for p in properties],
        "uuid": [str(p.uuid) for p in properties],
        "capability": [[p.major, p.minor] for p in properties],
        "names": [p.name for p in properties],
        "bytes": [p.total_memory for p in properties],
    }


def mapped_shared_memory(rank: int, world: int) -> list[str]:
    """The files of the communicator's shared memory that this process maps while it lives."""
    join(rank)
    with open("/proc/self/maps") as maps:
        found = sorted({line.split(maxsplit=5)[5].strip() for line in maps if "/nccl-" in line})
    dist.destroy_process_group()
    return found


def mapped_nvidia_files(rank: int, world: int) -> list[str]:
    """Files of real NVIDIA wheels that this process maps."""
    init_only(rank, world)
    with open("/proc/self/maps") as maps:
        return sorted({line.split()[-1] for line in maps if "/nvidia/" in line})


def allocate(rank: int, world: int, mib: int, device: int = 0) -> list[int]:
    """Free bytes before and after an allocation."""
    torch.cuda.set_device(device)
    before = torch.cuda.mem_get_info()[0]
    keep = torch.empty(mib << 20, dtype=torch.uint8, device=f"cuda:{device}")
    return [before, torch.cuda.mem_get_info()[0], keep.numel()]


def hold_memory(rank: int, world: int, mib: int) -> None:
    allocate(rank, world, mib)
    time.sleep(600)  # until the test kills it


def in_a_fork_after_cuda(rank: int, world: int) -> str:
    """The error that a child forked after the parent's first CUDA call gets."""
    torch.cuda.is_available()
    reader, writer = os.pipe()
    if os.fork() == 0:
        try:
            os.write(writer, str(torch.cuda.device_count()).encode())
            torch.empty(1, device="cuda")
        except RuntimeError as error:
            os.write(writer, b"|" + str(error).splitlines()[0].encode())
        os._exit(0)
    os.close(writer)
    os.wait()
    return os.read(reader, 4096).decode()


def python_goes_on(rank: int, world: int) -> int:
    """How often another Python thread could count while this one sat in init_process_group."""
    import threading

    ticks = 0

    def count() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            time.sleep(0.01)
            if ticks % 10 == 0:
                os.write(1, b"tick\n")
            if ticks == 100:
                os._exit(3)

    threading.Thread(target=count, daemon=True).start()
    join(rank)
    return ticks


def train(rank: int, world: int, steps: int = 3) -> dict[str, Any]:
    """Losses of DDP with SyncBatchNorm on this world, and of one CPU process on the whole batch."""
    device = join(rank)
    torch.manual_seed(0)
    nn = torch.nn
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5))
    alone = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5))
    alone.load_state_dict(net.state_dict())
    model = nn.parallel.DistributedDataParallel(
        nn.SyncBatchNorm.convert_sync_batchnorm(net).to(device), device_ids=[device.index]
    )
    x, y = torch.randn(4 * world, 3, 8, 8), torch.randint(0, 5, (4 * world,))
    part = slice(4 * rank, 4 * rank + 4)
    losses: dict[str, list[float]] = {"ddp": [], "alone": []}
    step_of = {name: torch.optim.SGD(m.parameters(), lr=0.1) for name, m in (("ddp", model), ("alone", alone))}
    for _ in range(steps):
        for name, module, a, b in (("ddp", model, x[part].to(device), y[part].to(device)), ("alone", alone, x, y)):
            step_of[name].zero_grad()
            loss = nn.functional.cross_entropy(module(a), b)
            loss.backward()
            step_of[name].step()
            mean = loss.detach().clone()
            if name == "ddp":
                dist.all_reduce(mean, op=dist.ReduceOp.AVG)
            losses[name].append(mean.item())
    dist.destroy_process_group()
    return losses
