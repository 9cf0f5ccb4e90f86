"""What a process sees of the double's GPUs: through CUDA, through NVML, and when another process holds them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.fakegpu.double import Double
from tests.fakegpu.ranks import Ranks

pytestmark = pytest.mark.torch_versions

BODIES = "tests.fakegpu.bodies"


def seen(ranks: Ranks, **env: str) -> dict[str, Any]:
    (ended,) = ranks.run(f"{BODIES}:devices", 1, env=env)
    assert ended.exit_code == 0, ended.output
    return dict(ended.value)


def test_without_a_mask_all_gpus_are_visible_in_order(ranks: Ranks) -> None:
    assert seen(ranks)["pci"] == [1, 2, 3, 4, 5, 6, 7, 8]


def test_gpus_are_visible_as_cuda_visible_devices_says(ranks: Ranks) -> None:
    uuid = f"GPU-{seen(ranks)['uuid'][5]}"
    expected = {
        "2,0": [3, 1],
        "": [],
        "1,9,2": [2],  # the first that does not exist ends the list
        "1,1": [],  # a repeated one spoils it
        "-1": [],
        uuid: [6],
        "GPU-none": [],
    }
    assert {mask: seen(ranks, CUDA_VISIBLE_DEVICES=mask)["pci"] for mask in expected} == expected


def test_a_mig_instance_is_visible_by_its_uuid_only_and_by_index_the_first_one_is(ranks: Ranks) -> None:
    whole = str(seen(ranks, CUDA_VISIBLE_DEVICES="1")["uuid"][0])
    first = str(seen(ranks, CUDA_VISIBLE_DEVICES="1", FAKE_CUDA_MIG="2")["uuid"][0])
    second = f"{first[:-4]}02{first[-2:]}"
    assert first != whole
    assert seen(ranks, CUDA_VISIBLE_DEVICES=f"MIG-{second}", FAKE_CUDA_MIG="2")["uuid"] == [second]
    assert seen(ranks, CUDA_VISIBLE_DEVICES=f"MIG-{second}")["count"] == 0


def test_the_environment_describes_the_gpus(ranks: Ranks) -> None:
    described = seen(
        ranks, FAKE_CUDA_DEVICES="3", FAKE_CUDA_CC="8.0,12.0", FAKE_CUDA_NAME="NVIDIA Test", FAKE_CUDA_MEM=str(1 << 30)
    )
    assert described["count"] == 3
    assert described["capability"] == [[8, 0], [12, 0], [12, 0]]
    assert (described["names"], described["bytes"]) == (["NVIDIA Test"] * 3, [1 << 30] * 3)


def test_two_nodes_have_the_same_pci_ids_and_other_uuids(ranks: Ranks) -> None:
    a, b = seen(ranks, FAKE_CUDA_NODE="a"), seen(ranks, FAKE_CUDA_NODE="b")
    assert a["pci"] == b["pci"] and not set(a["uuid"]) & set(b["uuid"])


def test_no_device_an_old_driver_and_a_fabric_not_ready_end_in_torchs_own_words(ranks: Ranks) -> None:
    cases = {
        "No CUDA GPUs are available": {"FAKE_CUDA_DEVICES": "0"},
        "driver on your system is too old": {"FAKE_CUDA_DRIVER": "12020"},
        "system not yet initialized": {"FAKE_FAULT": "getdevicecount:error=802"},
        "busy or unavailable": {"FAKE_FAULT": "setdevice:error=46"},
    }
    for text, env in cases.items():
        (ended,) = ranks.run(f"{BODIES}:allocate", 1, env=env, mib=1)
        assert text in ended.error_text, (text, ended)


def test_memory_that_a_process_holds_is_missing_for_others_and_back_after_its_death(double: Double, tmp_path: Path) -> None:
    code = (
        "import ctypes, sys, time; rt = ctypes.CDLL(sys.argv[1]); p = ctypes.c_void_p();"
        "print(rt.cudaMalloc(ctypes.byref(p), ctypes.c_size_t(100 << 20)), flush=True); time.sleep(600)"
    )
    env = {**os.environ, **double.env(1, state=tmp_path)}
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(double.folder / "libcudart.so.13")], env=env, stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "0\n"
        held = nvml(double, state=tmp_path)
        assert held["used"] == 100 << 20 and held["processes"] == [[holder.pid, 100 << 20]]
    finally:
        holder.send_signal(signal.SIGKILL)
        # not reaped yet: a zombie holds no GPU memory either
        deadline_s = time.monotonic() + 10
        while nvml(double, state=tmp_path)["used"] and time.monotonic() < deadline_s:
            time.sleep(0.05)
        freed = nvml(double, state=tmp_path)
        holder.wait(timeout=10)
        assert holder.stdout is not None
        holder.stdout.close()
    assert freed["used"] == 0 and freed["processes"] == []


def test_a_gpu_that_another_process_fills_is_out_of_memory(ranks: Ranks) -> None:
    (ended,) = ranks.run(f"{BODIES}:allocate", 1, env={"FAKE_CUDA_MEM": str(64 << 20)}, mib=100)
    assert ended.error_type == "OutOfMemoryError"


def test_an_exclusive_gpu_refuses_a_second_process(ranks: Ranks) -> None:
    env = {"FAKE_CUDA_COMPUTE_MODE": "exclusive", "LOCAL_RANK": "0"}
    ended = ranks.run(f"{BODIES}:all_reduce", 2, env=env, deadline_s=30, timeout_s=2)
    assert any("busy or unavailable" in rank.error_text for rank in ended)


def nvml(double: Double, devices: int = 1, **options: Any) -> dict[str, Any]:
    """What nvidia-ml-py reads of GPU 0, in a process of its own."""
    env = {**os.environ, **double.env(devices, **options)}
    command = [sys.executable, str(Path(__file__).with_name("read_nvml.py"))]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def test_nvml_answers_what_a_pre_flight_asks(double: Double, ranks: Ranks, tmp_path: Path) -> None:
    pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
    read = nvml(double, devices=2, state=tmp_path, driver=12020, cc="8.6", mem=1 << 30, ecc_errors=3, p2p_status=5)
    assert read["count"] == 2
    assert (read["driver"], read["cuda"]) == ("535.54.03", 12020)
    assert (read["capability"], read["memory"], read["compute_mode"]) == ([8, 6], 1 << 30, 0)
    assert (read["ecc"], read["p2p"], read["mig"]) == (3, 5, [0, 0])
    assert read["uuid"] == f"GPU-{seen(ranks)['uuid'][0]}" and read["pci"] == "00000000:01:00.0"
    assert read["retired_pages"] == "NVMLError_NotSupported"


def test_nvml_can_fail_to_start(double: Double) -> None:
    assert nvml(double, fault="nvmlinit:error=9")["init"] == "NVMLError_DriverNotLoaded"
