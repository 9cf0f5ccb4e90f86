"""What every worker of `syncbn.py` runs: the same network on each backend in turn, then single collectives of every size."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks import harness, syncbn_model, syncbn_sweep
from benchmarks.syncbn_names import ALONE, BN, SYNCBN, TORCHVISION, proved
from benchmarks.syncbn_sweep import WrongValues
from benchmarks.syncbn_timing import Step, StepTimer

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
COLLECTIVE_S = 240.0  # a collective that takes longer hangs
LIKE = {"fp32": 1e-3, "bf16": 5e-2}  # relative; how far the same first loss may differ by backend


def train_func(config: dict[str, Any]) -> None:
    """Measures what `config` asks for and hands it to the driver's collector, from rank 0."""
    import ray
    import ray.train.torch

    from ray_nccl_guard import current_report

    device = ray.train.torch.get_device()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    answer = measure(config, device, current_report())
    if dist.get_rank() == 0:
        ray.get(config["collector"].put.remote(answer))


def measure(config: dict[str, Any], device: torch.device, report: dict[str, Any] | None) -> dict[str, Any]:
    """Every case and size of `config` on the process group that stands. Rank 0's return value holds all ranks' steps."""
    until_s = time.monotonic() + config["minutes"] * 60
    control = dist.new_group(backend="gloo", timeout=timedelta(seconds=COLLECTIVE_S))
    chosen = (report or {}).get("backend_chosen") or dist.get_backend()
    groups = {
        name: dist.new_group(backend=name, timeout=timedelta(seconds=COLLECTIVE_S))
        for name in proved(config["backends"], chosen)
    }
    answer: dict[str, Any] = {
        "world": dist.get_world_size(), "hosts": _hosts(control), "device": _named(device), "fake": device.type == "cuda" and harness.fake_gpus(),
        "guard": _said(report), "asked": config["backends"], "backends": list(groups), "cases": [], "sweep": [], "not_run": [],
    }  # fmt: skip
    if config["sizes"] and (dist.get_world_size() > 1 or list(groups) != ["gloo"]):  # gloo alone: nobody to exchange with
        answer["sweep"] = syncbn_sweep.sweep(groups, control, device, config["sizes"])
    asked = itertools.product(config["models"], config["dtypes"], config["batches"])
    for model, dtype, batch in asked:
        name = f"{model}, batch {batch}, {dtype}"
        if not _go_on(control, until_s):
            answer["not_run"].append(f"{name}: the {config['minutes']:g} minutes were over")
        elif model == TORCHVISION and not syncbn_model.has_torchvision():
            answer["not_run"].append(f"{name}: torchvision is not installed")
        else:
            answer["cases"] += one_case(config, device, groups, control, model, dtype, batch)
    return answer


def one_case(
    config: dict[str, Any], device: torch.device, groups: dict[str, Any], control: Any, model: str, dtype: str, batch: int
) -> list[dict[str, Any]]:
    """All arms of one network, precision and batch in turn; per arm the steps (means over ranks) and the losses."""
    arms = {ALONE: Arm(config, device, model, dtype, batch, group=None, synchronised=False)}
    for backend, group in groups.items():
        arms[f"{backend}, {SYNCBN}"] = Arm(config, device, model, dtype, batch, group=group, synchronised=True)
        arms[f"{backend}, {BN}"] = Arm(config, device, model, dtype, batch, group=group, synchronised=False)

    def block(arm: Arm) -> Callable[[], list[Step]]:
        def run() -> list[Step]:
            dist.barrier(control)
            return [arm.step() for _ in range(config["steps"])]

        return run

    taken = harness.alternate({name: block(arm) for name, arm in arms.items()}, rounds=config["rounds"])
    cases = []
    for name, arm in arms.items():
        own = [asdict(step) for steps in taken[name] for step in steps]
        everybody: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everybody, (own, arm.losses), group=control)
        steps = [_mean(of_one_step) for of_one_step in zip(*(steps for steps, _ in everybody), strict=True)]
        losses = [sum(values) / len(values) for values in zip(*(losses for _, losses in everybody), strict=True)]
        cases.append(
            {"model": model, "dtype": dtype, "batch": batch, "arm": name, "steps": steps, "losses": losses,
             "parameters": sum(p.numel() for p in arm.model.parameters())}
        )  # fmt: skip
    for kind in (SYNCBN, BN):
        _must_agree([case for case in cases if case["arm"].endswith(f", {kind}")], LIKE[dtype])
    return cases


class Arm:
    """One network with its optimizer, its fixed images and its timer. `group` None: this rank alone, nothing exchanged."""

    def __init__(
        self, config: dict[str, Any], device: torch.device, model: str, dtype: str, batch: int, *, group: Any,
        synchronised: bool,
    ) -> None:  # fmt: skip
        torch.manual_seed(0)
        net = syncbn_model.build(model)
        if synchronised:
            net = syncbn_model.synchronised(net, group, device=device.type)
        elif device.type == "cpu":
            net = syncbn_model.written_out(net, None)  # the same arithmetic, so that the exchange is all that differs
        net = net.to(device)
        self.timer = StepTimer(device, group)
        if group is None:
            self.model: nn.Module = net
        else:
            devices = [device] if device.type == "cuda" else None
            ddp = DistributedDataParallel(net, device_ids=devices, process_group=group)
            ddp.register_comm_hook(None, self.timer.hook)
            self.model = ddp
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self.images, self.labels = (part.to(device) for part in images(batch, config["image"], dist.get_rank()))
        self.losses: list[float] = []
        self._autocast = torch.autocast(device.type, DTYPES[dtype], enabled=dtype != "fp32")

    def step(self) -> Step:
        """One training step, timed."""
        with self.timer.watching():
            self.timer.begin()
            self.optimizer.zero_grad()
            with self._autocast:
                loss = nn.functional.cross_entropy(self.model(self.images).float(), self.labels)
            loss.backward()
            self.timer.backward_ended()
            self.optimizer.step()
            step = self.timer.end()
        self.losses.append(loss.item())
        return step


def images(batch: int, side: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's synthetic images and labels."""
    generator = torch.Generator().manual_seed(rank)
    pictures = torch.randn(batch, 3, side, side, generator=generator)
    return pictures, torch.randint(0, syncbn_model.CLASSES, (batch,), generator=generator)


def _must_agree(cases: list[dict[str, Any]], within: float) -> None:
    first = [case["losses"][0] for case in cases]
    if first and max(first) - min(first) > within * abs(first[0]):
        said = ", ".join(f"{case['arm']}: {loss:.5f}" for case, loss in zip(cases, first, strict=True))
        raise WrongValues(f"the first loss of the same step differs by backend ({cases[0]['model']}): {said}")


def _mean(of_one_step: tuple[dict[str, float], ...]) -> dict[str, float]:
    return {key: sum(step[key] for step in of_one_step) / len(of_one_step) for key in of_one_step[0]}


def _go_on(control: Any, until_s: float) -> bool:
    """Whether there is time for another case, as rank 0 sees it."""
    answer = torch.tensor([float(time.monotonic() < until_s)])
    dist.broadcast(answer, src=0, group=control)
    return bool(answer.item())


def _hosts(control: Any) -> int:
    import socket

    names: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(names, socket.gethostname(), group=control)
    return len(set(names))


def _named(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def _said(report: dict[str, Any] | None) -> dict[str, Any] | None:
    """What the guard decided, for the notes."""
    if report is None:
        return None
    return {
        "action": report["action"], "backend": report["backend_chosen"], "relief": report["relief"],
        "failure": report["verdict"]["failure"],
    }  # fmt: skip
