"""Prints as JSON what nvidia-ml-py reads of GPU 0. Needs neither torch nor the double."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pynvml as n


def asked(question: Callable[[], Any]) -> Any:
    """The answer, or the name of the NVML error in its place."""
    try:
        return question()
    except n.NVMLError as error:
        return type(error).__name__


def read() -> dict[str, Any]:
    if (failed := asked(n.nvmlInit)) is not None:
        return {"init": failed}
    gpu = n.nvmlDeviceGetHandleByIndex(0)
    other = n.nvmlDeviceGetHandleByIndex(n.nvmlDeviceGetCount() - 1)
    return {
        "count": n.nvmlDeviceGetCount(),
        "driver": n.nvmlSystemGetDriverVersion(),
        "cuda": n.nvmlSystemGetCudaDriverVersion_v2(),
        "name": n.nvmlDeviceGetName(gpu),
        "uuid": n.nvmlDeviceGetUUID(gpu),
        "pci": n.nvmlDeviceGetPciInfo(gpu).busId,
        "capability": n.nvmlDeviceGetCudaComputeCapability(gpu),
        "compute_mode": n.nvmlDeviceGetComputeMode(gpu),
        "mig": n.nvmlDeviceGetMigMode(gpu),
        "memory": n.nvmlDeviceGetMemoryInfo(gpu).total,
        "used": n.nvmlDeviceGetMemoryInfo(gpu).used,
        "processes": [[p.pid, p.usedGpuMemory] for p in n.nvmlDeviceGetComputeRunningProcesses(gpu)],
        "topology": n.nvmlDeviceGetTopologyCommonAncestor(gpu, other),
        "p2p": n.nvmlDeviceGetP2PStatus(gpu, other, 0),  # 0: read; pynvml 13.615 spells its name as a tuple
        "nvlink": asked(lambda: n.nvmlDeviceGetNvLinkState(gpu, 0)),
        "fabric": asked(lambda: fabric_state(gpu)),
        "ecc": n.nvmlDeviceGetTotalEccErrors(gpu, n.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, n.NVML_VOLATILE_ECC),
        "remapped": n.nvmlDeviceGetRemappedRows(gpu),
        "retired_pages": asked(lambda: n.nvmlDeviceGetRetiredPages(gpu, 0)),
    }


def fabric_state(gpu: Any) -> int:
    information = n.c_nvmlGpuFabricInfoV_t()
    n.nvmlDeviceGetGpuFabricInfoV(gpu, n.byref(information))
    return int(information.state)


if __name__ == "__main__":
    print(json.dumps(read()))
