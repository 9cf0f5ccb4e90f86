"""The connecting side of the peers check: one host against all others at once, without a thread per target."""

from __future__ import annotations

import errno
import os
import resource
import selectors
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from ray_nccl_guard.network import wire
from ray_nccl_guard.network.cells import Cell, Code, Target, pack, unpack
from ray_nccl_guard.network.listener import Listener

__all__ = ["Cell", "Code", "Listener", "Target", "pack", "probe", "unpack"]

# The kernel sends a lost SYN again after 1 and 3 s (initial RTO of 1 s, doubled: RFC 6298), so 4 s allow two losses.
DEADLINE_S = 4.0
# One row of the largest world that was measured (1,023 targets in 0.74 s); a smaller window lets a black-holed third of the
# targets cost several deadlines one after another (12 s at 64).
WINDOW = 1024


class _Stage(Enum):
    CONNECT = Code.SYN_TIMEOUT  # value: what it is when the deadline comes in this stage
    HELLO = Code.NO_ECHO
    BULK = Code.BULK_STALL


@dataclass(slots=True)
class _Connection:
    target: Target
    sock: socket.socket
    start_s: float
    stage: _Stage = _Stage.CONNECT
    connect_s: float = 0.0
    hello_sent_s: float = 0.0
    rtt_s: float = 0.0
    received: bytearray = field(default_factory=bytearray)
    unsent: memoryview = field(default_factory=lambda: memoryview(b""))


def probe(
    rank: int, targets: Sequence[Target], *, run_id: str, deadline_s: float = DEADLINE_S, window: int = WINDOW
) -> tuple[Cell, ...]:
    """Connect to every target at once: hello with identity, then 64 KiB. One cell per target, in the order of `targets`.

    A target equal to `rank` is left out. The whole call ends within `deadline_s`; a target that could not be tried in that
    time is `NOT_TRIED`, never a pass. The listeners must stay open until all hosts are through.

    Args:
        rank: who asks.
        run_id: the same on all hosts; an answer with another one is `WRONG_PEER`.
        window: connections in flight at most; fewer if the process's file limit says so.
    """
    others = [target for target in targets if target.rank != rank]
    # Start behind the own rank and wrap around, so that the hosts do not all call the first one together.
    ordered = sorted(others, key=lambda target: (target.rank <= rank, target.rank))
    round_ = _Round(rank, run_id, time.monotonic() + deadline_s, max(1, min(window, _free_descriptors())))
    cells = round_.run(ordered)
    return tuple(cells[target.rank] for target in others)


