"""The fault language of FAKE_FAULT, asked of the C parser itself: no torch, no process."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import pytest

from tests.fakegpu.double import Double


@pytest.fixture(scope="module")
def cudart(double: Double) -> ctypes.CDLL:
    return ctypes.CDLL(str(double.folder / "libcudart.so.13"))


def reason(cudart: ctypes.CDLL, text: str) -> str:
    """Why the text is not understood; empty when it is."""
    why = ctypes.create_string_buffer(256)
    return why.value.decode() if cudart.fakegpu_check_faults(text.encode(), why, 256) else ""


GOOD = (
    "",
    "init:hang",
    "init:hang-gil@rank1",
    "init:spin@rank=1",
    "allreduce:cuda700@rank1",
    "allreduce:wrong@rank1@bytes>=512K",
    "allreduce:error=6@notrank2@world>=4",
    "init:delay=1500@chatty",
    "init:exit=3#2",
    "init:abort#2+",
    "init:kill#2-4",
    "init:preset=nvls@without=NCCL_NVLS_ENABLE=0",
    "init:preset=p2p@without=NCCL_P2P_DISABLE@gpupair=0-1",
    "p2p:hang@pair=1-3",
    "init:error=2@gpupair=a/0-b/1",
    "malloc:oom@gpu=1@hosta",
    "init:error=2,allreduce:async=6@rank1, destroy:hang",
)
BAD = {
    "init": "a fault is point:action",
    ":hang": "a fault is point:action",
    "initt:hang": "unknown point",
    "init:": "a fault is point:action",
    "init:hung": "unknown action",
    "init:error": "missing or needless",
    "init:hang=3": "missing or needless",
    "init:error=x": "not a number",
    "init:hang@rnk1": "unknown or malformed condition",
    "init:hang@rank": "unknown or malformed condition",
    "init:hang@rank1x": "unknown or malformed condition",
    "init:hang@world>=": "unknown or malformed condition",
    "init:hang@bytes>=1G": "unknown or malformed condition",
    "init:hang#0": "unknown or malformed condition",
    "init:hang#3-2": "unknown or malformed condition",
    "init:hang@pair=1": "unknown or malformed condition",
    "init:hang@with=": "unknown or malformed condition",
    "init:preset=": "no such preset",
    "init:hang#2@shared": "needs FAKE_CUDA_STATE",
}


@pytest.mark.parametrize("text", GOOD)
def test_a_good_fault_is_understood(cudart: ctypes.CDLL, text: str) -> None:
    assert reason(cudart, text) == ""


@pytest.mark.parametrize("text", BAD)
def test_a_bad_fault_is_refused_with_the_part_that_is_wrong(cudart: ctypes.CDLL, text: str) -> None:
    assert BAD[text] in reason(cudart, text)


def strikes(double: Double, fault: str, env: dict[str, str], visits: int = 1) -> list[int]:
    """The results of `visits` calls of cudaStreamQuery in a fresh process: 0, or the error that the fault gave."""
    return calls(double, ["cudaStreamQuery(None)"] * visits, {"FAKE_FAULT": fault, **env})


def calls(double: Double, expressions: list[str], env: dict[str, str], first: str = "") -> list[int]:
    """The results of calls of the runtime in a fresh process; `p` and `n` are out-parameters, `rt` the library."""
    code = f"""
