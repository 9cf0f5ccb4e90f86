"""The record an init container leaves for the main container: which GPUs it judged, and what came out."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from ray_nccl_guard.compat.errors import CompatError
from ray_nccl_guard.errors import UsageError

# Where the guard looks for the record of this container's GPUs.
ENVIRONMENT = "RAY_NCCL_GUARD_COMPAT_RECORD"
SCHEMA_VERSION = 1
_MAX_BYTES = 4 << 20  # a record of 16 GPUs is about 10 kB


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What was judged. `gpu_uuids` holds GPUs and MIG devices; `exit` is the exit code of that `compat`."""

    gpu_uuids: tuple[str, ...]
    libnccl: str
    nccl_version: str
    fingerprint: str
    exit: int


def write(path: str, answer: Mapping[str, Any]) -> None:
    """Write the JSON answer of `compat` with the record's own version, whole or not at all.

    Raises:
        UsageError: the place cannot be written.
    """
    folder = os.path.dirname(os.path.abspath(path))
    try:
        fd, draft = tempfile.mkstemp(dir=folder, prefix=".compat-")
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            json.dump({"schema_version": SCHEMA_VERSION, **answer}, file, indent=1)
            file.write("\n")
        os.chmod(draft, 0o644)  # the main container may run as another user
        os.replace(draft, path)
    except OSError as error:
        raise UsageError(
            f"cannot write the record {path}: {error.strerror}", help=("name a file on a volume that both containers mount",)
        ) from error


def read(path: str) -> Record:
    """Read a record.

    Raises:
        CompatError: absent, not a record, or of a schema this version does not know.
    """
    try:
        with open(path, "rb") as file:
            answer = json.loads(file.read(_MAX_BYTES))
        if answer["schema_version"] != SCHEMA_VERSION:
            raise CompatError(f"{path} has schema_version {answer['schema_version']}; this version knows {SCHEMA_VERSION}")
        return Record(
            gpu_uuids=tuple(str(uuid) for gpu in answer["gpus"] for uuid in (gpu["uuid"], *gpu["mig_uuids"])),
            libnccl=str(answer["libnccl"]),
            nccl_version=str(answer["nccl_version"]),
            fingerprint=str(answer["fingerprint"]),
            exit=int(answer["exit"]),
        )
    except OSError as error:
        raise CompatError(f"cannot read the compat record {path}: {error.strerror}") from error
    except (ValueError, TypeError, KeyError) as error:
        raise CompatError(f"{path} is not a record of ray-nccl-guard compat ({type(error).__name__}: {error})") from error


def strangers(record: Record, uuids: Collection[str]) -> tuple[str, ...]:
    """The GPUs in use that the record did not judge: the scheduler gave the worker others than the init container had."""
    return tuple(uuid for uuid in uuids if uuid not in record.gpu_uuids)
