"""This host's interfaces and what its own name resolves to: the two facts from which every library takes its address."""

from __future__ import annotations

import ctypes
import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass

from ray_nccl_guard.network import wire


@dataclass(frozen=True, slots=True, kw_only=True)
class Interface:
    """One address of one interface, in the kernel's order (IPv4 first, by interface index).

    Attributes:
        running: up and with a carrier (IFF_RUNNING).
    """

    name: str
    address: str
    running: bool = True

    @property
    def is_ipv6(self) -> bool:
        return ":" in self.address


class _Ifaddrs(ctypes.Structure):
    pass


_Ifaddrs._fields_ = [
    ("next", ctypes.POINTER(_Ifaddrs)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("addr", ctypes.c_void_p),
    ("netmask", ctypes.c_void_p),
    ("ifu", ctypes.c_void_p),
    ("data", ctypes.c_void_p),
]

_IFF_RUNNING = 0x40  # net/if.h


def interfaces() -> tuple[Interface, ...]:
    """Every IPv4 and IPv6 address of this host, from the call that NCCL and gloo make (getifaddrs), in its order.

    Raises:
        OSError: the kernel refuses to list them.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    head = ctypes.POINTER(_Ifaddrs)()
    if libc.getifaddrs(ctypes.byref(head)):
        number = ctypes.get_errno()
        raise OSError(number, f"getifaddrs: {os.strerror(number)}")
    found: list[Interface] = []
    try:
        node = head
        while node:
            entry = node.contents
            address = _address(entry.addr, entry.name.decode(errors="replace"))
            if address:
                running = bool(entry.flags & _IFF_RUNNING)
                found.append(Interface(name=entry.name.decode(errors="replace"), address=address, running=running))
            node = entry.next
    finally:
        libc.freeifaddrs(head)
    return tuple(found)


def _address(where: int | None, name: str) -> str:
    """The text of a sockaddr, empty unless it is IPv4 or IPv6. A link-local one gets its scope."""
    if not where:
        return ""
    family = struct.unpack("H", ctypes.string_at(where, 2))[0]
    if family == socket.AF_INET:
        return socket.inet_ntop(family, ctypes.string_at(where + 4, 4))
    if family == socket.AF_INET6:
        text = socket.inet_ntop(family, ctypes.string_at(where + 8, 16))
        return f"{text}%{name}" if text.startswith("fe80:") else text
    return ""


# glibc's own tool starts in a tenth of the 20 ms and more that Python takes. `-A`: torch and NCCL ask without AI_ADDRCONFIG too.
# It prints `ADDRESS STREAM NAME`, and a line for every other type of socket.
_GETENT = ("getent", "-A", "ahosts")
# `_socket` is the C module below `socket`, whose own imports (selectors, enum) would be half of this process's time.
_RESOLVE = (
    "import _socket, sys\n"
    "found = _socket.getaddrinfo(sys.argv[1], None, 0, _socket.SOCK_STREAM)\n"
    "print(*dict.fromkeys(a[4][0] for a in found), sep='\\n')"
)


def resolve(name: str, deadline_s: float) -> tuple[tuple[str, ...], str]:
    """Numeric addresses of `name` in the resolver's order, or none and the reason why."""
    # A name server that does not answer holds getaddrinfo for tens of seconds, and only a process can be ended.
    end_s = time.monotonic() + max(0.1, deadline_s)
    try:
        if found := _ask_getent(name, end_s - time.monotonic()):
            return found, ""
        command = [sys.executable, "-I", "-S", "-c", _RESOLVE, name]  # it tells why not
        left_s = max(0.1, end_s - time.monotonic())
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=left_s)
    except subprocess.TimeoutExpired:
        return (), f"the name {name} did not resolve in {deadline_s:.1f} s"
    if done.returncode:
        return (), f"the name {name} does not resolve ({done.stderr.strip().rpartition(chr(10))[2]})"
    return tuple(done.stdout.split()), ""


def _ask_getent(name: str, within_s: float) -> tuple[str, ...]:
    """The addresses that glibc's `getent` prints; none if it has none, is not there, or leaves out the scope of one."""
    try:
        done = subprocess.run([*_GETENT, name], check=False, capture_output=True, text=True, timeout=within_s)
    except OSError:
        return ()
    found = dict.fromkeys(line.split()[0] for line in done.stdout.splitlines() if " STREAM" in line)
    return () if done.returncode or any(address.startswith("fe80:") for address in found) else tuple(found)


def own_name_address(deadline_s: float = 5.0) -> str | None:
    """The address that gloo takes when told nothing: the first one of the own host name that can be bound, else empty.

    None if the answer did not come in time: on a busy host that says nothing of the name. 5 s is glibc's wait for one name
    server (resolv.conf(5), `timeout:`).
    """
    started_s = time.monotonic()
    found, why = resolve(socket.gethostname(), deadline_s)
    if why and time.monotonic() - started_s >= deadline_s:
        return None
    return next((address for address in found if _can_bind(address)), "")


def _can_bind(address: str) -> bool:
    try:
        family, where = wire.socket_address(address, 0)
        with closing(socket.socket(family, socket.SOCK_STREAM)) as sock:
            sock.bind(where)
    except OSError:
        return False
    return True


def names(found: Sequence[Interface]) -> str:
    """The interfaces' names for a sentence: `lo, eth0`."""
    return ", ".join(dict.fromkeys(interface.name for interface in found)) or "none"
