"""The driver of test_v1: fits on Ray Train V1, under `ray-nccl-guard run`, one JSON line per fit on stdout."""

from __future__ import annotations

import glob
import json
import os
import sys
import time

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer


def bring_faults() -> None:
    """In every worker process: `init_process_group` and the facts may die, when a test asks for it by a file."""
    import socket

    from ray_nccl_guard.cli.after_import import after_import

    faults = os.environ["V1_FAULTS"]
    hostname = socket.gethostname

    def gethostname() -> str:
        asked_by = sys._getframe(1).f_code.co_filename
        if os.path.exists(f"{faults}/facts") and asked_by.endswith("ray_nccl_guard/facts.py"):
            os.abort()
        return hostname()

    socket.gethostname = gethostname
    after_import("torch.distributed", lambda: _break_init(faults))


def _break_init(faults: str) -> None:
    import torch.distributed as dist

    original = dist.init_process_group

    def init_process_group(*args, **kwargs):
        if os.path.exists(f"{faults}/init") and os.environ.get("RANK") == "1":
            os.abort()
        return original(*args, **kwargs)

    dist.init_process_group = init_process_group


def train_func(config):
    import torch
    import torch.distributed as dist

    from ray_nccl_guard import current_report

    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    if config["hangs"]:
        if dist.get_rank() == 1:
            with open(config["note"], "w") as file:
                json.dump({"dumps": os.environ["TORCH_FR_DUMP_TEMP_FILE"]}, file)
            time.sleep(300)  # the culprit's line
        dist.all_reduce(tensor)
    later = ""
    if config["later"]:
        try:
            dist.new_group(backend="nccl")
        except Exception as error:  # this torch has no GPU to make it on
            later = type(error).__name__
    if dist.get_rank() == 0:
        report = current_report()
        with open(config["note"], "w") as file:
            note = {
                "backend": dist.get_backend(),
                "sum": tensor.item(),
                "action": report and report["action"],
                "later": later,
            }
            json.dump(note, file)


def fit(case, config, storage, *, later=False, fault="", hangs=False):
    note = f"{storage}/{case}.json"
    if fault:
        open(f"{os.environ['V1_FAULTS']}/{fault}", "w").close()
    started_s = time.monotonic()
    outcome = {"case": case, "error": None, "cause": None, "note": None, "report": None}
    try:
        result = TorchTrainer(
            train_func,
            train_loop_config={"note": note, "later": later, "hangs": hangs},
            torch_config=config,
            scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(name=case, storage_path=storage, failure_config=FailureConfig()),
        ).fit()
        with open(note) as file:
            outcome["note"] = json.load(file)
        with open(f"{result.path}/nccl_guard/report.json") as file:
            outcome["report"] = json.load(file)
    except Exception as error:
        cause = getattr(error.__cause__, "cause", None) or error.__cause__
        outcome |= {"error": type(error).__name__, "cause": type(cause).__name__, "text": str(cause)}
        outcome["report"] = getattr(cause, "report", None)
        if hangs:
            with open(note) as file:
                outcome["note"] = json.load(file)
            (report,) = glob.glob(f"{storage}/{case}/*/nccl_guard/report.json")
            with open(report) as file:
                outcome["report"] = json.load(file)
    if fault:
        os.remove(f"{os.environ['V1_FAULTS']}/{fault}")
    outcome["seconds"] = time.monotonic() - started_s
    end_s = time.monotonic() + 20
    while ray.available_resources().get("CPU") != ray.cluster_resources()["CPU"] and time.monotonic() < end_s:
        time.sleep(0.1)
    outcome["cpus"] = ray.available_resources().get("CPU")
    print(f"CASE {json.dumps(outcome)}", flush=True)


def main() -> None:
    storage = sys.argv[1]
    from ray_nccl_guard import GuardedTorchConfig, Policy

    ray.init(num_cpus=4, include_dashboard=False, runtime_env={"worker_process_setup_hook": bring_faults})
    cases = {
        "healthy": lambda: (None, {}),
        "fallback": lambda: (TorchConfig(backend="nccl"), {"later": True}),
        "refused": lambda: (GuardedTorchConfig(backend="nccl", policy=Policy()), {}),
        "dies_in_facts": lambda: (GuardedTorchConfig(backend="gloo"), {"fault": "facts"}),
        "hangs": lambda: (GuardedTorchConfig(backend="gloo", timeout_s=10), {"hangs": True}),
        "dies_in_group": lambda: (GuardedTorchConfig(backend="gloo"), {"fault": "init"}),
    }
    for case, make in cases.items():
        if case in sys.argv[2:] or not sys.argv[2:]:
            config, options = make()
            fit(case, config, storage, **options)
    ray.shutdown()


if __name__ == "__main__":
    main()
