"""What the kernel says of a death that none of us caused: memory events of the cgroup, and Xid or oom-kill lines of its log."""

from __future__ import annotations

import os
import re
import time

_TELLING = re.compile(r"NVRM: Xid|oom-kill|Out of memory: Killed process|Memory cgroup out of memory")
_READ_AT_MOST = 4000  # records; the kernel's ring buffer holds a few thousand


class Watermark:
    """The state before a child began; `since()` tells what was added. What cannot be read is left out, not taken as nothing."""

    def __init__(self) -> None:
        self._since_us = time.clock_gettime(time.CLOCK_MONOTONIC) * 1e6
        self._events = _memory_events()

    def since(self) -> tuple[str, ...]:
        found = []
        for name, count in _memory_events().items():
            if name in ("oom", "oom_kill") and count > self._events.get(name, count):
                found.append(f"cgroup memory.events: {name} rose from {self._events[name]} to {count}")
        return tuple(found + _kernel_log(self._since_us))


def _memory_events() -> dict[str, int]:
    try:
        with open("/proc/self/cgroup") as file:
            path = next((line.strip().split("::", 1)[1] for line in file if line.startswith("0::")), "/")
        with open(f"/sys/fs/cgroup{path}/memory.events") as file:
            return {name: int(count) for name, count in (line.split() for line in file)}
    except (OSError, ValueError, IndexError):
        return {}


def _kernel_log(since_us: float) -> list[str]:
    """Telling lines of /dev/kmsg since `since_us` (the log's own clock, microseconds since boot)."""
    try:
        fd = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return []
    lines = []
    try:
        for _ in range(_READ_AT_MOST):
            try:
                record = os.read(fd, 8192).decode("utf-8", "replace")
            except BlockingIOError:
                break
            except OSError:
                continue  # EPIPE: records were overwritten while we read
            head, _, text = record.partition(";")
            stamp = head.split(",")[2] if head.count(",") >= 2 else "0"
            # The log's clock and CLOCK_MONOTONIC drift apart by milliseconds; a second of slack loses nothing.
            if stamp.isdigit() and float(stamp) > since_us - 1e6 and _TELLING.search(text):
                lines.append(text.splitlines()[0])
    finally:
        os.close(fd)
    return lines
