"""What NCCL's debug log says of its own start: the seconds of each phase on this rank, from lines that it prints once it is done."""

from __future__ import annotations

import os
import re

# NCCL_DEBUG=INFO prints both unless NCCL_DEBUG_SUBSYS leaves INIT or BOOTSTRAP out; NCCL prints the second
# from 2.22 on (there without `- FUNCTION`), the first from about 2.23 on:
#   Bootstrap timings total 0.041 (create 0.000, send 0.000, recv 0.040, ring 0.000, delay 0.000)
#   Init timings - ncclCommInitRankConfig: rank 0 nranks 2 total 0.64 (kernels 0.11, alloc 0.00, bootstrap 0.02, ...)
_BOOTSTRAP = re.compile(rb"NCCL INFO Bootstrap timings total (\d+\.\d+) \(([^)\n]{0,500})\)")
_INIT = re.compile(rb"NCCL INFO Init timings[^\n]{0,80}?: rank \d+ nranks (\d+) total (\d+\.\d+) \(([^)\n]{0,500})\)")
_PHASE = re.compile(rb"([a-z]+) (\d+\.\d+)")
# The lines stand at the end of the start; a rank of a large world writes some hundred KB before them.
_MOST_BYTES = 16 << 20
_CHUNK_BYTES = 1 << 20

# Between the phases that NCCL times lies the connecting of the bootstrap ring: to the next rank, and from the one before.
CONNECT_RING = "bootstrap.connect"


def read(fd: int, world_size: int) -> dict[str, float]:
    """Seconds by phase of the first communicator of `world_size` ranks; empty if the log does not tell.

    The keys are NCCL's words (`total`, `kernels`, `bootstrap`, ...); a phase of the bootstrap is `bootstrap.send` and so on.
    """
    bootstrap: dict[str, float] = {}
    for line in _told(fd):
        if (one := _BOOTSTRAP.search(line)) and not bootstrap:
            parts = _phases(one[2])
            bootstrap = {f"bootstrap.{name}": seconds for name, seconds in parts.items()}
            bootstrap[CONNECT_RING] = max(0.0, float(one[1]) - sum(parts.values()))
        elif (one := _INIT.search(line)) and int(one[1]) == world_size:
            return {"total": float(one[2]), **_phases(one[3]), **bootstrap}
    return {}


def _phases(text: bytes) -> dict[str, float]:
    return {name.decode(): float(seconds) for name, seconds in _PHASE.findall(text)}


def _told(fd: int) -> list[bytes]:
    """The lines of the log that speak of timings."""
    found, rest, offset = [], b"", 0
    while offset < _MOST_BYTES and (chunk := os.pread(fd, _CHUNK_BYTES, offset)):
        offset += len(chunk)
        *lines, rest = (rest + chunk).split(b"\n")
        found += [line for line in lines if b" timings" in line]
        rest = rest[-_CHUNK_BYTES:]  # a line without an end
    return found
