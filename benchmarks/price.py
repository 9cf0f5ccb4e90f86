"""How close `estimate_step_cost` comes to real steps: DDP on gloo, CPU ranks on this machine.

    python benchmarks/price.py [--worlds 2 4] [--rounds 15] [--json]

For each world size the real probe measures all_reduce, as it does on a rung that is fallen back to. Then every model runs
the same step with and without the reduction (`no_sync`), in turn, in real processes; the difference of the medians is what
the communication costs the step. `alone` is the same buckets reduced one after another without a step around them.
SyncBatchNorm refuses CPU tensors, so it is not among the models. All ranks share this machine's cores: a cluster's ranks
do not, and there the network is the slower part.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import harness
from ray_nccl_guard.price import estimate_step_cost, gradient_buckets

DEADLINE_S = 240.0


def models() -> dict[str, Callable[[], tuple[Any, Any]]]:
    """Name -> a function that makes the model and one input; small inputs, so that communication is what a step is made of."""
    import torch
    from torch import nn

    def conv() -> tuple[Any, Any]:
        layers: list[Any] = []
        for width, following in ((3, 64), (64, 128), (128, 256), (256, 512)):
            layers += [nn.Conv2d(width, following, 3, padding=1, stride=2), nn.BatchNorm2d(following), nn.ReLU()]
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 1000)), torch.randn(2, 3, 32, 32)

    def transformer() -> tuple[Any, Any]:
        layer = nn.TransformerEncoderLayer(256, 8, 1024, batch_first=True, dropout=0.0)
        return nn.TransformerEncoder(layer, 6), torch.randn(1, 8, 256)

    def embedding() -> tuple[Any, Any]:
        return nn.Sequential(nn.Embedding(20_000, 256), nn.Flatten(), nn.Linear(2048, 64)), torch.randint(0, 20_000, (2, 8))

    def stack(width: int, depth: int) -> tuple[Any, Any]:
        return nn.Sequential(*(nn.Linear(width, width) for _ in range(depth))), torch.randn(1, width)

    return {
        "one small layer, 256 KiB": lambda: stack(256, 1),
        "60 narrow layers, 4 MiB": lambda: stack(128, 60),
        "convolutions + BatchNorm": conv,
        "transformer, 6 layers": transformer,
        "embedding of 20,000": embedding,
        "20 layers of 1024": lambda: stack(1024, 20),
        "2 layers of 4096": lambda: stack(4096, 2),
    }


def main() -> None:
    parser = harness.arguments(__doc__)
    parser.add_argument("--worlds", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--rank", nargs=3, metavar=("RANK", "WORLD", "FILE"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        train(int(args.rank[0]), int(args.rank[1]), args.rank[2], args.rounds)
        return
    top = harness.head("estimate_step_cost against real steps on gloo")
    rows = [row for world in args.worlds for row in compare(world, args.rounds)]
    errors = [row["error %"] for row in rows if row["error %"] is not None]
    beside = (
        f"{statistics.median(errors):.0f} % over {len(errors)} of {len(rows)} cases" if errors else "not told from the noise"
    )
    found = [
        f"Median error of `estimate_step_cost` beside what the reduction costs a real step: {beside}; beside the reduction "
        f"alone: {statistics.median(row['error % alone'] for row in rows):.0f} %."
    ]
    notes = ["An error is left out where the step's difference does not stand out from the spread."]
    harness.show(args, top, rows, notes, found=found)


def compare(world: int, rounds: int) -> list[dict[str, Any]]:
    report = {"all_reduce_s": probe(world), "world_size": world, "backend_chosen": "gloo"}
    rows = []
    for name, taken in run_world(world, rounds).items():
        model, _ = models()[name]()
        cost = estimate_step_cost(model, report)
        with_s, without_s = harness.summary(taken["with"]), harness.summary(taken["without"])
        step_s = with_s["median"] - without_s["median"]
        alone_s = harness.summary(taken["alone"])["median"]
        stands_out = step_s > max(with_s["spread"], without_s["spread"])
        rows.append({
            "case": f"{name}, {world} ranks", "MiB": round(sum(cost.buckets) / (1 << 20), 1), "buckets": len(cost.buckets),
            "estimate ms": cost.seconds * 1e3, "step ms": step_s * 1e3, "alone ms": alone_s * 1e3, "unit": "s a whole step",
            **with_s,
            "error %": round(100 * abs(cost.seconds - step_s) / step_s) if stands_out else None,
            "error % alone": round(100 * abs(cost.gradients_s - alone_s) / alone_s),
        })  # fmt: skip
    return rows


def probe(world: int) -> dict[str, float]:
    """What the guard's own probe measures on gloo, in a process of its own (ranks are forked from it)."""
    program = (
        "import json, statistics\n"
        "from tests.process.ranks import run_ranks\n"
        f"results = run_ranks({world}, price=True)\n"
        "sizes = results[0].all_reduce_s\n"
        "print(json.dumps({str(s): statistics.median(r.all_reduce_s[s] for r in results) for s in sizes}))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=harness.ROOT, capture_output=True, text=True, timeout=120, check=True
    )
    measured: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return measured


def run_world(world: int, rounds: int) -> dict[str, dict[str, list[float]]]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--rounds", str(rounds), "--rank"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(harness.ROOT)}
        ranks = [
            subprocess.Popen([*command, str(rank), str(world), f"{folder}/store"], stdout=subprocess.PIPE, text=True,
                             env=environment)
            for rank in range(world)
        ]  # fmt: skip
        try:
            answers = [json.loads(rank.communicate(timeout=DEADLINE_S)[0].splitlines()[-1]) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
    first: dict[str, dict[str, list[float]]] = answers[0]
    return first


def train(rank: int, world: int, store: str, rounds: int) -> None:
    """One rank: every model's step with and without reduction, and its buckets alone, in turn; prints seconds by case."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    answer = {}
    for name, make in models().items():
        torch.manual_seed(0)
        model, inputs = make()
        wrapped = DistributedDataParallel(model)
        tensors = [torch.zeros(size // 4) for size in gradient_buckets(list(model.parameters()))]

        def step(wrapped: Any = wrapped, inputs: Any = inputs) -> None:
            wrapped(inputs).sum().backward()

        def without(wrapped: Any = wrapped, step: Any = step) -> None:
            with wrapped.no_sync():
                step()

        def alone(tensors: Any = tensors) -> None:
            for tensor in tensors:
                dist.all_reduce(tensor)

        cases = {"with": step, "without": without, "alone": alone}
        answer[name] = harness.alternate({key: timed(run) for key, run in cases.items()}, rounds=rounds, warm_up=3)
        del model, wrapped, tensors
    dist.barrier()
    print(json.dumps(answer))
    dist.destroy_process_group()


def timed(run: Callable[[], None]) -> Callable[[], float]:
    def once() -> float:
        import torch.distributed as dist

        dist.barrier()
        start_s = time.monotonic()
        run()
        return time.monotonic() - start_s

    return once


if __name__ == "__main__":
    main()
