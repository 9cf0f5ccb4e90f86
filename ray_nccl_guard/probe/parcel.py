"""Values between ranks without Ray: pickled, and read back by an unpickler that builds nothing but this package's values."""

from __future__ import annotations

import dataclasses
import importlib
import io
import pickle
from enum import Enum
from typing import Any

_PACKAGE = __name__.split(".")[0]


def pack(value: Any) -> bytes:
    """`value`, made of plain values and of this package's dataclasses and enums, as bytes."""
    return pickle.dumps(value, protocol=4)


def unpack(data: bytes) -> Any:
    """What `pack` made.

    Raises:
        pickle.UnpicklingError: the bytes ask for anything else. The store has no password (torch's has none), so whoever
            reaches its port can write to it, and must not be able to run code here.
    """
    return _Unpickler(io.BytesIO(data)).load()


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        # Dotted names would reach through a class into whatever its module has imported.
        if module.split(".")[0] == _PACKAGE and "." not in name:
            found = getattr(importlib.import_module(module), name, None)
            if isinstance(found, type) and (dataclasses.is_dataclass(found) or issubclass(found, Enum)):
                return found
        raise pickle.UnpicklingError(f"{module}.{name} is no value of the probe")
