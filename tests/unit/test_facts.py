"""What the facts say before any collective: only what no probe can pass decides."""

from __future__ import annotations

from ray_nccl_guard import facts
from ray_nccl_guard.facts import Gpu, findings
from tests.unit.builders import gpu_rank


def failures(ranks, **options):
    return [
        (f.failure, f.decides, f.culprit_ranks) for f in findings(ranks, **{"backend": "nccl", "asked_gpus": 1, **options})
    ]


def test_a_world_with_a_gpu_for_every_rank_has_no_findings():
    assert failures([gpu_rank(0), gpu_rank(1)]) == []


def test_a_rank_without_a_gpu_decides_and_is_named():
    assert failures([gpu_rank(0), gpu_rank(1, device_index=None)]) == [("no_gpu_visible", True, (1,))]


def test_nothing_is_said_about_gpus_for_gloo():
    assert failures([gpu_rank(0, device_index=None)], backend="gloo") == []


def test_two_ranks_on_one_gpu_decide_unless_nccl_was_told_to_share():
    shared = [gpu_rank(0, gpu_ids=("0",)), gpu_rank(1, gpu_ids=("0",))]
    assert failures(shared) == [("duplicate_gpu", True, (0, 1))]
    told = [gpu_rank(r, gpu_ids=("0",), settings={"NCCL_MULTI_RANK_GPU_ENABLE": "1"}) for r in (0, 1)]
    assert failures(told) == []
    other_hosts = [gpu_rank(0, gpu_ids=("0",)), gpu_rank(1, host="gpu-02", gpu_ids=("0",))]
    assert failures(other_hosts) == [], "the same index on two hosts is two GPUs"


def test_the_uuid_tells_gpus_apart_where_nvml_gave_it():
    cards = [gpu_rank(r, gpu_ids=(str(r),), gpu=Gpu(uuid="GPU-same")) for r in (0, 1)]
    assert failures(cards) == [("duplicate_gpu", True, (0, 1))]


def test_a_small_shm_only_explains():
    assert failures([gpu_rank(0, shm_free_bytes=64 << 20, shm_total_bytes=64 << 20)]) == [("shm_too_small", False, (0,))]


def test_what_cannot_be_read_is_not_run_and_settings_are_kept(monkeypatch):
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    monkeypatch.setenv("HOME_MADE", "1")
    monkeypatch.setattr(facts.os, "statvfs", lambda path: (_ for _ in ()).throw(FileNotFoundError(path)))
    rank = facts.collect(0)
    assert "/dev/shm" in rank.not_run and rank.shm_free_bytes is None
    assert rank.settings["NCCL_DEBUG"] == "WARN" and "HOME_MADE" not in rank.settings


def test_identity_is_the_hardware_and_the_settings():
    one = gpu_rank(0, settings={"NCCL_ALGO": "Ring", "CUDA_VISIBLE_DEVICES": "0,1"}, pid=1)
    other = gpu_rank(0, settings={"NCCL_ALGO": "Ring", "CUDA_VISIBLE_DEVICES": "1,0"}, pid=2)
    assert one.identity == other.identity
    assert one.identity != gpu_rank(0, host="gpu-02").identity
