"""The bytes of the peers check, and the socket calls that both of its sides share."""

from __future__ import annotations

import hashlib
import socket
import struct
from typing import Any

# One 64 KiB message: far above any MTU (9,000 with jumbo frames) and above the 16 KiB that a fresh connection may send at
# once (10 segments, RFC 6928), so a path that drops big packets stalls; it costs 0.05 ms at 10 Gbit/s.
BULK_BYTES = 64 * 1024
_HELLO = struct.Struct("!4sI8s")
_MAGIC = b"RNG1"
HELLO_BYTES = _HELLO.size
ACK = b"+"


def hello(rank: int, run_id: str) -> bytes:
    """16 bytes that name the speaker and the run, so that an answer from another run or program is told from a peer's."""
    return _HELLO.pack(_MAGIC, rank, _token(run_id))


def read_hello(data: bytes, run_id: str) -> int | None:
    """The rank that a hello names, None if it is not a hello of this run."""
    magic, rank, token = _HELLO.unpack(data)
    return int(rank) if magic == _MAGIC and token == _token(run_id) else None


def is_hello(data: bytes) -> bool:
    """True for a hello of any run."""
    return data.startswith(_MAGIC)


def _token(run_id: str) -> bytes:
    return hashlib.blake2b(run_id.encode(), digest_size=8).digest()


def socket_address(address: str, port: int) -> tuple[socket.AddressFamily, Any]:
    """Family and socket address of a numeric IPv4 or IPv6 address; never asks a name server.

    Raises:
        OSError: `address` is not numeric (socket.gaierror), or its scope names no interface here.
    """
    found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV)
    return found[0][0], found[0][4]


def reset_on_close(sock: socket.socket) -> None:
    """Make close() send RST: N x N connections closed in order would leave N x N sockets in TIME_WAIT."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def retransmits(sock: socket.socket) -> int:
    """Segments this side sent again so far, the SYN included; 0 where the kernel does not tell."""
    # struct tcp_info: tcpi_total_retrans is the __u32 at offset 100 (linux/tcp.h, unchanged since 2.6).
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)
    return int(struct.unpack_from("I", info, 100)[0]) if len(info) >= 104 else 0
