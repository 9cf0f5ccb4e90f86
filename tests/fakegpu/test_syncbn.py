"""benchmarks/syncbn.py on the fake GPUs and on real gloo: right values on both backends, a whole report, no figure pretended."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakegpu.double import Double
from tests.fakegpu.ranks import REPOSITORY, Ranks

BODY = "tests.fakegpu.syncbn_bodies"
LAYERS = 6  # BatchNorm layers of the tiny network


@pytest.fixture(scope="module")
def world(double: Double, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Ranks whose GPUs compute."""
    with Ranks(double.env(devices=2, ops=True, state=tmp_path_factory.mktemp("ledger"))) as server:
        yield server


def values(ranks: Ranks, function: str, **arguments: object) -> list[dict]:
    ended = ranks.run(f"{BODY}:{function}", 2, deadline_s=90, **arguments)
    assert [end.error_type for end in ended] == [None, None], ended[0].error_text + ended[1].error_text + ended[0].output
    return [end.value for end in ended]


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_synchronised_training_gives_the_losses_of_one_process_on_the_whole_batch(world: Ranks, device: str) -> None:
    answer = values(world, "measured", device=device)[0]
    backends = ["nccl", "gloo"] if device == "cuda" else ["gloo"]
    cases = {case["arm"]: case for case in answer["cases"]}
    arms = [f"{b}, {kind}" for b in backends for kind in ("SyncBN", "BN unsynchronised")]
    assert list(cases) == ["no exchange", *arms] and answer["fake"] is (device == "cuda")
    for backend in backends:
        assert cases[f"{backend}, SyncBN"]["losses"] == pytest.approx(answer["expected"], rel=1e-4)
        assert cases[f"{backend}, BN unsynchronised"]["losses"][0] != pytest.approx(answer["expected"][0], rel=1e-4)
        for step in cases[f"{backend}, SyncBN"]["steps"]:
            assert step["collectives"] == 2 * LAYERS and step["buckets"] >= 1
            assert 0 < step["statistics_s"] < step["total_s"] and 0 <= step["gradients_s"] < step["total_s"]
        assert {step["collectives"] for step in cases[f"{backend}, BN unsynchronised"]["steps"]} == {0}
    assert {(step["collectives"], step["buckets"]) for step in cases["no exchange"]["steps"]} == {(0, 0)}
    swept = {(one["operation"], one["bytes"], one["backend"]) for one in answer["sweep"]}
    assert swept == {(o, n, b) for o in ("all_reduce", "all_gather") for n in (4, 1024) for b in backends}


def test_the_written_out_layer_is_batch_norm_over_all_ranks(world: Ranks) -> None:
    for found in values(world, "statistics"):
        assert found["ranks"] == pytest.approx(found["whole"], rel=1e-4, abs=1e-4)


def test_the_wait_for_a_slower_rank_counts_as_statistics_and_torch_is_left_as_it_was(world: Ranks) -> None:
    early, late = values(world, "split", delay_s=0.5)
    assert early["statistics_s"] > 0.3 > early["compute_s"] and late["compute_s"] > 0.3, (early, late)
    assert early["count"] == 1 and early["put_back"]


def test_a_case_for_which_no_time_is_left_is_named(world: Ranks) -> None:
    answer = values(world, "measured", device="cpu", minutes=0, sizes=[])[0]
    assert answer["cases"] == [] and answer["not_run"] == ["tiny, batch 3, fp32: the 0 minutes were over"]


def test_a_backend_that_computes_wrongly_gets_no_figure(world: Ranks) -> None:
    ended = world.run(f"{BODY}:wrong", 2, deadline_s=90, env={"FAKE_FAULT": "allreduce:wrong@rank1"})
    assert all(end.value is None for end in ended)
    assert "WrongValues" in {end.error_type for end in ended}, [end.error_text for end in ended]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_whole_script_on_fake_gpus_says_that_it_is_no_measurement(double: Double, tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="ray is not installed")
    env = {**os.environ, **double.env(devices=2, ops=True, state=tmp_path), "RAY_AUTH_MODE": "disabled"}
    small = "--workers 2 --models tiny --batches 3 --dtypes fp32 --image 8 --steps 1 --rounds 2 --largest 1K"
    command = [sys.executable, "benchmarks/syncbn.py", *small.split(), "--json", "--out", str(tmp_path / "result.md")]
    command += ["--plot", str(tmp_path / "plot.png")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=350, cwd=REPOSITORY, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    result = json.loads(done.stdout)
    assert result["head"]["measurement"] is False and "NOT A MEASUREMENT" in result["head"]["what"]
    assert "NOT A MEASUREMENT" in (tmp_path / "result.md").read_text().splitlines()[0]
    steps = [row for row in result["rows"] if "arm" in row]
    assert [row["arm"] for row in steps] == [
        "no exchange", "nccl, SyncBN", "nccl, BN unsynchronised", "gloo, SyncBN", "gloo, BN unsynchronised",
    ]  # fmt: skip
    assert all(row["images/s"] > 0 for row in steps)
    losses = {row["arm"]: row["last loss"] for row in steps}
    assert losses["nccl, SyncBN"] == pytest.approx(losses["gloo, SyncBN"], rel=1e-3)
    assert {row["operation"] for row in result["rows"] if "operation" in row} == {"all_reduce", "all_gather"}
    assert any("verdict ok, proceed on nccl" in note for note in result["notes"]), result["notes"]
    if (tmp_path / "plot.png").exists():  # matplotlib is optional
        assert (tmp_path / "plot.png").stat().st_size > 1000
