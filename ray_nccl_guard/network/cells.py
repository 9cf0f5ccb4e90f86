"""A cell: what one host saw when it connected to another. The values that the peers stage hands to the diagnosis."""

from __future__ import annotations

import errno
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum


class Code(Enum):
    """How one connection went. The errno names are the kernel's own; the others are what no errno says."""

    OK = "ok"
    SYN_TIMEOUT = "SYN_TIMEOUT"
    """Neither an answer nor a refusal: packets are dropped, or the host is gone."""
    NO_ECHO = "NO_ECHO"
    """The kernel accepted, the process did not answer: a frozen process looks like this."""
    BULK_STALL = "BULK_STALL"
    """16 bytes pass, 64 KiB do not: packets above the path's MTU are dropped silently."""
    WRONG_PEER = "WRONG_PEER"
    """Somebody else answers at that address: another host, another run, or another program."""
    CLOSED = "CLOSED"
    """The peer closed before it had answered."""
    ECONNREFUSED = "ECONNREFUSED"
    ECONNRESET = "ECONNRESET"
    EHOSTUNREACH = "EHOSTUNREACH"
    ENETUNREACH = "ENETUNREACH"
    EINVAL = "EINVAL"
    """What Linux says of a blackhole route."""
    EACCES = "EACCES"
    """What Linux says of a prohibit route, or of a security module."""
    EPERM = "EPERM"
    """What Linux says when the host's own firewall drops the packet on its way out."""
    EADDRNOTAVAIL = "EADDRNOTAVAIL"
    ETIMEDOUT = "ETIMEDOUT"
    NO_ADDRESS = "NO_ADDRESS"
    """The name does not resolve, or the text is no address."""
    NOT_TRIED = "NOT_TRIED"
    """The deadline or this process's file limit came first: says nothing about the peer."""
    OTHER = "OTHER"
    """Another errno; `text` has its name."""

    @classmethod
    def of(cls, number: int) -> Code:
        """The code of an errno."""
        return _BY_NAME.get(errno.errorcode.get(number, ""), cls.OTHER)

    @property
    def failed(self) -> bool:
        """True where something was seen to fail. `NOT_TRIED` is neither a pass nor a failure."""
        return self not in (Code.OK, Code.NOT_TRIED)


_BY_NAME = {code.value: code for code in Code}
_CODES = tuple(Code)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A listener to connect to.

    Attributes:
        rank: who listens there. One rank speaks for a host, so a rank names a host here.
        address: IPv4 or IPv6 address, with `%scope` where it is link-local.
        port: TCP port.
    """

    rank: int
    address: str
    port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """What the host of rank `src` saw when it connected to the host of rank `dst`.

    Attributes:
        connect_s: seconds until the connection stood, or until it failed.
        rtt_s: seconds from the hello to its answer, 0 if there was none.
        retransmits: TCP segments that this side had to send again, the SYN included (`tcpi_total_retrans`).
        text: the reason in words, empty where the code says it all.
    """

    src: int
    dst: int
    code: Code
    connect_s: float = 0.0
    rtt_s: float = 0.0
    retransmits: int = 0
    text: str = ""

    @property
    def ok(self) -> bool:
        return self.code is Code.OK


# src and dst, code, retransmits, two durations: 20 bytes a cell, so that a row of 1,023 cells is 20 KB in the store.
_PACKED = struct.Struct("!IIBBHff")


def pack(cells: Iterable[Cell]) -> bytes:
    """Cells as bytes for the store. The text is left out; the code says which kind it was."""
    return b"".join(
        _PACKED.pack(c.src, c.dst, _CODES.index(c.code), 0, min(c.retransmits, 0xFFFF), c.connect_s, c.rtt_s) for c in cells
    )


def unpack(data: bytes) -> tuple[Cell, ...]:
    """The cells of `pack`.

    Raises:
        ValueError: the bytes are not what `pack` writes.
    """
    if len(data) % _PACKED.size:
        raise ValueError(f"packed cells are a multiple of {_PACKED.size} bytes, not {len(data)}")
    rows = tuple(_PACKED.iter_unpack(data))
    if any(row[2] >= len(_CODES) for row in rows):
        raise ValueError("packed cells name a code that this version does not know")
    return tuple(
        Cell(src=src, dst=dst, code=_CODES[code], connect_s=connect_s, rtt_s=rtt_s, retransmits=retransmits)
        for src, dst, code, _, retransmits, connect_s, rtt_s in rows
    )
