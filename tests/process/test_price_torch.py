"""The price against torch itself: the same buckets, and a probe that measures what it says."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed")

from ray_nccl_guard.probe.spec import Outcome
from tests.process.ranks import QUICK, run_ranks

ROOT = Path(__file__).resolve().parents[2]

# In a process of its own: a default group of this one would be in the way of the ranks that are forked from it.
COMPARE = """
import json, sys, torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from ray_nccl_guard.price import gradient_buckets

dist.init_process_group("gloo", store=dist.FileStore(sys.argv[1], 1), rank=0, world_size=1)
for model, shape in (
    (nn.Sequential(*(nn.Linear(512, 512) for _ in range(12))), (2, 512)),
    (nn.Sequential(nn.Linear(3000, 3000), nn.Linear(3000, 8), nn.Linear(8, 3000)), (2, 3000)),
    (nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32), nn.Linear(32, 8)), (4, 64)),
):
    for cap_mb in (None, 3):
        wrapped = DistributedDataParallel(model, bucket_cap_mb=cap_mb)
        for _ in range(3):
            wrapped(torch.randn(shape)).sum().backward()
        rebuilt = str(wrapped._get_ddp_logging_data()["rebuilt_bucket_sizes"])
        print(json.dumps([[int(size) for size in rebuilt.split(",")], gradient_buckets(list(model.parameters()), cap_mb)]))
dist.destroy_process_group()
"""


def test_buckets_are_those_that_ddp_has_rebuilt_after_a_step(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", COMPARE, str(tmp_path / "store")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    pairs = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(pairs) == 6, done.stderr
    assert all(theirs == ours for theirs, ours in pairs), pairs


def test_a_rung_that_is_fallen_back_to_measures_all_reduce_on_every_rank():
    only_latency = replace(QUICK, sizes_bytes=(4,))
    (plain,) = {tuple(r.all_reduce_s) for r in run_ranks(2, spec=only_latency)}
    priced = run_ranks(2, spec=only_latency, price=True)
    assert all(r.outcome is Outcome.OK for r in priced), [r.error for r in priced]
    (sizes,) = {tuple(sorted(r.all_reduce_s)) for r in priced}  # the ranks agree
    assert plain == (4,) and {4, 64 << 10} <= set(sizes)
    assert all(seconds > 0 for r in priced for seconds in r.all_reduce_s.values())
