"""Which GPUs and which driver are here: NVML is asked in a child with a deadline, as it may hang; CUDA stays untouched."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ray_nccl_guard.compat.arch import Capability
from ray_nccl_guard.compat.driver import CudaVersion

# With persistence mode off the first nvmlInit loads the driver's state, which takes seconds; past this it hangs.
DEADLINE_S = 20.0
_CHILD = "from ray_nccl_guard.compat.nvml import main; main()"
_REAP_S = 2.0  # SIGKILL does not end a process inside the kernel driver: after this it is left behind, and said
_DRIVER_FILE = "/proc/driver/nvidia/version"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU as NVML lists it. `mig_uuids` are the MIG devices on it, empty without MIG."""

    index: int
    uuid: str
    name: str
    capability: Capability
    mig_uuids: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class GpusHere:
    """What NVML said.

    Attributes:
        gpus: every GPU that NVML lists, empty if it was not run.
        driver: kernel driver version. driver_cuda: CUDA version that libcuda reports. None: not known.
        not_run: why there is no answer, empty if there is one. "Not run" is never "no GPU".
    """

    gpus: tuple[Gpu, ...] = ()
    driver: str | None = None
    driver_cuda: CudaVersion | None = None
    not_run: str = ""


def gpus_here(deadline_s: float = DEADLINE_S) -> GpusHere:
    """Ask NVML. A missing library, a hang and an unreadable answer each give a `not_run` that says so; nothing raises."""
    # The child must find this package and pynvml as we do, also where a runtime and not the environment set sys.path.
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.curdir for path in sys.path)}
    command = [sys.executable, "-c", _CHILD]
    with subprocess.Popen(
        command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    ) as child:
        try:
            out, err = child.communicate(timeout=deadline_s)
        except subprocess.TimeoutExpired:
            return GpusHere(not_run=f"NVML did not answer within {deadline_s:g} s{_end(child)}")
        except BaseException:  # also Ctrl-C: the child is in its own session and would outlive us
            _end(child)
            raise
    try:
        answer = json.loads(out)
    except ValueError:
        last = err.decode(errors="replace").strip().splitlines()[-1:] or ["nothing"]
        return GpusHere(not_run=f"the process that asks NVML ended with status {child.returncode}; it said: {last[0]}")
    return _parsed(answer)


def _end(child: subprocess.Popen[bytes]) -> str:
    """Kill the child's session and reap it; what to add to the message where it cannot be ended."""
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    try:
        child.communicate(timeout=_REAP_S)
    except subprocess.TimeoutExpired:
        child.returncode = -signal.SIGKILL  # keeps Popen's own exit from waiting for ever on a process nothing can end
        return f"; its process {child.pid} hangs inside the driver and could not be ended"
    return ""


def _parsed(answer: Mapping[str, Any]) -> GpusHere:
    if "error" in answer:
        return GpusHere(not_run=str(answer["error"]))
    cuda = answer["driver_cuda"]
    return GpusHere(
        gpus=tuple(
            Gpu(
                index=gpu["index"],
                uuid=gpu["uuid"],
                name=gpu["name"],
                capability=(gpu["capability"][0], gpu["capability"][1]),
                mig_uuids=tuple(gpu["mig_uuids"]),
            )
            for gpu in answer["gpus"]
        ),
        driver=answer["driver"],
        driver_cuda=(cuda[0], cuda[1]) if cuda else None,
    )


def visible(gpus: tuple[Gpu, ...], env: Mapping[str, str]) -> tuple[Gpu, ...]:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves, all of them if it is unset or cannot be mapped for certain."""
    return tuple(dict.fromkeys(gpu for gpu, _ in numbered(gpus, env)))


def numbered(gpus: tuple[Gpu, ...], env: Mapping[str, str]) -> tuple[tuple[Gpu, str], ...]:
    """The devices of a process as CUDA numbers them, each as its GPU and its own UUID: a MIG device's where that is named.

    Indices are CUDA's, by default fastest first, and NVML's are by PCI bus: they are trusted only where the order is
    CUDA_DEVICE_ORDER=PCI_BUS_ID or all GPUs have one capability. The list ends at its first invalid entry, as CUDA reads it.
    """
    text = env.get("CUDA_VISIBLE_DEVICES")
    whole = tuple((gpu, gpu.uuid) for gpu in gpus)
    if text is None:
        return whole
    by_index = env.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID" or len({gpu.capability for gpu in gpus}) <= 1
    left: list[tuple[Gpu, str]] = []
    for entry in (part.strip() for part in text.split(",")):
        if entry.isdigit():
            if not by_index:
                return whole
            match = [gpu for gpu in gpus if gpu.index == int(entry)]
        else:
            match = [gpu for gpu in gpus if entry and _named(gpu, entry)]
        if len(match) != 1:
            break
        mig = [uuid for uuid in match[0].mig_uuids if uuid.startswith(entry)]
        left.append((match[0], mig[0] if len(mig) == 1 else match[0].uuid))
    return tuple(left)


def _named(gpu: Gpu, entry: str) -> bool:
    return gpu.uuid.startswith(entry) or any(uuid.startswith(entry) for uuid in gpu.mig_uuids) or gpu.uuid in entry


def kernel_driver() -> str | None:
    """The version of the loaded kernel driver, from /proc alone; None without one."""
    try:
        with open(_DRIVER_FILE, encoding="ascii", errors="replace") as file:
            words = file.readline(4096).split()
    except OSError:
        return None
    return next((word for word in words if word[:1].isdigit() and "." in word), None)
