"""Can this host reach that port? One TCP connection with the kernel's own answer, as the store stage asks it."""

from __future__ import annotations

import errno
import os
import select
import socket
import time
from dataclasses import dataclass

from ray_nccl_guard.network import wire
from ray_nccl_guard.network.cells import Code
from ray_nccl_guard.network.interfaces import resolve

# Between two tries while nothing listens yet: short enough that a late store costs a rank nothing to speak of.
_PAUSE_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectResult:
    """How a connection to the store went.

    Attributes:
        code: `OK`, an errno's name, `SYN_TIMEOUT` (no answer at all) or `NO_ADDRESS` (the name does not resolve).
        seconds: until it stood, or until it was given up.
        text: one clause with both ends in it; empty if all is well.
        address: the numeric address that was tried last, empty if there was none.
        source: this host's own address on that connection, empty if none stood.
        tries: connections begun.
        retransmits: SYNs that had to be sent again on the last of them.
    """

    code: Code
    seconds: float
    text: str = ""
    address: str = ""
    source: str = ""
    tries: int = 1
    retransmits: int = 0

    @property
    def ok(self) -> bool:
        return self.code is Code.OK

    @property
    def errno_name(self) -> str:
        """`ECONNREFUSED` and the like, also `SYN_TIMEOUT` and `NO_ADDRESS`; empty if all is well."""
        return "" if self.ok else self.code.value


def connect(host: str, port: int, deadline_s: float, *, until_it_listens: bool = False) -> ConnectResult:
    """Connect to `host:port` and close again, within `deadline_s` including the name's resolution.

    torch's own client reports a refused store as a timeout (measured, torch 2.13); this keeps the two apart. Success
    proves that the kernel of that host takes connections, not that the process behind the port lives.

    Args:
        host: a name, or a numeric address (then no name server is asked).
        until_it_listens: where the store may come up later, a refusal is tried again until the deadline.
    """
    begin_s = time.monotonic()
    end_s = begin_s + deadline_s
    addresses, why = _resolve(host, port, end_s)
    if not addresses:
        return ConnectResult(code=Code.NO_ADDRESS, seconds=time.monotonic() - begin_s, text=why, tries=0)
    tries = 0
    while True:
        for index, address in enumerate(addresses):
            tries += 1
            # A name with several addresses must not spend the whole deadline on a dead first one.
            share_s = (end_s - time.monotonic()) / (len(addresses) - index)
            code, source, again = _try(address, port, share_s)
            if code is Code.OK or time.monotonic() >= end_s:
                break
        if code is not Code.ECONNREFUSED or not until_it_listens or time.monotonic() + _PAUSE_S >= end_s:
            break
        time.sleep(_PAUSE_S)
    took_s = time.monotonic() - begin_s
    text = "" if code is Code.OK else _words(code, host, address, port, took_s)
    return ConnectResult(
        code=code, seconds=took_s, text=text, address=address, source=source, tries=tries, retransmits=again
    )


def _words(code: Code, host: str, address: str, port: int, took_s: float) -> str:
    where = f"{address} port {port}" + (f" ({host})" if host != address else "")
    if code is Code.SYN_TIMEOUT:
        return f"no answer from {where} in {took_s:.1f} s: packets are dropped on the way, or the host is down"
    if code is Code.ECONNREFUSED:
        return f"{where} refuses: nothing listens there, or a firewall answers for it"
    reason = os.strerror(getattr(errno, code.value)) if hasattr(errno, code.value) else code.value
    return f"{where} cannot be reached: {reason}"


def _try(address: str, port: int, deadline_s: float) -> tuple[Code, str, int]:
    """One connection: its code, the own address, and the SYNs that were repeated."""
    family, where = wire.socket_address(address, port)
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        sock.setblocking(False)
        wire.reset_on_close(sock)
        number = sock.connect_ex(where)
        if number == errno.EINPROGRESS:
            poll = select.poll()
            poll.register(sock, select.POLLOUT)
            if not poll.poll(max(0.0, deadline_s) * 1000):
                return Code.SYN_TIMEOUT, "", wire.retransmits(sock)
            number = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if number:
            return Code.of(number), "", wire.retransmits(sock)
        own = sock.getsockname()
        if own[:2] == sock.getpeername()[:2]:
            # A connection to a free local port of the ephemeral range can meet itself; nobody listens there.
            return Code.ECONNREFUSED, "", 0
        return Code.OK, own[0], wire.retransmits(sock)


def _resolve(host: str, port: int, end_s: float) -> tuple[tuple[str, ...], str]:
    """Numeric addresses of `host`, or none and the reason."""
    try:
        wire.socket_address(host, port)
        return (host,), ""
    except socket.gaierror:
        pass
    return resolve(host, end_s - time.monotonic())
