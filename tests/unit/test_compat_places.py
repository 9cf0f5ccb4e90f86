"""Which file the loader would take, who differs from whom, what a GPU is called, and what a record carries."""

from __future__ import annotations

import json
import struct

import pytest

from ray_nccl_guard.compat import record
from ray_nccl_guard.compat.errors import CompatError
from ray_nccl_guard.compat.fingerprint import fingerprint
from ray_nccl_guard.compat.gpus import Gpu, numbered, visible
from ray_nccl_guard.compat.ldcache import lookup
from ray_nccl_guard.compat.loaded import decode
from ray_nccl_guard.compat.locate import Via, resolve
from ray_nccl_guard.compat.skew import differences, table
from ray_nccl_guard.compat.targets import parse
from ray_nccl_guard.errors import UsageError
from tests.unit.compat_files import elf, libnccl


@pytest.fixture
def site(tmp_path):
    """A site-packages with NCCL in the wheel's place, another copy aside, and a torch whose tags a test chooses."""
    wheel = libnccl(tmp_path / "nvidia/nccl/lib/libnccl.so.2")
    other = libnccl(tmp_path / "other/libnccl.so.2", nccl="2.26.2")

    def torch(**tags) -> str:
        path = tmp_path / "torch/lib/libtorch_cuda.so"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(elf({}, **tags))
        return str(path)

    return torch, wheel, other, {"LD_LIBRARY_PATH": str(tmp_path / "other")}


RELATIVE = "$ORIGIN/../../nvidia/nccl/lib"
NEEDS = ["libc.so.6", "libnccl.so.2"]


def test_an_rpath_comes_before_ld_library_path(site):
    torch, wheel, _, env = site
    found = resolve(torch(needed=NEEDS, rpath=RELATIVE), env)
    assert (found.path, found.via) == (wheel, Via.RPATH)


def test_a_runpath_comes_after_ld_library_path_and_silences_an_rpath(site):
    torch, wheel, other, env = site
    library = torch(needed=NEEDS, rpath=RELATIVE, runpath="${ORIGIN}/../../nvidia/nccl/lib")
    found = resolve(library, env)
    assert (found.path, found.via) == (other, Via.LIBRARY_PATH)
    found = resolve(library, {})
    assert (found.path, found.via) == (wheel, Via.RUNPATH)


def test_a_preloaded_nccl_comes_first_and_other_preloads_do_not_count(site, tmp_path):
    torch, _, other, _ = site
    shim = tmp_path / "shim.so"
    shim.write_bytes(elf({}, soname="shim.so"))
    found = resolve(torch(needed=NEEDS, rpath=RELATIVE), {"LD_PRELOAD": f"{shim}:{tmp_path}/none.so {other}"})
    assert (found.path, found.via) == (other, Via.PRELOAD)


def test_a_torch_that_needs_no_libnccl_has_it_linked_in(site):
    torch, _, _, env = site
    library = torch(needed=["libc.so.6"])
    found = resolve(library, env)
    assert (found.path, found.via) == (library, Via.STATIC)


def test_the_loader_cache_is_read_by_name(tmp_path):
    strings = b"libnccl.so.2\0/opt/nccl/libnccl.so.2\0libc.so.6\0/lib/libc.so.6\0"
    start = 48 + 2 * 24
    entries = b"".join(
        struct.pack("<iIIIQ", 0x303, start + strings.index(name), start + strings.index(path), 0, 0)
        for name, path in ((b"libnccl.so.2\0", b"/opt/nccl"), (b"libc.so.6\0", b"/lib/"))
    )
    new = struct.pack("<20sIIB3xI12x", b"glibc-ld.so.cache1.1", 2, len(strings), 2, 0) + entries + strings
    assert lookup(new, "libnccl.so.2") == ["/opt/nccl/libnccl.so.2"]
    assert lookup(b"ld.so-1.7.0\0old" + new, "libnccl.so.2") == ["/opt/nccl/libnccl.so.2"]
    assert lookup(new, "libnccl.so.3") == lookup(new[:60], "libnccl.so.2") == lookup(b"", "libnccl.so.2") == []


def test_a_fingerprint_tells_two_builds_apart(site):
    _, wheel, other, _ = site
    assert fingerprint(wheel) == fingerprint(wheel)
    assert fingerprint(wheel) != fingerprint(other)


def test_version_codes_are_decoded_old_and_new():
    assert [decode(code) for code in (23007, 22602, 21005, 2804, 2708)] == [
        (2, 30, 7), (2, 26, 2), (2, 10, 5), (2, 8, 4), (2, 7, 8)]  # fmt: skip


def test_only_facts_that_differ_are_shown_against_the_majority():
    same = {"nccl": {"path": "/a", "version": "2.30.7"}, "driver": "580", "mtu": [1500, 9000]}
    ranks = {rank: same for rank in range(6)} | {
        6: {**same, "nccl": {"path": "/b", "version": "2.30.7"}},
        7: {**same, "driver": None},
    }
    found = differences(ranks)
    assert [(d.name, d.majority, dict(d.others), d.tied) for d in found] == [
        ("driver", "580", {"(unset)": (7,)}, False),
        ("nccl.path", "/a", {"/b": (6,)}, False),
    ]
    assert "ranks 6" in table(found)
    assert differences({0: same, 1: same}) == differences({}) == ()
    assert table(()) == ""


def test_a_tie_is_called_one_and_the_lowest_rank_speaks_first():
    (found,) = differences({0: {"x": "a"}, 1: {"x": "b"}, 2: {"x": "b"}, 3: {"x": "a"}})
    assert (found.majority, found.tied, found.ranks) == ("a", True, (1, 2))
    assert "ranks 1-2" in table((found,))


