"""Waits until a dead child's GPU memory is back, so that the next rung does not fail for the last one's sake."""

from __future__ import annotations

import os
import signal
import time

# The driver frees a dead process's memory within this time or does not at all (DESIGN issue "main job": at most 5 s).
BACK_S = 5.0
# Other processes on the card may allocate a little meanwhile; a child's CUDA context alone takes hundreds of MB.
_SLACK_BYTES = 64 << 20


def wait_until_back(uuid: str, free_before_bytes: int, within_s: float = BACK_S) -> bool | None:
    """Whether the GPU has `free_before_bytes` free again within `within_s`; None where NVML cannot tell.

    NVML is asked in a fork that may hang without harm; CUDA is not touched.
    """
    pid = os.fork()
    if pid == 0:
        os._exit(_ask(uuid, free_before_bytes - _SLACK_BYTES, within_s))
    end_s = time.monotonic() + within_s + 0.5
    while time.monotonic() < end_s:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return {0: True, 1: False}.get(os.waitstatus_to_exitcode(status))
        time.sleep(0.005)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


def _ask(uuid: str, wanted_bytes: int, within_s: float) -> int:
    try:
        import pynvml

        pynvml.nvmlInit()
        device = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        end_s = time.monotonic() + within_s
        while True:
            if pynvml.nvmlDeviceGetMemoryInfo(device).free >= wanted_bytes:
                return 0
            if time.monotonic() > end_s:
                return 1
            time.sleep(0.05)
    except BaseException:  # the outermost frame of a fork: no NVML, no such GPU, not supported all mean "cannot tell"
        return 2
