"""Builds dumps in torch's schema 2.10 for what no machine without GPUs can record: NCCL states, meshes, transfers."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ray_nccl_guard import flight

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
        "frames": [{"name": "step", "filename": "/app/train.py", "line": line}],
        "pg_id": 0,
        "process_group": group,
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
    return pickle.dumps(value, protocol=2)


def diagnose(*files: bytes | None, **options: Any) -> flight.FlightVerdict:
    """The verdict over the files of ranks 0, 1, ...; None where a rank left none."""
    named = {f"fr_rank_{rank}": data for rank, data in enumerate(files) if data is not None}
    return flight.diagnose(flight.load(named, **{"world_size": len(files), **options}))
