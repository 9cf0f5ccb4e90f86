"""What hosts tell each other through the store arrives byte for byte, and who is late once is not waited for again."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest

dist = pytest.importorskip("torch.distributed", reason="torch is not installed")


@pytest.fixture
def store():
    return dist.TCPStore("127.0.0.1", 0, None, True, timeout=timedelta(seconds=10), wait_for_workers=False)


@pytest.mark.parametrize("mine", [b"", b" ", b"\n\t\r\x0b\x0c ", bytes(range(256)), b"\x09\0\0\0", b"\0\0\0\x20"])
def test_bytes_arrive_as_they_were(store, mine):
    from ray_nccl_guard.probe.exchange import Exchange

    assert Exchange(store, 9, [9])("round 1", mine, 2.0) == {9: mine}


def test_a_silent_host_costs_its_deadline_once(store):
    from ray_nccl_guard.probe.exchange import Exchange

    exchange = Exchange(store, 0, [0, 1])
    started_s = time.monotonic()
    assert exchange("listen", b"a", 1.0) == {0: b"a"}
    assert time.monotonic() - started_s >= 0.9
    started_s = time.monotonic()
    assert exchange("round 1", b"b", 60.0) == {0: b"b"}
    assert time.monotonic() - started_s < 30


def together(store, speakers, come, name="listen", deadline_s=20.0):
    """The exchanges of the ranks that come, each in a thread with a client of its own, and what each was told."""
    from ray_nccl_guard.probe.exchange import Exchange

    def rank_main(rank):
        own = dist.TCPStore(store.host, store.port, None, False, timeout=timedelta(seconds=10), wait_for_workers=False)
        exchange = Exchange(own, rank, speakers)
        return exchange(name, b"%d" % rank, deadline_s), exchange("again", b"%d" % rank, deadline_s)

    with ThreadPoolExecutor(len(come)) as pool:
        return list(pool.map(rank_main, come))


def test_everybody_is_told_what_everybody_said(store):
    want = {rank: b"%d" % rank for rank in range(12)}
    assert together(store, range(12), range(12)) == [(want, want)] * 12


@pytest.mark.parametrize("absent", [0, 2], ids=["the one that gathers", "another"])
def test_whoever_is_absent_the_others_hear_each_other(store, absent):
    come = [rank for rank in range(4) if rank != absent]
    want = {rank: b"%d" % rank for rank in come}
    started_s = time.monotonic()
    assert together(store, range(4), come, deadline_s=1.0) == [(want, want)] * 3
    assert time.monotonic() - started_s < 3.5, "who did not come once is not waited for again"


class Counted:
    """A store that counts what it is asked."""

    def __init__(self, store):
        self.store, self.requests = store, 0

    def __getattr__(self, name):
        self.requests += 1
        return getattr(self.store, name)


def test_a_host_asks_the_store_as_often_among_a_thousand_as_among_three(store):
    from ray_nccl_guard.probe.exchange import Exchange

    def requests(count, name):
        hosts = [Counted(store) for _ in range(count)]
        for rank in [*range(1, count), 0]:  # the one that gathers last, so that nobody waits
            if rank:
                store.set(f"{name}/{rank}", b"=x")
                store.add(f"{name}/came", 1)
            else:
                assert len(Exchange(hosts[0], 0, range(count))(name, b"x", 5.0)) == count
        assert len(Exchange(hosts[1], 1, range(count))(f"{name}", b"x", 5.0)) == count
        return hosts[0].requests, hosts[1].requests

    assert requests(3, "few") == requests(1000, "many")
