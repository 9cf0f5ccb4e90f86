"""The script of test_entry: it knows nothing of the guard, and calls fit() in every way that scripts do. One JSON line a case."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from dataclasses import dataclass

import ray
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer


@dataclass
class OwnConfig(TorchConfig):
    """A user's subclass that keeps Ray's backend."""

    flavour: str = "plain"


class OtherBackend(TorchConfig):
    """A config with a backend of its own, as TorchFT and XLA have."""

    @property
    def backend_cls(self):
        from ray.train.backend import Backend

        return Backend


def train_func(config):
    import sys

    import torch.distributed as dist

    report = None
    if "ray_nccl_guard.current" in sys.modules:
        report = sys.modules["ray_nccl_guard.current"].current_report()
    note = {"backend": dist.get_backend() if dist.is_initialized() else None, "report": report}
    if ray.train.get_context().get_world_rank() == 0:
        with open(config["note"], "w") as file:
            json.dump(note, file)


def leaves_the_others(config):
    """One rank raises while the others wait for it."""
    import torch
    import torch.distributed as dist

    if dist.get_rank() == 1:
        time.sleep(1)
        raise ValueError("a label out of range")
    dist.all_reduce(torch.ones(4))


def error_of(case, config, storage):
    try:
        fit(case, config, storage, workers=2, train=leaves_the_others)
    except Exception as error:
        return {"error": str(error)}


def fit(case, config, storage, workers=1, torch_config=True, train=train_func):
    note = f"{storage}/{case}.json"
    options = {"torch_config": config} if torch_config else {}
    TorchTrainer(
        train,
        train_loop_config={"note": note},
        scaling_config=ScalingConfig(num_workers=workers),
        run_config=RunConfig(name=case, storage_path=storage),
        **options,
    ).fit()
    with open(note) as file:
        return json.load(file)


def in_a_task(case, config, storage):
    return ray.get(ray.remote(num_cpus=0)(fit).remote(case, config, storage))


def in_tune(case, config, storage):
    from ray import tune

    def trial(space):
        fit(f"{case}{space['trial']}", TorchConfig(backend=space["backend"]), storage)

    space = {"trial": 0, "backend": "nccl"}
    tuner = tune.Tuner(
        tune.with_resources(trial, {"cpu": 0.5}),
        param_space=space,
        run_config=tune.RunConfig(name=f"tune-{case}", storage_path=storage),
    )
    (outcome,) = tuner.fit()
    if outcome.error:
        raise outcome.error
    with open(f"{storage}/{case}0.json") as file:
        return json.load(file)


CASES = {
    "none": lambda s: fit("none", None, s, torch_config=False),
    "explicit": lambda s: fit("explicit", TorchConfig(backend="nccl"), s, workers=2),
    "raises": lambda s: error_of("raises", TorchConfig(backend="gloo", timeout_s=60), s),
    "other": lambda s: fit("other", OtherBackend(), s),
    "local": lambda s: fit("local", TorchConfig(), s, workers=0),
    "task": lambda s: in_a_task("task", OwnConfig(backend="nccl"), s),
    "tune": lambda s: in_tune("tune", None, s),
}


def main() -> None:
    storage, *wanted = sys.argv[1:]
    for path in os.environ.get("ENTRY_REMOVE", "").split():  # what other nodes do not have either
        os.rename(path, f"{path}.away")
    ray.init(**({} if os.environ.get("RAY_ADDRESS") else {"num_cpus": 4, "include_dashboard": False}))
    for case in wanted or CASES:
        outcome = {"case": case, "note": None, "error": None}
        try:
            outcome["note"] = CASES[case](storage)
        except Exception as error:
            traceback.print_exc()
            outcome["error"] = f"{type(error).__name__}: {error}"[:500]
        print(f"CASE {json.dumps(outcome)}", flush=True)


if __name__ == "__main__":
    main()