import ctypes, os, sys
rt = ctypes.CDLL(sys.argv[1])
p, n = ctypes.byref((ctypes.c_void_p * 64)()), ctypes.c_size_t(4096)
rt.cudaSetDevice(0)
{first}
print([{", ".join(f"rt.{expression}" for expression in expressions)}], flush=True)
"""
    command = [sys.executable, "-c", code, str(double.folder / "libcudart.so.13")]
    done = subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True, timeout=30, check=True)
    return [int(number) for number in done.stdout.strip("[]\n").split(",")]


CASES: tuple[tuple[str, dict[str, str], bool], ...] = (
    ("streamquery:error=999", {}, True),
    ("streamsync:error=999", {}, False),
    ("streamquery:error=999@rank1", {"RANK": "1"}, True),
    ("streamquery:error=999@rank1", {"RANK": "0"}, False),
    ("streamquery:error=999@rank1", {}, False),
    ("streamquery:error=999@notrank1", {"RANK": "0"}, True),
    ("streamquery:error=999@notrank1", {"RANK": "1"}, False),
    ("streamquery:error=999@world>=4", {"WORLD_SIZE": "4"}, True),
    ("streamquery:error=999@world>=4", {"WORLD_SIZE": "3"}, False),
    ("streamquery:error=999@world<=2", {"WORLD_SIZE": "3"}, False),
    ("streamquery:error=999@hostb", {"FAKE_CUDA_NODE": "b"}, True),
    ("streamquery:error=999@host=b", {"FAKE_CUDA_NODE": "a"}, False),
    ("streamquery:error=999@gpu=3", {"CUDA_VISIBLE_DEVICES": "3"}, True),
    ("streamquery:error=999@gpu=3", {"CUDA_VISIBLE_DEVICES": "2"}, False),
    ("streamquery:error=999@without=NCCL_P2P_DISABLE=1", {}, True),
    ("streamquery:error=999@without=NCCL_P2P_DISABLE=1", {"NCCL_P2P_DISABLE": "1"}, False),
    ("streamquery:error=999@without=NCCL_P2P_DISABLE=1", {"NCCL_P2P_DISABLE": "0"}, True),
    ("streamquery:error=999@with=NCCL_P2P_DISABLE", {"NCCL_P2P_DISABLE": "0"}, True),
    ("streamquery:error=999@with=NCCL_P2P_DISABLE", {}, False),
)


@pytest.mark.parametrize(("fault", "env", "struck"), CASES)
def test_a_condition_decides_whether_the_fault_strikes(
    double: Double, fault: str, env: dict[str, str], struck: bool
) -> None:
    assert strikes(double, fault, env) == [999 if struck else 0]


@pytest.mark.parametrize(
    ("visit", "expected"), [("#2", [0, 1, 0, 0]), ("#2+", [0, 1, 1, 1]), ("#2-3", [0, 1, 1, 0]), ("", [1, 1, 1, 1])]
)
def test_the_nth_visit_is_counted_from_one(double: Double, visit: str, expected: list[int]) -> None:
    assert strikes(double, f"streamquery:error=1{visit}", {}, visits=4) == expected


def test_a_shared_count_goes_on_in_the_next_process(double: Double, tmp_path: object) -> None:
    env = {"FAKE_CUDA_STATE": str(tmp_path)}
    assert [strikes(double, "streamquery:error=1#2@shared", env) for _ in range(3)] == [[0], [1], [0]]


def test_a_sticky_error_stays_and_a_plain_one_does_not(double: Double) -> None:
    assert strikes(double, "streamquery:cuda700#1", {}, visits=3) == [700, 700, 700]
    assert strikes(double, "streamquery:error=700#1", {}, visits=3) == [700, 0, 0]


EVERY_CALL = [
    *("cudaStreamQuery(None)", "cudaMalloc(p, n)", "cudaMemGetInfo(p, p)", "cudaSetDevice(0)", "cudaEventCreate(p)"),
    *("cudaDeviceSynchronize()", "cudaGetDeviceCount(p)", "cudaLaunchKernel()", "cudaGetLastError()"),
]


def test_in_a_lost_context_every_call_fails_alike(double: Double) -> None:
    env = {"FAKE_FAULT": "streamquery:cuda719"}
    assert calls(double, EVERY_CALL, env) == [719] * len(EVERY_CALL)
    assert calls(double, EVERY_CALL, {}) == [0] * len(EVERY_CALL)


def test_a_child_forked_after_the_first_call_gets_initialization_errors(double: Double) -> None:
    """Also when its parent only counted the devices."""
    fork = "os.fork() and (os.wait(), os._exit(0))"  # the child goes on, the parent waits for it
    made = EVERY_CALL[:-1]
    assert calls(double, made, {}, first=fork) == [3] * len(made)


def test_a_misspelt_fault_ends_the_program_instead_of_passing_silently(double: Double) -> None:
    with pytest.raises(subprocess.CalledProcessError) as ended:
        strikes(double, "streamquery:eror=1", {})
    assert ended.value.returncode == 97 and "unknown action: 'eror'" in ended.value.stderr
