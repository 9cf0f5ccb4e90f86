"""The closed list of failure classes, with what is true of a class whatever the run: scope, whether gloo can help, remedy.

Rules are open (anybody may add a signature), classes are closed, so that a policy table stays total. The names, scopes and
remedies come from 222 public failure reports (NVIDIA/nccl, pytorch, ray, vllm and others); docs/classes.md renders this table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum


class Scope(Enum):
    """Where a failure lives: infrastructure of one kind, or the program itself."""

    GPU = "gpu"
    DRIVER = "driver"
    CONTAINER = "container"
    HOST = "host"
    NETWORK = "network"
    NCCL = "nccl"
    PROGRAM = "program"
    UNKNOWN = "unknown"


class FailureClass(Enum):
    """What went wrong, as one noun. `OK` and `UNKNOWN` are answers too."""

    NO_KERNEL_IMAGE = "no_kernel_image"
    ILLEGAL_MEMORY_ACCESS = "illegal_memory_access"
    DRIVER_TOO_OLD = "driver_too_old"
    NO_GPU_VISIBLE = "no_gpu_visible"
    DEVICE_BUSY_OR_EXCLUSIVE = "device_busy_or_exclusive"
    DUPLICATE_GPU = "duplicate_gpu"
    GPU_OUT_OF_MEMORY = "gpu_out_of_memory"
    HOST_OOM_KILLED = "host_oom_killed"
    SHM_TOO_SMALL = "shm_too_small"
    STORE_UNREACHABLE = "store_unreachable"
    PORT_IN_USE = "port_in_use"
    MISSING_RANK = "missing_rank"
    NCCL_BOOTSTRAP_NETWORK = "nccl_bootstrap_network"
    IB_RDMA_ERROR = "ib_rdma_error"
    P2P_OR_ACS = "p2p_or_acs"
    NVLINK_FABRIC_ERROR = "nvlink_fabric_error"
    INIT_TIMEOUT_HANG = "init_timeout_hang"
    COLLECTIVE_TIMEOUT_DESYNC = "collective_timeout_desync"
    SHAPE_OR_DTYPE_MISMATCH = "shape_or_dtype_mismatch"
    VERSION_MISMATCH = "version_mismatch"
    REMOTE_PEER_DIED = "remote_peer_died"
    WRONG_RESULT_CORRUPTION = "wrong_result_corruption"
    CUMEM_CONTAINER_CAPS = "cumem_container_caps"
    TOPOLOGY_DETECTION = "topology_detection"
    GLOO_NETWORK = "gloo_network"
    UNSUPPORTED_OP_OR_CONFIG = "unsupported_op_or_config"
    HARDWARE_XID_ECC = "hardware_xid_ecc"
    USER_CODE_NOT_INFRA = "user_code_not_infra"
    PROCESS_CRASHED = "process_crashed"
    UNKNOWN = "unknown"
    OK = "ok"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassFacts:
    """What is true of a failure class whatever the run.

    Attributes:
        scope: where the fault lives.
        gloo_can_help: True if gloo avoids the fault, False if gloo meets it too, None if it depends on the case.
        gloo_why: the reason for `gloo_can_help`, half a sentence.
        summary: what the class means, one clause that fits after "because".
        remedy: the first thing to do, one line.
    """

    scope: Scope
    gloo_can_help: bool | None
    gloo_why: str
    summary: str
    remedy: str


def _c(scope: Scope, gloo: bool | None, gloo_why: str, summary: str, remedy: str) -> ClassFacts:
    return ClassFacts(scope=scope, gloo_can_help=gloo, gloo_why=gloo_why, summary=summary, remedy=remedy)


_F, _S = FailureClass, Scope

CLASSES: Mapping[FailureClass, ClassFacts] = {
    _F.NO_KERNEL_IMAGE: _c(
        _S.NCCL, None, "only if torch itself has code for this GPU and NCCL alone lacks it",
        "the loaded NCCL (or torch) has no code for this GPU",
        "install a libnccl whose images cover the GPU (ray-nccl-guard compat names the first wheel that does)"),
    _F.ILLEGAL_MEMORY_ACCESS: _c(
        _S.NCCL, True, "gloo runs none of NCCL's kernels",
        "a GPU kernel touched memory outside its allocations (CUDA 700), met in or first by NCCL",
        "swap the NCCL version; if the fault stays, run the job's own kernels under compute-sanitizer"),
    _F.DRIVER_TOO_OLD: _c(
        _S.DRIVER, False, "without a working driver there is no CUDA for gloo's tensors either",
        "the NVIDIA driver is older than the CUDA runtime that torch or NCCL was built with",
        "upgrade the driver, or install the torch build for the driver's CUDA version"),
    _F.NO_GPU_VISIBLE: _c(
        _S.CONTAINER, False, "gloo could train on the CPU only",
        "a rank sees no GPU, or fewer than the ranks need",
        "check use_gpu/num_gpus, CUDA_VISIBLE_DEVICES and the container runtime inside the worker"),
    _F.DEVICE_BUSY_OR_EXCLUSIVE: _c(
        _S.GPU, False, "gloo needs the same GPU",
        "the GPU is held by another process or set to exclusive mode",
        "look for stray processes and the compute mode: nvidia-smi -q -d COMPUTE,PIDS"),
    _F.DUPLICATE_GPU: _c(
        _S.PROGRAM, None, "gloo lets two ranks share a card, which helps only if sharing was intended",
        "two ranks were given one physical GPU",
        "give each rank a whole GPU (GPU: 1 in resources_per_worker, device_id = local device)"),
    _F.GPU_OUT_OF_MEMORY: _c(
        _S.GPU, None, "gloo needs no device buffers of its own, but the margin stays thin",
        "NCCL could not get device memory",
        "free memory on the named GPU before the communicator is made; look for other processes on it"),
    _F.HOST_OOM_KILLED: _c(
        _S.HOST, False, "gloo needs more host memory, not less",
        "the kernel or Ray killed a rank for host memory",
        "read dmesg and memory.events on that node; raise the memory limit or lower the number of workers"),
    _F.SHM_TOO_SMALL: _c(
        _S.CONTAINER, True, "gloo does not use /dev/shm",
        "/dev/shm is too small for NCCL's buffers",
        "raise it (docker --shm-size=8g, Kubernetes emptyDir medium Memory at /dev/shm) and remove stale /dev/shm/nccl-*"),
    _F.STORE_UNREACHABLE: _c(
        _S.NETWORK, False, "gloo meets through the same store",
        "ranks cannot reach the rendezvous store",
        "open TCP between the named hosts and check the address that rank 0 advertises"),
    _F.PORT_IN_USE: _c(
        _S.HOST, False, "gloo needs the same port",
        "the store's port is already taken",
        "free the port, or let Ray choose one"),
    _F.MISSING_RANK: _c(
        _S.UNKNOWN, False, "a backend cannot replace a rank that is not there",
        "a rank never arrived",
        "read the log of the absent rank: it is the one that failed first"),
    _F.NCCL_BOOTSTRAP_NETWORK: _c(
        _S.NETWORK, None, "only if gloo binds an interface whose ports are open",
        "NCCL's own TCP bootstrap is misrouted or blocked",
        "set NCCL_SOCKET_IFNAME to the interface that connects the nodes, and open TCP between them"),
    _F.IB_RDMA_ERROR: _c(
        _S.NETWORK, True, "gloo uses TCP",
        "InfiniBand, RoCE or EFA failed under NCCL",
        "prove it with NCCL_IB_DISABLE=1, then check GID index, memlock, MTU and the fabric"),
    _F.P2P_OR_ACS: _c(
        _S.HOST, True, "gloo copies through host memory",
        "direct copies between GPUs fail or hang (PCIe ACS, IOMMU, driver)",
        "prove it with NCCL_P2P_DISABLE=1, then turn off ACS or set iommu=pt"),
    _F.NVLINK_FABRIC_ERROR: _c(
        _S.GPU, None, "gloo avoids NVLink SHARP faults, but not a fabric that keeps CUDA from starting",
        "NVLink, NVSwitch or the fabric manager is not working",
        "restart the fabric manager and reset the GPUs; NCCL_NVLS_ENABLE=0 proves an NVLS fault"),
    _F.INIT_TIMEOUT_HANG: _c(
        _S.NCCL, None, "gloo takes another path, which helps unless the silent rank is dead",
        "the communicator or its first collective hung, and nothing says why",
        "run ray-nccl-guard probe --locate, and once more with NCCL_P2P_DISABLE=1"),
    _F.COLLECTIVE_TIMEOUT_DESYNC: _c(
        _S.PROGRAM, False, "ranks that ask for different things disagree on any backend",
        "a collective timed out because ranks diverged or one stalled",
        "compare what each rank asked for: ray-nccl-guard flight"),
    _F.SHAPE_OR_DTYPE_MISMATCH: _c(
        _S.PROGRAM, False, "the mismatch is in what the ranks ask for",
        "ranks disagree in the size, type or order of a collective",
        "compare shapes and call order per rank (TORCH_DISTRIBUTED_DEBUG=DETAIL)"),
    _F.VERSION_MISMATCH: _c(
        _S.CONTAINER, None, "if torch imports, gloo does not use the differing NCCL",
        "torch or NCCL differs between ranks, or the wrong libnccl is loaded",
        "print the library path and version on every rank, and use one image"),
    _F.REMOTE_PEER_DIED: _c(
        _S.UNKNOWN, False, "the peer is gone on any backend",
        "this rank reports the death of another",
        "find the rank that failed first or says nothing, and read its log"),
    _F.WRONG_RESULT_CORRUPTION: _c(
        _S.HOST, True, "gloo does not use the corrupting path",
        "a collective returned wrong numbers without an error",
        "do not train on this path: NCCL_P2P_DISABLE=1 to prove it, then IOMMU settings and the NCCL version"),
    _F.CUMEM_CONTAINER_CAPS: _c(
        _S.CONTAINER, True, "gloo needs no cuMem",
        "CUDA memory sharing (cuMem) is not permitted or not supported in this container",
        "NCCL_CUMEM_HOST_ENABLE=0 (then NCCL_CUMEM_ENABLE=0), or expose the capability devices and IPC_LOCK"),
    _F.TOPOLOGY_DETECTION: _c(
        _S.HOST, True, "gloo needs no topology",
        "NCCL cannot read the machine's topology",
        "check that /sys is mounted and NCCL_TOPO_FILE is right; try a newer NCCL"),
    _F.GLOO_NETWORK: _c(
        _S.NETWORK, False, "it is gloo that failed",
        "gloo's mesh of connections cannot form",
        "set GLOO_SOCKET_IFNAME to one real interface on every node and open TCP between them"),
    _F.UNSUPPORTED_OP_OR_CONFIG: _c(
        _S.PROGRAM, None, "if the other backend has the operation",
        "this build, platform or option cannot do what was asked",
        "use a build with NCCL, another backend, or raise the limit named in the evidence"),
    _F.HARDWARE_XID_ECC: _c(
        _S.GPU, False, "a faulty GPU trains nothing",
        "the GPU or its link reports a hardware fault (Xid, ECC)",
        "drain the node and read dmesg; do not retry there"),
    _F.USER_CODE_NOT_INFRA: _c(
        _S.PROGRAM, False, "the program is the same on any backend",
        "the program, not the infrastructure, made the collective fail",
        "compare the stack and call order of every rank"),
    _F.PROCESS_CRASHED: _c(
        _S.UNKNOWN, None, "if what crashed is NCCL's own code",
        "a process died by a signal and left no reason",
        "read the last step and the kernel log of that node"),
    _F.UNKNOWN: _c(
        _S.UNKNOWN, None, "not known, so gloo has to prove itself",
        "the evidence names no known failure",
        "run ray-nccl-guard probe --locate and keep the report"),
    _F.OK: _c(_S.UNKNOWN, None, "nothing failed", "nothing failed", "nothing to do"),
}  # fmt: skip
