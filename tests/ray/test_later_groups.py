"""After a fall-back a group on the backend that failed is warned about once, with the caller's line; others pass in silence."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytest.importorskip("ray", reason="ray is not installed")
pytest.importorskip("torch", reason="torch is not installed")
from tests.ray.clusters import ROOT, environment

# One process for all: importing torch is what costs. Each case watches anew, and makes its group twice.
PROGRAM = """
import json, logging
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import new_group  # as libraries import it, before the watch
from ray_nccl_guard.ray_train import later_groups

said = []
handler = logging.Handler()
handler.emit = lambda record: said.append(record.getMessage())
later_groups.log.addHandler(handler)

def start(backend="gloo"):
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)

def proved():
    dist.new_group(); new_group([0], backend="gloo"); init_device_mesh("cpu", (1,))

CASES = {
    "new_group": ("gloo", False, lambda: dist.new_group(backend="nccl")),
    "imported before": ("gloo", False, lambda: new_group([0], None, "cpu:gloo,cuda:nccl")),
    "anew": ("gloo", False, lambda: start("nccl")),
    "without a backend": ("gloo", True, lambda: start(None)),
    "without a backend or a GPU": ("gloo", False, lambda: start(None)),
    "what was proved": ("gloo", True, proved),
    "the old nccl": ("nccl-legacy", False, lambda: dist.new_group(backend="nccl-legacy")),
    "the new nccl": ("nccl-legacy", False, lambda: dist.new_group(backend="nccl")),
}
found = {}
for name, (chosen, on_gpu, make) in CASES.items():
    start()
    assert later_groups.watch(chosen, "p2p_or_acs", on_gpu)
    said.clear()
    for _ in range(2):
        try:
            make()
        except Exception:
            pass  # there is no GPU here to make it on
    found[name] = list(said)
print("FOUND " + json.dumps(found))
"""


@pytest.fixture(scope="module")
def found() -> dict[str, list[str]]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment(PYTHONPATH=str(ROOT)), capture_output=True, text=True, timeout=170, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    return json.loads(line.removeprefix("FOUND "))


def line_of(words: str) -> int:
    return next(number for number, line in enumerate(PROGRAM.splitlines(), 1) if words in line)


@pytest.mark.parametrize(
    "case, function, line",
    [
        ("new_group", "new_group()", '"new_group":'),
        ("imported before", "new_group()", '"imported before":'),
        ("anew", "init_process_group()", "dist.init_process_group(backend"),
        ("without a backend", "init_process_group()", "dist.init_process_group(backend"),
        ("the new nccl", "new_group()", '"the new nccl":'),
    ],
)
def test_every_way_to_a_group_on_what_failed_is_named_once_with_its_line(found, case, function, line):
    (warning,) = found[case]
    assert f"{function} makes a group on" in warning and f"at <string>:{line_of(line)}," in warning
    assert "p2p_or_acs" in warning and "fell back to" in warning


@pytest.mark.parametrize("case", ["what was proved", "the old nccl", "without a backend or a GPU"])
def test_other_groups_are_nobodys_business(found, case):
    assert found[case] == []
