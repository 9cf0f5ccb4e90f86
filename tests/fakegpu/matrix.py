"""The table of the matrix: one row a fault, with all that the guard must say of it and do about it."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ray_nccl_guard.probe.spec import ProbeSpec

# Of the installed package: without NVIDIA's libraries torch can only be imported under the double.
TORCH = importlib.metadata.version("torch").split("+")[0]
# torch 2.15's `nccl` is a new backend, and `nccl-legacy` the one that older versions call `nccl`.
NEW = tuple(int(part) for part in TORCH.split(".")[:2]) >= (2, 15)
BACKENDS = ("nccl", "nccl-legacy") if NEW else ("nccl",)

# The double copies on the CPU: two thirds of a probe's time there go to the 32 MiB, which most faults do not ask for.
SMALL = (4, 1 << 20)
WHOLE = {"sizes_bytes": ProbeSpec().sizes_bytes}
# Faults that raise or die end by themselves: these deadlines only have to be out of the way of a busy machine.
PATIENT: dict[str, Any] = {
    "store_s": 20, "device_s": 30, "comm_init_s": 20, "comm_init_per_rank_s": 0, "collective_s": 30, "sizes_bytes": SMALL,
}  # fmt: skip
# A hang costs its deadline on every rung; a healthy step takes 0.1 s alone and was seen to take 3 s under a load of 20.
SHORT = {"device_s": 8, "comm_init_s": 5, "collective_s": 6, "teardown_s": 3}
# torch's older backend needs 4 s, and more on a busy machine, from an error on the stream to the end of the process.
WATCHED = {**SHORT, "collective_s": 15}
GLOO = ("fall_back", "gloo")
PROCEED = ("proceed", "")
REFUSE = ("refuse", None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One fault and what must come of it.

    Attributes:
        fault: FAKE_FAULT; empty for a healthy world.
        failure, culprits, step: of the verdict.
        ends: action and chosen backend; "" stands for the backend that was asked for.
        relief: settings that training then needs.
        detail: what some rank was doing inside the step, in the first attempt.
        note: a note of the report or of a step.
        within_s: the whole pre-flight, with the rungs that follow and the small worlds that locate the fault. Alone on two
            cores the slowest case that raises takes 12 s; the rest is room for a busy machine.
        backend: the only backend that it is played on; empty for all.
        new: what differs on torch 2.15's new backend.
    """

    name: str
    fault: str = ""
    ranks: int = 2
    failure: str = "ok"
    culprits: tuple[int, ...] = ()
    step: str | None = None
    ends: tuple[str, str | None] = GLOO
    relief: Mapping[str, str] = field(default_factory=dict)
    detail: str = ""
    note: str = ""
    within_s: float = 60.0
    backend: str = ""
    env: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    spec: Mapping[str, Any] = field(default_factory=dict)
    devices: Sequence[int | None] | None = None
    asked_gpus: float = 1.0
    policy: str | Mapping[str, Any] = "default"
    touched: str = ""
    new: Mapping[str, Any] = field(default_factory=dict)

    def expected(self, backend: str) -> dict[str, Any]:
        """What the report must say on `backend`."""
        action, chosen = self.ends
        said = {
            "failure": self.failure,
            "culprits": self.culprits,
            "step": self.step,
            "action": action,
            "backend": backend if chosen == "" else chosen,
            "relief": dict(self.relief),
        }
        return {**said, **(self.new if NEW and backend == "nccl" else {})}


def cured(name: str, preset: str, failure: str, setting: str, value: str, **more: Any) -> Case:
    """A fault at init on every rank that one setting sidesteps: training stays on NCCL with it."""
    return Case(
        name=name,
        fault=f"init:preset={preset}@world>=2@without={setting}={value}",
        failure=failure,
        culprits=(0, 1),  # the two work alone and fail together
        step="comm_init",
        ends=("fall_back", ""),
        relief={setting: value},
        **more,
    )


def mig(node: str, gpu: int, instance: int) -> str:
    """The UUID that the double gives a MIG instance (src/node.c)."""
    name = 14695981039346656037  # FNV-1a
    for byte in node.encode():
        name = (name ^ byte) * 1099511628211 % (1 << 64)
    digits = (name.to_bytes(8, "little") + b"fakegpu"[:6] + bytes([instance + 1, gpu])).hex()
    return "MIG-" + "-".join(digits[a:b] for a, b in ((0, 8), (8, 12), (12, 16), (16, 20), (20, 32)))


