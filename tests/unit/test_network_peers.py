"""The peers check and the store's connect on loopback: real sockets, real faults that loopback can have."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager

import pytest

from ray_nccl_guard.network import wire
from ray_nccl_guard.network.cells import Cell, Code, Target, pack, unpack
from ray_nccl_guard.network.listener import Listener
from ray_nccl_guard.network.peers import probe
from ray_nccl_guard.network.reach import connect

RUN = "run-1"
HOST = "127.0.0.1"


@contextmanager
def listeners(count: int, deadline_s: float = 30.0) -> Iterator[list[Target]]:
    with ExitStack() as stack:
        up = [stack.enter_context(Listener(HOST, rank=rank, run_id=RUN, deadline_s=deadline_s)) for rank in range(count)]
        yield [Target(rank=x.rank, address=x.address, port=x.port) for x in up]


@contextmanager
def plain_server(backlog: int = 16) -> Iterator[socket.socket]:
    with closing(socket.socket()) as server:
        server.bind((HOST, 0))
        server.listen(backlog)
        yield server


def code_of(target: Target, deadline_s: float = 5.0) -> Cell:
    (cell,) = probe(99, [target], run_id=RUN, deadline_s=deadline_s)
    return cell


def test_every_host_reaches_every_other():
    with listeners(5) as targets:
        cells = [cell for target in targets for cell in probe(target.rank, targets, run_id=RUN)]
    assert {(c.src, c.dst) for c in cells} == {(a, b) for a in range(5) for b in range(5) if a != b}
    assert all(c.ok and c.rtt_s > 0 and c.connect_s > 0 for c in cells)


def test_cells_come_in_the_order_of_the_targets():
    with listeners(4) as targets:
        cells = probe(1, targets[::-1], run_id=RUN)
    assert [c.dst for c in cells] == [3, 2, 0]


def test_nobody_listening_is_refused_at_once():
    with plain_server() as server:
        port = server.getsockname()[1]
    begin_s = time.monotonic()
    cell = code_of(Target(rank=1, address=HOST, port=port))
    assert cell.code is Code.ECONNREFUSED
    assert time.monotonic() - begin_s < 4


def test_a_frozen_peer_is_no_echo_although_the_connection_stands():
    program = (
        "import sys, time\nfrom ray_nccl_guard.network.listener import Listener\n"
        f"with Listener('{HOST}', rank=1, run_id='{RUN}', deadline_s=60) as x: print(x.port, flush=True); time.sleep(60)"
    )
    frozen = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    try:
        assert frozen.stdout is not None
        port = int(frozen.stdout.readline())
        assert code_of(Target(rank=1, address=HOST, port=port)).ok
        os.kill(frozen.pid, signal.SIGSTOP)
        os.waitpid(frozen.pid, os.WUNTRACED)  # until all of its threads have stopped
        assert code_of(Target(rank=1, address=HOST, port=port), deadline_s=1.0).code is Code.NO_ECHO
    finally:
        frozen.kill()
        frozen.communicate()


def test_a_peer_that_greets_and_then_reads_nothing_is_a_bulk_stall():
    def greet(server: socket.socket) -> None:
        peer, _ = server.accept()
        with peer:
            peer.recv(wire.HELLO_BYTES)
            peer.send(wire.hello(1, RUN))
            done.wait(20)

    done = threading.Event()
    with plain_server() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        thread = threading.Thread(target=greet, args=(server,))
        thread.start()
        try:
            cell = code_of(Target(rank=1, address=HOST, port=server.getsockname()[1]), deadline_s=1.0)
        finally:
            done.set()
            thread.join()
    assert cell.code is Code.BULK_STALL
    assert cell.rtt_s > 0


@pytest.mark.parametrize(("rank", "run_id"), [(2, RUN), (1, "run-2")])
def test_another_rank_or_another_run_at_the_address_is_a_wrong_peer(rank: int, run_id: str):
    with Listener(HOST, rank=rank, run_id=run_id, deadline_s=10) as other:
        cell = code_of(Target(rank=1, address=HOST, port=other.port))
    assert cell.code is Code.WRONG_PEER
    assert "answered by" in cell.text


def test_an_address_that_is_none_is_said_so():
    assert code_of(Target(rank=1, address="not-an-address", port=1)).code is Code.NO_ADDRESS


def test_ipv6_works_where_the_host_has_it():
    try:
        listener = Listener("::1", rank=1, run_id=RUN, deadline_s=10)
    except OSError as error:
        pytest.skip(f"this host has no IPv6 loopback: {error}")
    with listener:
        assert code_of(Target(rank=1, address="::1", port=listener.port)).ok


def test_targets_beyond_the_window_are_not_tried_rather_than_passed():
    with plain_server() as silent:  # accepts in the kernel, never answers
        port = silent.getsockname()[1]
        targets = [Target(rank=rank, address=HOST, port=port) for rank in range(1, 4)]
        cells = probe(0, targets, run_id=RUN, deadline_s=0.5, window=1)
    assert [c.code for c in cells] == [Code.NO_ECHO, Code.NOT_TRIED, Code.NOT_TRIED]
    assert not cells[1].code.failed and not cells[1].ok


def test_no_targets_are_no_cells():
    assert probe(0, [], run_id=RUN) == ()


def test_the_listener_survives_garbage_and_half_a_hello():
    with listeners(1) as (target,):
        for garbage in (b"GET / HTTP/1.0\r\n\r\n", b"RNG1", b""):
            with socket.create_connection((HOST, target.port), timeout=5) as peer:
                peer.sendall(garbage)
        with socket.create_connection((HOST, target.port), timeout=5) as idle:
            assert code_of(target).ok
            assert idle.fileno() >= 0


def test_a_hello_in_single_bytes_is_understood():
    with listeners(1) as (target,), socket.create_connection((HOST, target.port), timeout=5) as peer:
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in wire.hello(5, RUN):
            peer.sendall(bytes([byte]))
        assert wire.read_hello(peer.recv(wire.HELLO_BYTES), RUN) == target.rank


def test_closing_leaves_no_thread_and_no_descriptor():
    before = len(os.listdir("/proc/self/fd")), threading.active_count()
    with listeners(8) as targets:
        probe(0, targets, run_id=RUN)
    assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == before


def test_the_listener_ends_at_its_deadline_on_its_own():
    with listeners(1, deadline_s=0.3) as (target,):
        end_s = time.monotonic() + 10
        while any(t.name == "nccl-guard-peers" for t in threading.enumerate()):
            assert time.monotonic() < end_s
            time.sleep(0.02)
        assert code_of(target, deadline_s=2).code is Code.ECONNREFUSED


def test_no_connection_is_left_in_time_wait():
    with listeners(3) as targets:
        for target in targets:
            probe(target.rank, targets, run_id=RUN)
    ports = {f"{target.port:04X}" for target in targets}
    with open("/proc/net/tcp") as table:
        rows = [line.split() for line in table][1:]
    left = [row for row in rows if row[3] == "06" and {row[1].split(":")[1], row[2].split(":")[1]} & ports]
    assert left == []


def test_cells_survive_packing():
    cells = (
        Cell(src=0, dst=1023, code=Code.OK, connect_s=0.5, rtt_s=0.25, retransmits=3),
        Cell(src=7, dst=2, code=Code.BULK_STALL, retransmits=1 << 20),
    )
    back = unpack(pack(cells))
    assert back[0] == cells[0]
    assert back[1].code is Code.BULK_STALL and back[1].retransmits == 0xFFFF
    with pytest.raises(ValueError, match="multiple"):
        unpack(pack(cells)[:-1])
    with pytest.raises(ValueError, match="does not know"):
        unpack(bytes(8) + b"\xff" + bytes(11))


def test_connect_reaches_a_store_and_names_both_ends():
    with plain_server() as server:
        result = connect(HOST, server.getsockname()[1], 5.0)
    assert result.ok and result.errno_name == "" and (result.address, result.source) == (HOST, HOST)


def test_connect_tells_refused_from_dropped():
    with plain_server() as server:
        port = server.getsockname()[1]
    result = connect(HOST, port, 5.0)
    assert result.errno_name == "ECONNREFUSED"
    assert f"{HOST} port {port} refuses" in result.text


def test_connect_waits_for_a_late_store_when_asked():
    with plain_server() as server:
        port = server.getsockname()[1]
    late = socket.socket()
    late.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    late.bind((HOST, port))
    timer = threading.Timer(0.4, late.listen)
    timer.start()
    try:
        result = connect(HOST, port, 20.0, until_it_listens=True)
    finally:
        timer.join()
        late.close()
    assert result.ok and result.tries > 1


def test_connect_says_that_a_name_does_not_resolve():
    result = connect("no-such-host.invalid", 1, 20.0)
    assert result.code is Code.NO_ADDRESS
    assert "no-such-host.invalid" in result.text


def test_connect_takes_a_name():
    with plain_server() as server:
        assert connect("localhost", server.getsockname()[1], 20.0).ok


def test_connect_ends_at_its_deadline_when_a_backlog_is_full():
    with plain_server(backlog=0) as server, ExitStack() as stack:
        port = server.getsockname()[1]
        for _ in range(4):  # fill the queue: the kernel then drops SYNs, as a silent firewall does
            filler = stack.enter_context(closing(socket.socket()))
            filler.setblocking(False)
            filler.connect_ex((HOST, port))
        begin_s = time.monotonic()
        result = connect(HOST, port, 0.5)
    assert result.code is Code.SYN_TIMEOUT
    assert time.monotonic() - begin_s < 5
