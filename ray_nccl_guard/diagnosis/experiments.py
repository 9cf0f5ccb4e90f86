"""The one next experiment: the command that tells the two likeliest classes apart."""

from __future__ import annotations

from collections.abc import Sequence

from ray_nccl_guard.classes import FailureClass
from ray_nccl_guard.diagnosis.weigh import Weighed
from ray_nccl_guard.evidence import Evidence, Origin

_F = FailureClass
WITHOUT_A_CLUE = "NCCL_DEBUG=INFO ray-nccl-guard probe --locate"
_BY_CLASS = {
    _F.NO_KERNEL_IMAGE: "ray-nccl-guard compat",
    _F.ILLEGAL_MEMORY_ACCESS: "NCCL_DEBUG=INFO ray-nccl-guard probe --locate",
    _F.DRIVER_TOO_OLD: "nvidia-smi --query-gpu=driver_version --format=csv; ray-nccl-guard compat",
    _F.NO_GPU_VISIBLE: "env | grep CUDA_VISIBLE_DEVICES; nvidia-smi -L   (inside the worker's container)",
    _F.DEVICE_BUSY_OR_EXCLUSIVE: "nvidia-smi -q -d COMPUTE,PIDS",
    _F.DUPLICATE_GPU: "ray-nccl-guard probe",
    _F.GPU_OUT_OF_MEMORY: "nvidia-smi --query-compute-apps=pid,used_memory --format=csv",
    _F.HOST_OOM_KILLED: "dmesg -T | grep -i -E 'oom|killed process'; cat /sys/fs/cgroup/memory.events",
    _F.SHM_TOO_SMALL: "df -h /dev/shm; ls /dev/shm",
    _F.STORE_UNREACHABLE: "nc -vz <address and port of the store>   (from the rank that failed)",
    _F.PORT_IN_USE: "ss -ltnp | grep <port>",
    _F.MISSING_RANK: "ray-nccl-guard probe --locate",
    _F.NCCL_BOOTSTRAP_NETWORK: "NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,BOOTSTRAP,NET ray-nccl-guard probe --locate",
    _F.IB_RDMA_ERROR: "NCCL_IB_DISABLE=1 ray-nccl-guard probe",
    _F.P2P_OR_ACS: "NCCL_P2P_DISABLE=1 ray-nccl-guard probe",
    _F.NVLINK_FABRIC_ERROR: "NCCL_NVLS_ENABLE=0 ray-nccl-guard probe; systemctl status nvidia-fabricmanager",
    _F.INIT_TIMEOUT_HANG: "NCCL_P2P_DISABLE=1 ray-nccl-guard probe",
    _F.COLLECTIVE_TIMEOUT_DESYNC: "ray-nccl-guard flight <folder with the ranks' dumps>",
    _F.SHAPE_OR_DTYPE_MISMATCH: "TORCH_DISTRIBUTED_DEBUG=DETAIL <the same job>",
    _F.VERSION_MISMATCH: "ray-nccl-guard probe   (its report lists torch, NCCL and libnccl's path of every rank)",
    _F.REMOTE_PEER_DIED: "ray-nccl-guard classify <the logs of all ranks>",
    _F.WRONG_RESULT_CORRUPTION: "NCCL_P2P_DISABLE=1 ray-nccl-guard probe",
    _F.CUMEM_CONTAINER_CAPS: "NCCL_CUMEM_HOST_ENABLE=0 ray-nccl-guard probe",
    _F.TOPOLOGY_DETECTION: "env -u NCCL_TOPO_FILE NCCL_DEBUG=INFO ray-nccl-guard probe",
    _F.GLOO_NETWORK: "ray-nccl-guard probe --backend gloo",
    _F.UNSUPPORTED_OP_OR_CONFIG: "ray-nccl-guard probe --backend gloo",
    _F.HARDWARE_XID_ECC: "dmesg -T | grep -i xid; nvidia-smi -q -d ECC",
    _F.USER_CODE_NOT_INFRA: "ray-nccl-guard probe   (if it passes on the same workers, the infrastructure is fine)",
    _F.PROCESS_CRASHED: "dmesg -T | tail -50",
}
# Where the two best classes have one experiment that separates them, it comes before either's own.
_BETWEEN = {
    frozenset({_F.INIT_TIMEOUT_HANG, _F.COLLECTIVE_TIMEOUT_DESYNC}):
        "ray-nccl-guard probe   (if it passes on the same workers, look at the program)",
    frozenset({_F.P2P_OR_ACS, _F.COLLECTIVE_TIMEOUT_DESYNC}): "NCCL_P2P_DISABLE=1 ray-nccl-guard probe",
    frozenset({_F.NVLINK_FABRIC_ERROR, _F.CUMEM_CONTAINER_CAPS}): "NCCL_NVLS_ENABLE=0 ray-nccl-guard probe",
    frozenset({_F.CUMEM_CONTAINER_CAPS, _F.P2P_OR_ACS}): "NCCL_CUMEM_HOST_ENABLE=0 ray-nccl-guard probe",
    frozenset({_F.IB_RDMA_ERROR, _F.REMOTE_PEER_DIED}): "NCCL_IB_DISABLE=1 ray-nccl-guard probe",
    frozenset({_F.ILLEGAL_MEMORY_ACCESS, _F.P2P_OR_ACS}): "NCCL_P2P_DISABLE=1 ray-nccl-guard probe",
}  # fmt: skip


def decides(failure: FailureClass) -> str:
    """The command that tells whether it is this class."""
    return _BY_CLASS.get(failure, WITHOUT_A_CLUE)


def next_experiment(evidence: Evidence, cases: Sequence[Weighed]) -> str:
    """One command; a rule's own suggestion wins, as it knows its signature best."""
    rule = cases[0].rule
    if rule is not None and rule.next:
        return rule.next
    if len(cases) > 1:
        between = _BETWEEN.get(frozenset({cases[0].failure, cases[1].failure}))
        if between and cases[1].score > cases[0].score - 0.3:
            return between
    command = decides(cases[0].failure)
    if evidence.origin is not Origin.LOG and command.split("   ")[0] == "ray-nccl-guard probe":
        return WITHOUT_A_CLUE  # the probe has just run
    return command
