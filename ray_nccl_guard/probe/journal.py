"""The journal: what a child has done so far, readable after its death by any signal; with it a pulse that stops when Python stops."""

from __future__ import annotations

import json
import os
import tempfile
import threading
import time
from dataclasses import dataclass
from typing import Any

# The pulse is written this often. Ten missed beats are two seconds: longer than any healthy pause of a tiny child on a busy machine.
PULSE_S = 0.2


def anonymous_file(name: str) -> int:
    """A file descriptor of a file without a name: nothing is left behind whoever dies, and a full disk does not matter."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name)
    with tempfile.TemporaryFile() as file:  # not Linux: a disk file that is already unlinked
        return os.dup(file.fileno())


@dataclass(frozen=True, slots=True)
class Event:
    """One line of the journal. `at_s` is CLOCK_MONOTONIC, which all processes of one host share."""

    at_s: float
    step: str
    event: str
    detail: str = ""
    data: dict[str, Any] | None = None


class Journal:
    """Append-only record on a descriptor. One `write` per event and no buffer: after SIGKILL the last line still stands."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def write(self, step: str, event: str, detail: str = "", **data: Any) -> None:
        line = json.dumps([time.monotonic(), step, event, detail, data or None])
        os.write(self.fd, line.encode() + b"\n")


class JournalReader:
    """The launcher's side: reads what was appended since the last look."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._offset = 0
        self._rest = b""

    def new_events(self) -> list[Event]:
        chunk = os.pread(self.fd, 1 << 20, self._offset)
        self._offset += len(chunk)
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        return [event for event in map(_parse, lines) if event is not None]


def _parse(line: bytes) -> Event | None:
    # A torn or foreign line (a signal between two bytes, a library that writes to a closed descriptor's number) is not ours.
    try:
        at_s, step, event, detail, data = json.loads(line)
        return Event(float(at_s), str(step), str(event), str(detail), data)
    except (ValueError, TypeError):
        return None


def start_pulse(fd: int) -> threading.Thread:
    """Beat on `fd` from a Python thread: the beat stops when the process is stopped or something keeps the GIL."""

    def beat() -> None:
        while True:
            os.pwrite(fd, b"%020.6f" % time.monotonic(), 0)
            time.sleep(PULSE_S)

    thread = threading.Thread(target=beat, name="nccl-guard-pulse", daemon=True)
    thread.start()
    return thread


# Where in the pulse file the launcher says "go"; the beat takes the first 20 bytes.
_GO_AT = 64


def say_go(fd: int) -> None:
    """Let the child connect: every rank has forked its own by now."""
    os.pwrite(fd, b"1", _GO_AT)


def wait_for_go(fd: int) -> None:
    """Wait for `say_go`. The launcher's deadlines bound it."""
    while not os.pread(fd, 1, _GO_AT):
        time.sleep(0.002)


def silent_s(fd: int, now_s: float) -> float:
    """Seconds since the last beat; 0 if there never was one (the child had not got that far)."""
    beat = os.pread(fd, 20, 0)
    return max(0.0, now_s - float(beat) - PULSE_S) if beat else 0.0