HEALTHY = (
    Case(spec=WHOLE, name="healthy-2", ends=PROCEED),
    Case(spec=WHOLE, name="healthy-4", ranks=4, ends=PROCEED),
    Case(spec=WHOLE, name="healthy-8", ranks=8, ends=PROCEED),
    Case(name="cuda-touched-before", touched="cuda", ends=PROCEED, within_s=90),
    Case(name="thread-pool-used-before", touched="openmp", ends=PROCEED),
    Case(name="devices-in-another-order", env={"CUDA_VISIBLE_DEVICES": "5,2,7,0"}, ranks=4, ends=PROCEED),
    Case(name="devices-as-mig-slices", options={"mig": 2}, ends=PROCEED),
    Case(name="devices-as-mig-uuids", options={"mig": 2, "node": "m"}, env={"CUDA_VISIBLE_DEVICES": f"{mig('m', 3, 1)},{mig('m', 0, 0)}"}, ends=PROCEED),
    Case(name="two-gpus-swapped", devices=(1, 0), ends=PROCEED),
)  # fmt: skip
ILLEGAL = "illegal_memory_access"
STICKY = (
    # The story this project began with: NCCL works with 1 and 2 workers, from 4 on all_reduce ends in a sticky 700.
    Case(name="story-2-workers", fault="allreduce:cuda700@world>=4", ends=PROCEED),
    Case(name="story-4-workers", fault="allreduce:cuda700@world>=4", ranks=4, failure=ILLEGAL, step="collective"),
    Case(spec=WHOLE, name="from-512-KiB", fault="allreduce:cuda700@bytes>=512K", failure=ILLEGAL, culprits=(0, 1), step="collective", detail="all_reduce 1048576 B"),
    Case(spec=WHOLE, name="from-32-MiB", fault="allreduce:cuda700@bytes>=32M", failure=ILLEGAL, culprits=(0, 1), step="collective", detail="all_reduce 33554432 B"),
    Case(name="illegal-on-one-rank", fault="allreduce:cuda700@rank1", ranks=4, failure=ILLEGAL, culprits=(1,), step="collective"),
    Case(name="illegal-at-init", fault="init:preset=illegal@rank1", failure=ILLEGAL, culprits=(1,), step="comm_init"),
    Case(name="illegal-in-broadcast", fault="broadcast:cuda700@rank0", failure=ILLEGAL, culprits=(0,), step="collective", detail="broadcast"),
    Case(name="launch-failure", fault="allreduce:cuda719@rank1", failure=ILLEGAL, culprits=(1,), step="collective"),
    Case(name="illegal-on-eight", fault="allreduce:cuda700@rank5", ranks=8, failure=ILLEGAL, culprits=(5,), step="collective"),
)  # fmt: skip
RELIEF = (
    cured("p2p", "p2p", "p2p_or_acs", "NCCL_P2P_DISABLE", "1"),
    cured("p2p-ipc", "p2p-ipc", "p2p_or_acs", "NCCL_P2P_DISABLE", "1"),
    cured("nvls", "nvls", "nvlink_fabric_error", "NCCL_NVLS_ENABLE", "0"),
    cured("ib", "ib", "ib_rdma_error", "NCCL_IB_DISABLE", "1"),
    cured("ib-registration", "ib-reg", "ib_rdma_error", "NCCL_IB_DISABLE", "1"),
    cured("ib-completion", "ib-completion", "ib_rdma_error", "NCCL_IB_DISABLE", "1"),
    cured("shm", "shm", "shm_too_small", "NCCL_SHM_DISABLE", "1"),
    cured("cumem-host", "cumem-host", "cumem_container_caps", "NCCL_CUMEM_HOST_ENABLE", "0"),
    Case(name="p2p-not-cured", fault="init:preset=p2p@world>=2", failure="p2p_or_acs", culprits=(0, 1), step="comm_init"),
    Case(name="p2p-setting-is-the-users", fault="init:preset=p2p@world>=2", env={"NCCL_P2P_DISABLE": "0"}, failure="p2p_or_acs", culprits=(0, 1), step="comm_init", note="you have set NCCL_P2P_DISABLE=0"),
    Case(name="bad-link", fault="init:preset=p2p@pair=1-3@without=NCCL_P2P_DISABLE=1", ranks=4, failure="p2p_or_acs", culprits=(1, 3), step="comm_init", ends=("fall_back", ""), relief={"NCCL_P2P_DISABLE": "1"}),
    Case(name="wrong-sum", fault="allreduce:wrong@rank1@without=NCCL_P2P_DISABLE=1", failure="wrong_result_corruption", culprits=(1,), step="collective", ends=("fall_back", ""), relief={"NCCL_P2P_DISABLE": "1"}),
    Case(name="wrong-gather-everywhere", fault="allgather:wrong", ranks=4, failure="wrong_result_corruption", culprits=(0, 1, 2, 3), step="collective", detail="gather"),
)  # fmt: skip
HANGS = (
    Case(spec=SHORT, within_s=120, name="init-hangs-on-one", fault="init:hang@gpu=1", ranks=4, failure="init_timeout_hang", culprits=(1,), step="comm_init"),
    Case(spec=SHORT, within_s=120, name="init-hangs-with-the-gil", fault="init:hang-gil@rank2", ranks=4, failure="init_timeout_hang", culprits=(2,), step="comm_init"),
    Case(spec=SHORT, within_s=120, name="collective-hangs-on-one", fault="allreduce:hang@gpu=1", failure="init_timeout_hang", culprits=(1,), step="collective"),
    Case(spec=SHORT, within_s=120, name="collective-hangs-on-one-of-eight", fault="allreduce:hang@gpu=3", ranks=8, failure="init_timeout_hang", culprits=(3,), step="collective"),
    Case(spec=SHORT, within_s=120, name="device-hangs", fault="setdevice:hang@rank1", failure="init_timeout_hang", culprits=(1,), step="device", ends=REFUSE),
    Case(spec=SHORT, within_s=120, name="init-slow-but-in-time", fault="init:delay=2000@rank1", ends=PROCEED),
    Case(spec={**SHORT, "comm_init_s": 8}, within_s=120, name="init-slow-and-logging", fault="init:delay=11000@rank1@chatty", ends=PROCEED, note="deadline doubled"),
    Case(spec=SHORT, within_s=120, name="farewell-hangs", fault="destroy:hang@rank1", ends=PROCEED),
)  # fmt: skip
DEATHS = (
    Case(name="abort-in-warm-up", fault="allreduce:abort@rank1", failure="process_crashed", culprits=(1,), step="collective", ends=REFUSE),
    Case(name="segv-in-init", fault="init:segv@rank1", ranks=4, failure="process_crashed", culprits=(1,), step="comm_init", ends=REFUSE),
    Case(name="killed", fault="allreduce:kill@rank0", failure="process_crashed", culprits=(0,), step="collective", ends=REFUSE ),
    Case(name="killed-once", fault="allreduce:kill@rank1#1@shared", failure="process_crashed", culprits=(1,), step="collective", ends=PROCEED),
    Case(name="remote-error-on-all-but-the-dead", fault="allreduce:kill@rank2,allreduce:error=6@notrank2", ranks=4, failure="process_crashed", culprits=(2,), step="collective", ends=REFUSE),
    Case(name="remote-error-on-all-but-one", fault="allreduce:error=6@notrank2@world>=4", ranks=4, spec=WATCHED, within_s=120, failure="remote_peer_died", culprits=(2,), step="collective", ends=REFUSE),
    Case(name="crash-at-farewell", fault="destroy:abort@rank1", ends=PROCEED),
)  # fmt: skip
ERRORS = (
    Case(name="system-error-on-rank-1", fault="init:error=2@rank1", ranks=4, failure="unknown", culprits=(1,), step="comm_init"),
    Case(name="system-error-once", fault="init:error=2@rank1#1@shared", failure="unknown", culprits=(1,), step="comm_init", new={"backend": "nccl-legacy"}),
    Case(name="system-error-and-its-echoes", fault="allreduce:error=2@rank1", ranks=4, options={"peer_death": "remote"}, spec=WATCHED, within_s=120, failure="unknown", culprits=(1,), step="collective"),
    Case(name="unique-id-fails", fault="getid:error=3@rank0", failure="unknown", culprits=(0,), step="comm_init"),
    Case(name="error-after-init", fault="initdone:async=2@rank1", failure="unknown", culprits=(1,), step="collective"),
    Case(name="invalid-usage", fault="init:error=5@world>=2", failure="unknown", culprits=(0, 1), step="comm_init"),
    Case(name="oom-in-nccl", fault="init:oom@rank1", failure="gpu_out_of_memory", culprits=(1,), step="comm_init", ends=REFUSE ),
    Case(name="oom-in-cuda", fault="malloc:oom@rank1", failure="gpu_out_of_memory", culprits=(1,), step="device", ends=REFUSE ),
    Case(name="bootstrap-no-interface", fault="init:preset=bootstrap", failure="nccl_bootstrap_network", culprits=(0, 1), step="comm_init"),
    Case(name="bootstrap-connect", fault="init:preset=connect@rank1", failure="nccl_bootstrap_network", step="comm_init", culprits=(1,)),
    Case(name="versions-differ", fault="init:preset=version@rank1", failure="version_mismatch", step="comm_init", culprits=(1,)),
    Case(name="topology", fault="init:preset=topology", failure="topology_detection", culprits=(0, 1), step="comm_init"),
    Case(name="no-kernel-in-nccl", fault="init:preset=kernel", failure="no_kernel_image", culprits=(0, 1), step="comm_init"),
    Case(name="no-image-for-gpu", fault="init:preset=no-image", failure="no_kernel_image", culprits=(0, 1), step="comm_init"),
    Case(name="ecc", fault="init:preset=ecc@rank1", failure="hardware_xid_ecc", culprits=(1,), step="comm_init", ends=REFUSE ),
    Case(name="too-many-files", fault="init:preset=files@rank0", failure="unsupported_op_or_config", culprits=(0,), step="comm_init"),
)  # fmt: skip
DEVICES = (
    Case(name="driver-too-old", options={"driver": 12040}, failure="driver_too_old", step="device", ends=REFUSE),
    Case(name="fabric-not-ready", fault="getdevicecount:error=802", failure="nvlink_fabric_error", step="device", within_s=60, ends=REFUSE),
    Case(name="fabric-not-ready-in-nccl", fault="init:preset=fabric", failure="nvlink_fabric_error", culprits=(0, 1), step="comm_init"),
    Case(name="busy-in-nccl", fault="init:preset=busy@rank1", failure="device_busy_or_exclusive", culprits=(1,), step="comm_init", ends=REFUSE),
    Case(name="no-device", devices=(None, None), env={"CUDA_VISIBLE_DEVICES": ""}, failure="no_gpu_visible", culprits=(0, 1), step="device", ends=REFUSE),
    Case(name="no-device-but-fallback", devices=(None, None), env={"CUDA_VISIBLE_DEVICES": ""}, policy="fallback", failure="no_gpu_visible", culprits=(0, 1), step="device"),
    Case(name="second-mig-slice-not-seen", options={"mig": 2, "mig_seen": 1, "node": "m"}, env={"CUDA_VISIBLE_DEVICES": f"{mig('m', 3, 1)},{mig('m', 0, 0)}"}, failure="no_gpu_visible", culprits=(1,), step="device", ends=REFUSE),
    Case(name="fractional-gpu", devices=(0, 0), asked_gpus=0.5, failure="duplicate_gpu", culprits=(0, 1)),
    Case(name="whole-gpu-twice", devices=(0, 0), failure="duplicate_gpu", culprits=(0, 1), ends=REFUSE),
    Case(name="duplicate-seen-by-nccl", fault="init:preset=dup", failure="duplicate_gpu", culprits=(0, 1), step="comm_init", ends=REFUSE),
)  # fmt: skip
POLICIES = (
    Case(name="strict-refuses", fault="init:preset=p2p@world>=2", policy="strict", failure="p2p_or_acs", culprits=(0, 1), step="comm_init", ends=REFUSE),
    Case(name="budget-ends-the-rung-that-runs", fault="init:hang@rank1", policy={"budget_s": 6}, within_s=20, failure="init_timeout_hang", step="comm_init", ends=REFUSE),
    Case(name="observe-goes-on", fault="init:preset=p2p@world>=2", policy="observe", failure="p2p_or_acs", step="comm_init", ends=PROCEED),
)  # fmt: skip
CASES = (*HEALTHY, *STICKY, *RELIEF, *HANGS, *DEATHS, *ERRORS, *DEVICES, *POLICIES)

# One fault of each kind: what `make test` has time for, on the backend that a job gets by default. The gate plays all of them there.
IN_MAKE_TEST = frozenset(
    {
        "healthy-2",
        "cuda-touched-before",
        "devices-in-another-order",
        "devices-as-mig-uuids",
        "story-4-workers",
        "from-512-KiB",
        "p2p",
        "p2p-setting-is-the-users",
        "bad-link",
        "wrong-sum",
        "init-hangs-with-the-gil",
        "init-slow-and-logging",
        "abort-in-warm-up",
        "killed-once",
        "remote-error-on-all-but-one",
        "system-error-on-rank-1",
        "error-after-init",
        "oom-in-nccl",
        "bootstrap-no-interface",
        "no-kernel-in-nccl",
        "driver-too-old",
        "no-device-but-fallback",
        "fractional-gpu",
        "strict-refuses",
        "budget-ends-the-rung-that-runs",
        "observe-goes-on",
    }
)
assert {case.name for case in CASES} > IN_MAKE_TEST