GPU_NAMES = {
    (12, 0): ["sm_120", "RTX 5090", "NVIDIA RTX PRO 6000 Blackwell Server Edition"],
    (12, 1): ["12.1", "NVIDIA GB10"],
    (10, 3): ["b300"],
    (10, 0): ["compute_100f", "NVIDIA GB200"],
    (9, 0): ["SM_90a", "NVIDIA H100 80GB HBM3"],
    (8, 9): ["NVIDIA GeForce RTX 4090 Laptop GPU", "4090", "NVIDIA RTX 6000 Ada Generation", "NVIDIA L40S"],
    (8, 6): ["86"],
    (8, 0): ["cc 8.0", "A100-SXM4-80GB"],
    (7, 5): ["Quadro RTX 6000", "T4", "RTX 2080 Ti"],
    (7, 0): ["Tesla V100-SXM2-32GB"],
}


@pytest.mark.parametrize(("capability", "text"), [(cc, text) for cc, texts in GPU_NAMES.items() for text in texts])
def test_a_gpu_is_known_by_its_architecture_and_by_its_name(capability, text):
    assert parse(text).capability == capability


@pytest.mark.parametrize(
    "text", ["sm_12", "sm_", "sm_9000", "12.34", "", "RTX 6000", "RTX 5091", "H100 something", "-1", "sm_99.0"]
)
def test_a_gpu_nobody_knows_is_wrong_usage(text):
    with pytest.raises(UsageError):
        parse(text)


def test_a_slip_in_a_name_is_answered_with_close_ones():
    with pytest.raises(UsageError) as caught:
        parse("RTX 5091")
    assert "rtx 5090" in " ".join(caught.value.help)


A, B = (
    Gpu(index=0, uuid="GPU-aaaa-1", name="A", capability=(8, 0)),
    Gpu(index=1, uuid="GPU-bbbb-2", name="B", capability=(9, 0)),
)
M = Gpu(index=0, uuid="GPU-cccc-3", name="M", capability=(8, 0), mig_uuids=("MIG-1", "MIG-2"))


@pytest.mark.parametrize(
    ("gpus", "env", "left"),
    [
        ((A, B), {}, (A, B)),
        ((A, B), {"CUDA_VISIBLE_DEVICES": ""}, ()),
        ((A, B), {"CUDA_VISIBLE_DEVICES": "GPU-bbbb"}, (B,)),
        ((A, B), {"CUDA_VISIBLE_DEVICES": "0"}, (A, B)),  # fastest first is not PCI order: keep both
        ((A, B), {"CUDA_VISIBLE_DEVICES": "0", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, (A,)),
        ((A, B), {"CUDA_VISIBLE_DEVICES": "1,-1,0", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, (B,)),
        ((M,), {"CUDA_VISIBLE_DEVICES": "MIG-2"}, (M,)),
        ((M,), {"CUDA_VISIBLE_DEVICES": "MIG-GPU-cccc-3/1/0"}, (M,)),
        ((A, B), {"CUDA_VISIBLE_DEVICES": "GPU-"}, ()),  # ambiguous
    ],
)
def test_visible_devices_are_taken_as_cuda_takes_them(gpus, env, left):
    assert visible(gpus, env) == left


@pytest.mark.parametrize(
    ("text", "devices"),
    [
        ("MIG-2,MIG-1", [(M, "MIG-2"), (M, "MIG-1")]),  # two devices on one card are two devices
        ("MIG-1,GPU-bbbb", [(M, "MIG-1"), (B, "GPU-bbbb-2")]),
        ("MIG-GPU-cccc-3/1/0", [(M, "GPU-cccc-3")]),  # the old form names no UUID of its own
        ("MIG-", [(M, "GPU-cccc-3")]),
        ("MIG-1,MIG-9,MIG-2", [(M, "MIG-1")]),
    ],
)
def test_a_mig_device_has_its_place_and_its_own_uuid(text, devices):
    assert numbered((M, B), {"CUDA_VISIBLE_DEVICES": text}) == tuple(devices)


ANSWER = {
    "libnccl": "/l",
    "nccl_version": "2.30.7",
    "fingerprint": "abc",
    "exit": 0,
    "gpus": [{"uuid": "GPU-1", "mig_uuids": ["MIG-1"]}],
}


def test_a_record_survives_the_trip_and_names_strange_gpus(tmp_path):
    path = str(tmp_path / "compat.json")
    record.write(path, ANSWER)
    found = record.read(path)
    assert (found.gpu_uuids, found.exit, found.nccl_version) == (("GPU-1", "MIG-1"), 0, "2.30.7")
    assert record.strangers(found, ["MIG-1", "GPU-9"]) == ("GPU-9",)
    assert [p.name for p in tmp_path.iterdir()] == ["compat.json"]


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"schema_version": 9}', json.dumps({"schema_version": 1, "gpus": 3}), "\x00\xff"]
)
def test_what_is_no_record_is_said_to_be_none(tmp_path, text):
    path = tmp_path / "compat.json"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(CompatError):
        record.read(str(path))
    with pytest.raises(CompatError, match="No such file"):
        record.read(str(tmp_path / "none"))


def test_a_record_that_cannot_be_written_is_wrong_usage(tmp_path):
    with pytest.raises(UsageError, match="cannot write the record"):
        record.write(str(tmp_path / "none" / "compat.json"), ANSWER)
