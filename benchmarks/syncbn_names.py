"""The arms, sizes and networks of `syncbn.py` by name; without torch, so that a driver need not import it."""

from __future__ import annotations

ALONE = "no exchange"
SYNCBN, BN = "SyncBN", "BN unsynchronised"
OPERATIONS = ("all_reduce", "all_gather")
OWN_MODELS = ("tiny", "resnet20", "resnet18")
TORCHVISION = "resnet50"
SMALLEST, LARGEST = 4, 256 << 20


def sizes(largest: int) -> list[int]:
    """4 B, 16 B, ... up to `largest` bytes; none if that is less."""
    found, size = [], SMALLEST
    while size <= largest:
        found.append(size)
        size *= 4
    return found


def bus_bytes(operation: str, size: int, world: int) -> float:
    """Bytes that cross the slowest link at best (the bus bandwidth of nccl-tests), for `size` bytes of result on each rank."""
    return size * (2 if operation == "all_reduce" else 1) * (world - 1) / world


def proved(asked: list[str], chosen: str) -> list[str]:
    """The backends to measure: all that were asked for if the guard chose the first of them; else what it chose, and gloo."""
    if chosen == asked[0] != "gloo":
        return asked
    return list(dict.fromkeys([chosen, *(name for name in asked if name == "gloo")]))
