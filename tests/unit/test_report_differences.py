"""What differs between ranks is told once a fact, against what most have; what is each rank's own is not a difference."""

from __future__ import annotations

import json

from ray_nccl_guard.differences import between, findings, sentences
from ray_nccl_guard.facts import Gpu
from ray_nccl_guard.network.addresses import AddressChoice, Chosen
from tests.unit.builders import gpu_rank
from tests.unit.report_cases import facts, fell_back


def test_ranks_alike_differ_in_nothing_though_each_has_its_own_gpu_address_and_devices():
    ranks = facts(4, r1={"settings": {"NCCL_DEBUG": "WARN", "CUDA_VISIBLE_DEVICES": "1"}, "address": "10.0.0.9", "pid": 7})
    assert between(ranks) == () and sentences(between(ranks)) == ()


def test_each_difference_is_one_line_with_who_and_what_the_others_have():
    ranks = facts(4, r1={"driver_version": "570.1"}, r2={"driver_version": "560.2"}, r3={"driver_version": "570.1"}, r0={})
    ranks = (*ranks, *(gpu_rank(r, driver_version="580.95.05") for r in (4, 5)))
    (line,) = [s for s in sentences(between(ranks)) if s.startswith("driver ")]
    assert line == "driver differs: ranks 1, 3: 570.1; rank 2: 560.2; the others have 580.95.05"


def test_the_same_library_at_another_place_is_no_difference_and_another_library_is():
    same = {"version": "2.30.7", "cuda": "13.3", "fingerprint": "5b1c"}
    assert between(facts(2, r1={"libnccl": {**same, "path": "/opt/nccl/libnccl.so.2"}})) == ()
    (other,) = between(facts(3, r1={"libnccl": {**same, "fingerprint": "77aa"}}))
    assert other.name == "libnccl.fingerprint" and other.ranks == (1,)


def test_another_card_an_unset_variable_and_another_interface_are_differences():
    gpu = Gpu(uuid="GPU-x", name="NVIDIA A100", capability=(8, 0), total_bytes=40 << 30)
    eth, ib = (AddressChoice(nccl=Chosen(address="", interface=i, why=""), gloo=Chosen(address="", interface="eth0", why=""))
               for i in ("eth0", "ib0"))  # fmt: skip
    ranks = facts(3, r0={"addresses": ib}, r1={"gpu": gpu, "addresses": ib}, r2={"settings": {}, "addresses": eth})
    names = {d.name: d for d in between(ranks)}
    assert set(names) == {"gpu.name", "gpu.capability", "gpu.total_bytes", "env.NCCL_DEBUG", "interface.nccl"}
    assert names["env.NCCL_DEBUG"].others == {"(unset)": (2,)}


def test_mixed_torch_or_nccl_explains_a_failure_of_nccl_but_decides_nothing():
    ranks = facts(3, r2={"torch_version": "2.14.1"}, r1={"driver_version": "570.1"})
    (found,) = findings(ranks, backend="nccl")
    assert (found.failure, found.decides, found.culprit_ranks) == ("version_mismatch", False, (2,))
    assert "torch differs: rank 2: 2.14.1" in found.text
    assert findings(ranks, backend="gloo") == ()
    tied = facts(2, r1={"torch_version": "2.14.1"})
    assert findings(tied, backend="nccl")[0].culprit_ranks == (), "of two, nobody is the odd one"


def test_the_report_has_the_table_and_a_note_for_each():
    data = json.loads(json.dumps(fell_back().to_json()))
    assert [(d["name"], d["others"]) for d in data["skew"]] == [
        ("driver", [{"value": "570.86.10", "ranks": [1]}]),
        ("env.NCCL_DEBUG", [{"value": "INFO", "ranks": [2]}]),
    ]
    assert len([n for n in data["notes"] if " differs: " in n]) == 2