def _free_descriptors() -> int:
    """File descriptors this process may still open, less 32 that are left to whoever else runs here."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return WINDOW
    try:
        return soft - len(os.listdir("/proc/self/fd")) - 32
    except OSError:
        return soft // 2


class _Round:
    """One host's connections, all of them in one selector."""

    def __init__(self, rank: int, run_id: str, end_s: float, window: int) -> None:
        self.rank, self.run_id, self.end_s, self.window = rank, run_id, end_s, window
        self.hello = wire.hello(rank, run_id)
        self.bulk = memoryview(bytes(wire.BULK_BYTES))
        self.cells: dict[int, Cell] = {}
        self.live: set[int] = set()
        self.selector = selectors.DefaultSelector()

    def run(self, targets: Sequence[Target]) -> dict[int, Cell]:
        waiting = list(reversed(targets))
        with self.selector:
            while (waiting or self.live) and (left_s := self.end_s - time.monotonic()) > 0:
                while waiting and len(self.live) < self.window:
                    if not self._start(waiting[-1]):
                        break
                    waiting.pop()
                for key, events in self.selector.select(left_s if self.live else 0):
                    self._advance(key.data, events)
            for key in list(self.selector.get_map().values()):
                self._finish(key.data, key.data.stage.value)
        for target in waiting:
            self.cells[target.rank] = Cell(
                src=self.rank, dst=target.rank, code=Code.NOT_TRIED, text="not tried before the deadline"
            )
        return self.cells

    def _start(self, target: Target) -> bool:
        """Begin to connect; False if this process has no descriptor left for it now."""
        begin_s = time.monotonic()
        try:
            family, where = wire.socket_address(target.address, target.port)
        except OSError as error:
            self._refuse(target, Code.NO_ADDRESS, f"{target.address}: {error.strerror}", begin_s)
            return True
        try:
            sock = socket.socket(family, socket.SOCK_STREAM)
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                self.window = max(1, len(self.live))
                if not self.live:
                    time.sleep(0.01)  # nothing of ours to wait for: somebody else holds the descriptors
                return False
            self._refuse(target, Code.of(error.errno or 0), error.strerror or "", begin_s)
            return True
        sock.setblocking(False)
        wire.reset_on_close(sock)
        number = sock.connect_ex(where)
        if number not in (0, errno.EINPROGRESS):
            sock.close()
            self._refuse(target, Code.of(number), os.strerror(number), begin_s)
            return True
        self.live.add(target.rank)
        self.selector.register(sock, selectors.EVENT_WRITE, _Connection(target, sock, begin_s))
        return True

    def _refuse(self, target: Target, code: Code, text: str, begin_s: float) -> None:
        took_s = time.monotonic() - begin_s
        self.cells[target.rank] = Cell(src=self.rank, dst=target.rank, code=code, connect_s=took_s, text=text)

    def _finish(self, c: _Connection, code: Code, text: str = "") -> None:
        again = wire.retransmits(c.sock)
        self.selector.unregister(c.sock)
        c.sock.close()
        self.live.discard(c.target.rank)
        connect_s = c.connect_s or time.monotonic() - c.start_s
        self.cells[c.target.rank] = Cell(
            src=self.rank, dst=c.target.rank, code=code, connect_s=connect_s, rtt_s=c.rtt_s, retransmits=again, text=text
        )

    def _advance(self, c: _Connection, events: int) -> None:
        try:
            if c.stage is _Stage.CONNECT:
                self._connected(c)
            elif c.stage is _Stage.HELLO:
                self._answered(c)
            else:
                self._bulk(c, events)
        except BlockingIOError:
            return
        except OSError as error:
            self._finish(c, Code.of(error.errno or 0), f"{error.strerror} ({c.stage.name.lower()})")

    def _connected(self, c: _Connection) -> None:
        number = c.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if number:
            self._finish(c, Code.of(number), os.strerror(number))
            return
        c.hello_sent_s = time.monotonic()
        c.connect_s = c.hello_sent_s - c.start_s
        c.sock.send(self.hello)
        c.stage = _Stage.HELLO
        self.selector.modify(c.sock, selectors.EVENT_READ, c)

    def _answered(self, c: _Connection) -> None:
        data = c.sock.recv(wire.HELLO_BYTES - len(c.received))
        if not data:
            self._finish(c, Code.CLOSED, "closed before it said who it is")
            return
        c.received += data
        if len(c.received) < wire.HELLO_BYTES:
            return
        c.rtt_s = time.monotonic() - c.hello_sent_s
        who = wire.read_hello(bytes(c.received), self.run_id)
        if who != c.target.rank:
            speaker = f"rank {who}" if who is not None else "a program that is not part of this run"
            self._finish(c, Code.WRONG_PEER, f"{c.target.address} port {c.target.port} is answered by {speaker}")
            return
        c.stage, c.unsent = _Stage.BULK, self.bulk
        self.selector.modify(c.sock, selectors.EVENT_READ | selectors.EVENT_WRITE, c)

    def _bulk(self, c: _Connection, events: int) -> None:
        if events & selectors.EVENT_WRITE and c.unsent:
            c.unsent = c.unsent[c.sock.send(c.unsent) :]
            if not c.unsent:
                self.selector.modify(c.sock, selectors.EVENT_READ, c)
        if events & selectors.EVENT_READ:
            ok = c.sock.recv(1) == wire.ACK
            self._finish(c, Code.OK if ok else Code.CLOSED, "" if ok else "closed while it took 64 KiB")
