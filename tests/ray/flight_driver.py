"""The driver of test_flight_callbacks: hangs that Ray's NCCL RAS callback confirms, and one that Ctrl-C ends. One JSON line a fit."""

from __future__ import annotations

import json
import os
import sys

import ray
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from ray_nccl_guard import GuardedTorchConfig, ProbeSpec
from tests.ray import flight_loops

LONG_S = 600  # nothing but what is tested ends the hang


def fit(case: str, folder: str) -> None:
    os.makedirs(f"{folder}/{case}-notes")
    outcome = {"case": case, "error": "", "text": ""}
    try:
        TorchTrainer(
            flight_loops.waits_for_a_file,
            train_loop_config={"notes": f"{folder}/{case}-notes", "go": f"{folder}/{case}-go"},
            torch_config=GuardedTorchConfig(backend="gloo", timeout_s=LONG_S, probe=ProbeSpec()),
            scaling_config=ScalingConfig(num_workers=3),
            run_config=RunConfig(name=case, storage_path=f"{folder}/storage"),
        ).fit()
    except Exception as error:
        outcome |= {"error": type(error).__name__, "text": str(error)}
    print(f"CASE {json.dumps(outcome)}", flush=True)


def main() -> None:
    folder, *cases = sys.argv[1:]
    ray.init(num_cpus=4, include_dashboard=False)
    for case in cases:
        # Read when fit() makes the callback, here in the driver.
        os.environ["RAY_TRAIN_ENABLE_NCCL_HANG_DETECTOR"] = "0" if case == "interrupted" else "1"
        os.environ["RAY_TRAIN_NCCL_RAS_ACTION"] = "observe" if case == "interrupted" else case
        fit(case, folder)


if __name__ == "__main__":
    main()
