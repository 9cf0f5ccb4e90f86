"""The listening side of the peers check: one socket and one thread that answer every other host, and end on a deadline."""

from __future__ import annotations

import errno
import selectors
import socket
import threading
import time
from types import TracebackType
from typing import final

from ray_nccl_guard.network import wire


@final
class Listener:
    """Answers hellos and takes 64 KiB from every peer, in one background thread, on a port the kernel chooses.

    The port is an ephemeral one as those of NCCL and gloo are, so a firewall that opens only Ray's ports is met here too.
    The thread ends when the `with` block ends, and at the deadline even if it does not. Only the direction peer -> here is
    tested by what a peer sends (the answers are small), so a stall names its direction.

    Attributes:
        rank: who listens.
        address: the address it is bound to.
        port: the port the kernel gave.

    Raises:
        OSError: on construction, the address is not one of this host's, or no port is free.
    """

    def __init__(self, address: str, *, rank: int, run_id: str, deadline_s: float) -> None:
        self.rank, self.address = rank, address
        self._hello = wire.hello(rank, run_id)
        self._end = time.monotonic() + deadline_s
        family, where = wire.socket_address(address, 0)
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        try:
            self._socket.bind(where)
            # All hosts may connect within one millisecond; a smaller backlog would drop SYNs and cost them 1 s each.
            self._socket.listen(4096)
        except OSError:
            self._socket.close()
            raise
        self._socket.setblocking(False)
        self.port: int = self._socket.getsockname()[1]
        self._wake, self._woken = socket.socketpair()
        self._received: dict[socket.socket, bytearray] = {}
        self._counts: dict[socket.socket, int] = {}
        self._thread = threading.Thread(target=self._serve, name="nccl-guard-peers", daemon=True)

    def __enter__(self) -> Listener:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End the thread and close everything. Safe to call twice."""
        if self._thread.is_alive():
            self._wake.send(b"x")
            self._thread.join(timeout=max(1.0, self._end - time.monotonic() + 1.0))
        for sock in (self._socket, self._wake, self._woken):
            sock.close()

    def _serve(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._socket, selectors.EVENT_READ)
            selector.register(self._woken, selectors.EVENT_READ)
            while (left_s := self._end - time.monotonic()) > 0:
                ready = [key.fileobj for key, _ in selector.select(left_s)]
                if self._woken in ready:
                    break
                for sock in ready:
                    assert isinstance(sock, socket.socket)
                    if sock is self._socket:
                        self._accept(selector)
                    elif sock in self._counts and not self._take(sock):
                        self._drop(selector, sock)
            for sock in list(self._counts):
                self._drop(selector, sock)
        self._socket.close()

    def _accept(self, selector: selectors.BaseSelector) -> None:
        while True:
            try:
                peer, _ = self._socket.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE):
                    return  # the peer was gone before we took it (ECONNABORTED and the like)
                # The connection would stay in the backlog and wake us for ever: stop taking until one of ours ends.
                selector.unregister(self._socket)
                return
            peer.setblocking(False)
            wire.reset_on_close(peer)
            self._received[peer], self._counts[peer] = bytearray(), 0
            selector.register(peer, selectors.EVENT_READ)

    def _drop(self, selector: selectors.BaseSelector, peer: socket.socket) -> None:
        selector.unregister(peer)
        peer.close()
        del self._received[peer], self._counts[peer]
        if self._socket not in selector.get_map():
            selector.register(self._socket, selectors.EVENT_READ)

    def _take(self, peer: socket.socket) -> bool:
        """Read what there is and answer what is due; False when the connection is over."""
        try:
            data = peer.recv(4 * wire.BULK_BYTES)
            if not data:
                return False
            before = self._counts[peer]
            self._counts[peer] = now = before + len(data)
            greeting = self._received[peer]
            greeting += data[: max(0, wire.HELLO_BYTES - len(greeting))]
            if before < wire.HELLO_BYTES <= now:
                if not wire.is_hello(bytes(greeting)):
                    return False  # a port scanner; a peer of another run gets our answer, so that it can say so
                peer.send(self._hello)
            if before < wire.HELLO_BYTES + wire.BULK_BYTES <= now:
                peer.send(wire.ACK)
        except BlockingIOError:
            return True
        except OSError:
            return False  # the peer resets when it is done
        return True
