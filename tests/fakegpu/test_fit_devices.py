"""Guarded fit() calls where nothing says which GPUs are visible, and where MIG UUIDs do; which GPU a worker's group is bound to."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakegpu.double import Double
from tests.fakegpu.fits import Fits, refused, trained_on, verdict
from tests.fakegpu.matrix import mig

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SLICES = [mig("m", 3, 1), mig("m", 0, 0), mig("m", 0, 1)]  # the last two are on one card


def cluster(double: Double, folder: Path, env: dict[str, str], **options: object) -> Fits:
    pytest.importorskip("ray", reason="ray is not installed")
    (folder / "cluster").mkdir()
    return Fits({**double.env(devices=4, ops=True, state=folder / "cluster", **options), **env}, folder)


@pytest.fixture
def unmasked(double: Double, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fits]:
    """A Ray that finds its four GPUs without CUDA_VISIBLE_DEVICES."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with cluster(double, tmp_path, {}) as fits:
        yield fits


@pytest.fixture(scope="module")
def sliced(double: Double, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fits]:
    """A Ray that finds three GPUs: as many as the UUIDs name, and no more than there are cards."""
    env = {"CUDA_VISIBLE_DEVICES": ",".join(SLICES)}
    with cluster(double, tmp_path_factory.mktemp("fits"), env, mig=2, node="m") as fits:
        yield fits


@pytest.mark.long
def test_a_worker_with_several_gpus_and_no_eager_init_forms_its_group_on_its_own_first_one(unmasked: Fits) -> None:
    # torch 2.15's nccl, told of no device, would bind rank 1 to LOCAL_RANK 1, which is rank 0's second GPU.
    run = unmasked.guarded(train="tells_its_cards", gpus=2, eager_init=False)
    trained_on(run, "nccl")
    assert [len(r["gpu_ids"]) for r in run.report["ranks"]] == [2, 2]
    own = [r["gpu"]["uuid"] for r in run.report["ranks"]]
    assert len(set(own)) == 2 and [n["cards"] for n in run.notes] == [[uuid] for uuid in own]


def test_slices_of_two_cards_train_on_nccl_and_are_named_by_their_own_uuids(sliced: Fits) -> None:
    run = sliced.guarded(train="train")
    trained_on(run, "nccl")
    assert run.report["action"] == "proceed" and run.report["verdict"]["failure"] == "ok"
    used = ["MIG-" + n["gpu"] for n in run.notes]
    assert len(set(used)) == 2 and set(used) <= set(SLICES)
    assert [r["gpu_ids"] for r in run.report["ranks"]] == [[uuid] for uuid in used], "Ray hands the UUIDs on"
    assert [r["gpu"]["uuid"] for r in run.report["ranks"]] == used
    for noted in run.notes:
        assert noted["losses"] == pytest.approx(noted["alone"], rel=1e-5)


@pytest.mark.long
def test_two_slices_of_one_card_which_nccl_cannot_join_are_refused_by_its_own_words(sliced: Fits) -> None:
    run = sliced.guarded(workers=3)
    refused(run)
    failure, culprits, step = verdict(run)
    at = {rank["rank"]: rank["gpu"]["uuid"] for rank in run.report["ranks"]}
    assert (failure, step) == ("duplicate_gpu", "comm_init")
    assert [at[rank] for rank in culprits] == [uuid for uuid in at.values() if uuid in SLICES[1:]]
    assert "Duplicate GPU detected" in str(run.report["verdict"]["evidence"])


def test_slices_that_cuda_does_not_show_beside_the_first_are_refused_on_the_rank_that_got_one(sliced: Fits) -> None:
    # Ray Train gives each worker the UUIDs of all of the node's workers, of which CUDA up to 12 enumerates one MIG device.
    run = sliced.guarded(env={"FAKE_CUDA_MIG_SEEN": "1"})
    refused(run)
    failure, culprits, step = verdict(run)
    assert (failure, len(culprits), step) == ("no_gpu_visible", 1, "device")
    assert "invalid device ordinal" in str(run.report["verdict"]["evidence"])
