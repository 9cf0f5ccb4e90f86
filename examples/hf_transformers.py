"""Hugging Face Transformers inside train_func under the guard. Needs `pip install transformers accelerate`.

    python examples/hf_transformers.py --workers 4

Accelerate takes the process group that is there, so the Trainer runs on the backend that the guard has chosen. Leave
`ddp_backend` of TrainingArguments unset. The model is a tiny one of random weights: nothing is downloaded.
"""

from __future__ import annotations

import argparse
import logging
import os
import tempfile

import ray
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from ray_nccl_guard import GuardedTorchConfig


def train_func(config: dict[str, int]) -> None:
    import ray.train
    import torch
    import torch.distributed as dist
    import transformers
    from ray.train.huggingface.transformers import prepare_trainer

    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=64, n_positions=16, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
        )
    )
    words = torch.randint(64, (64, 16), generator=torch.Generator().manual_seed(0))
    rows = [{"input_ids": row, "labels": row} for row in words]
    with tempfile.TemporaryDirectory() as folder:
        trainer = transformers.Trainer(
            model=model,
            args=transformers.TrainingArguments(
                output_dir=folder,
                max_steps=config["steps"],
                per_device_train_batch_size=4,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
            ),
            train_dataset=rows,
        )
        outcome = prepare_trainer(trainer).train()
    if dist.get_rank() == 0:
        # A worker's print() is shown twice by Ray Train V2; its log lines once.
        logging.info("trained on %s, loss %.4f", dist.get_backend(), outcome.training_loss)
    ray.train.report({"loss": outcome.training_loss, "backend": dist.get_backend()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--storage", default=None, help="where the run is kept (default: a new temporary folder)")
    args = parser.parse_args()

    # A running cluster has its own size; one made here gets room for the workers whatever this machine has.
    room = {} if os.environ.get("RAY_ADDRESS") else {"num_cpus": max(4, args.workers)}
    ray.init(**room)
    use_gpu = ray.cluster_resources().get("GPU", 0) >= args.workers
    trainer = TorchTrainer(
        train_func,
        train_loop_config={"steps": args.steps},
        torch_config=GuardedTorchConfig(collectives=["ddp"]),
        scaling_config=ScalingConfig(num_workers=args.workers, use_gpu=use_gpu),
        run_config=RunConfig(name="hf", storage_path=args.storage or tempfile.mkdtemp(prefix="nccl-guard-hf-")),
    )
    result = trainer.fit()
    print(f"the guard's report: {result.path}/nccl_guard/report.json")


if __name__ == "__main__":
    main()
