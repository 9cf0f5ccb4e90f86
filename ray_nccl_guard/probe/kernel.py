"""What the kernel says of a death that none of us caused: memory events of the cgroup, and Xid or oom-kill lines of its log."""

from __future__ import annotations

import os
import re

_TELLING = re.compile(r"NVRM: Xid|oom-kill|Out of memory: Killed process|Memory cgroup out of memory")
_READ_AT_MOST = 4000  # records; the kernel's ring buffer holds a few thousand


class Watermark:
    """The state before a child began; `since()` tells what was added. What cannot be read is left out, not taken as nothing.

    The place in the kernel's log is kept as an open descriptor at its end: the log's clock and CLOCK_MONOTONIC were seen
    to differ by seconds in a virtual machine. `close` it.
    """

    def __init__(self) -> None:
        self._events = _memory_events()
        try:
            self._log = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
            os.lseek(self._log, 0, os.SEEK_END)
        except OSError:
            self._log = -1

    def since(self) -> tuple[str, ...]:
        found = []
        for name, count in _memory_events().items():
            if name in ("oom", "oom_kill") and count > self._events.get(name, count):
                found.append(f"cgroup memory.events: {name} rose from {self._events[name]} to {count}")
        return tuple(found + _kernel_log(self._log))

    def close(self) -> None:
        if self._log >= 0:
            os.close(self._log)


def _memory_events() -> dict[str, int]:
    try:
        with open("/proc/self/cgroup") as file:
            path = next((line.strip().split("::", 1)[1] for line in file if line.startswith("0::")), "/")
        with open(f"/sys/fs/cgroup{path}/memory.events") as file:
            return {name: int(count) for name, count in (line.split() for line in file)}
    except (OSError, ValueError, IndexError):
        return {}


def _kernel_log(fd: int) -> list[str]:
    """The telling lines of /dev/kmsg that have not been read from `fd` yet; -1 is a log that cannot be read."""
    lines: list[str] = []
    if fd < 0:
        return lines
    for _ in range(_READ_AT_MOST):
        try:
            record = os.read(fd, 8192).decode("utf-8", "replace")
        except BlockingIOError:
            break
        except OSError:
            continue  # EPIPE: records were overwritten while we read
        _, _, text = record.partition(";")
        if _TELLING.search(text):
            lines.append(text.splitlines()[0])
    return lines
