"""The child that asks the driver: which GPUs, which driver. No CUDA context is made; it may hang, so it is always a child.

Runs as `python -c "from ray_nccl_guard.compat.nvml import main; main()"` and prints one JSON object; `gpus` starts it.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Any


def main() -> None:
    """Print `{"driver": str, "driver_cuda": [major, minor]|null, "gpus": [...]}`, or `{"error": str}`."""
    json.dump(_ask(), sys.stdout)


def _ask() -> dict[str, Any]:
    try:
        import pynvml
    except ImportError:
        return {"error": "the package nvidia-ml-py is not installed"}
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return {"error": f"NVML: {error}"}
    try:
        driver, cuda = _text(pynvml.nvmlSystemGetDriverVersion()), _libcuda_version()
        if cuda is None:
            cuda = _maybe(pynvml, pynvml.nvmlSystemGetCudaDriverVersion_v2)
        count = pynvml.nvmlDeviceGetCount()
        gpus = [_gpu(pynvml, index) for index in range(count)]
        return {"driver": driver, "driver_cuda": [cuda // 1000, cuda % 1000 // 10] if cuda else None, "gpus": gpus}
    except pynvml.NVMLError as error:
        return {"error": f"NVML: {error}"}
    finally:
        pynvml.nvmlShutdown()


def _gpu(pynvml: Any, index: int) -> dict[str, Any]:
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    return {
        "index": index,
        "uuid": _text(pynvml.nvmlDeviceGetUUID(handle)),
        "name": _text(pynvml.nvmlDeviceGetName(handle)),
        "capability": list(pynvml.nvmlDeviceGetCudaComputeCapability(handle)),
        "mig_uuids": _mig(pynvml, handle),
    }


def _mig(pynvml: Any, handle: Any) -> list[str]:
    mode = _maybe(pynvml, lambda: pynvml.nvmlDeviceGetMigMode(handle))
    if not mode or not mode[0]:
        return []
    found = []
    for i in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        uuid = _maybe(pynvml, partial(_mig_uuid, pynvml, handle, i))
        if uuid:
            found.append(_text(uuid))
    return found


def _mig_uuid(pynvml: Any, handle: Any, index: int) -> Any:
    return pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index))


def _maybe(pynvml: Any, call: Callable[[], Any]) -> Any:
    """The answer, None where this GPU or driver has none (GeForce, Tegra, old drivers): unknown is not a failure."""
    try:
        return call()
    except pynvml.NVMLError:
        return None


def _libcuda_version() -> int | None:
    """What `cuDriverGetVersion` of the libcuda that this process finds reports (13020 is 13.2); None if there is no libcuda.

    It comes before NVML's answer: with the forward-compatibility package libcuda is newer than the kernel driver. The call
    needs no cuInit and makes no context.
    """
    try:
        version = ctypes.c_int()
        status = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return None
    return version.value if status == 0 and version.value else None


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
