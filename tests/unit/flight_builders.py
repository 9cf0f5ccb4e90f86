"""Builds dumps in torch's schema 2.10 for what no machine without GPUs can record: NCCL states, meshes, transfers."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ray_nccl_guard import flight

_FRAMES: dict[int, dict[str, Any]] = {}  # one object a line, as the recorder keeps them
DATA = Path(__file__).parent / "data" / "flight"


def record(
    op: str,
    seq: int,
    state: str = "completed",
    group: tuple[str, str] = ("0", "default_pg"),
    size: Sequence[int] | None = (16,),
    backend: str = "nccl",
    dtype: str = "Float",
    line: int = 1,
    p2p: bool = False,
    out: Sequence[int] | None = None,
) -> dict[str, Any]:
    """One record of a call; `line` is where the program made it."""
    sizes = [] if size is None else [list(size)]
    return {
        "frames": [_FRAMES.setdefault(line, {"name": "step", "filename": "/app/train.py", "line": line})],
        "record_id": 0,
        "pg_id": 0,
        "process_group": group,
        "thread_name": "python",
        "thread_id": "140293049846656",
        "collective_seq_id": seq,
        "p2p_seq_id": seq if p2p else 0,
        "op_id": seq,
        "profiling_name": f"{backend}:{op}",
        "time_created_ns": 1_795_000_000_000_000_000 + seq,
        "input_sizes": sizes,
        "input_dtypes": [dtype] if sizes else [],
        "output_sizes": sizes if out is None else [list(out)],
        "output_dtypes": [dtype] if sizes else [],
        "state": "scheduled" if backend == "gloo" else state,  # as gloo's recorder writes for ever
        "time_discovered_started_ns": None,
        "time_discovered_completed_ns": None,
        "retired": state == "completed" or backend == "gloo",
        "timeout_ms": 600_000,
        "is_p2p": p2p,
    }


def dump(
    records: Sequence[dict[str, Any]], groups: dict[tuple[str, str], Sequence[int]] | None = None, first: int = 0, **top: Any
) -> bytes:
    """The file of one rank. `first` is the number of its first record: above 0, the ring has overwritten some."""
    groups = {("0", "default_pg"): (0, 1, 2, 3)} if groups is None else groups
    value = {
        "version": "2.10",
        "pg_config": {name: {"name": name, "desc": desc, "ranks": str(list(r))} for (name, desc), r in groups.items()},
        "comm_lib_version": "2.27.3",
        "pg_status": {},
        "entries": [{**entry, "record_id": first + index} for index, entry in enumerate(records)],
        **top,
    }
    return as_torch_writes(value)


def as_torch_writes(value: Any) -> bytes:
    """The bytes of torch's own C++ pickler: strings and frames are stored once and recalled, nothing else is.

    Equal to the bit for a dump that torch 2.15 wrote (test_flight_reader).
    """
    out = bytearray(b"\x80\x02")
    stored: dict[Any, int] = {}
    _write(out, stored, value, is_frame=False)
    return bytes(out + _numbered(b"qr", len(stored)) + b".")


def _write(out: bytearray, stored: dict[Any, int], value: Any, *, is_frame: bool) -> None:
    key = value if isinstance(value, str) else id(value) if is_frame else None
    if key is not None and key in stored:
        out += _numbered(b"hj", stored[key])
        return
    if isinstance(value, str):
        out += b"X" + struct.pack("<I", len(value.encode())) + value.encode()
    elif isinstance(value, dict):
        out += b"}("
        for name, item in value.items():
            _write(out, stored, name, is_frame=False)
            if name == "frames":
                out += b"]("
                for frame in item:
                    _write(out, stored, frame, is_frame=True)
                out += b"e"
            else:
                _write(out, stored, item, is_frame=False)
        out += b"u"
    elif isinstance(value, list):
        out += b"]("
        for item in value:
            _write(out, stored, item, is_frame=False)
        out += b"e"
    elif isinstance(value, tuple):
        for item in value:
            _write(out, stored, item, is_frame=False)
        out += b"\x86"
    elif value is None or isinstance(value, bool):
        out += {None: b"N", True: b"\x88", False: b"\x89"}[value]
    elif 0 <= value < 1 << 16:
        out += b"K" + bytes([value]) if value < 256 else b"M" + struct.pack("<H", value)
    else:
        out += b"J" + struct.pack("<i", value) if -(1 << 31) <= value < 1 << 31 else b"\x8a\x08" + struct.pack("<q", value)
    if key is not None:
        stored[key] = len(stored)
        out += _numbered(b"qr", stored[key])


def _numbered(opcodes: bytes, index: int) -> bytes:
    return bytes([opcodes[0], index]) if index < 256 else bytes([opcodes[1]]) + struct.pack("<I", index)


def diagnose(*files: bytes | None, **options: Any) -> flight.FlightVerdict:
    """The verdict over the files of ranks 0, 1, ...; None where a rank left none."""
    named = {f"fr_rank_{rank}": data for rank, data in enumerate(files) if data is not None}
    return flight.diagnose(flight.load(named, **{"world_size": len(files), **options}))
