"""What hosts tell each other through the store arrives byte for byte, and who is late once is not waited for again."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest

dist = pytest.importorskip("torch.distributed", reason="torch is not installed")


@pytest.fixture
def store():
    return dist.TCPStore("127.0.0.1", 0, None, True, timeout=timedelta(seconds=10), wait_for_workers=False)


@pytest.mark.parametrize("mine", [b"", b" ", b"\n\t\r\x0b\x0c ", bytes(range(256)), b"\x09\0\0\0", b"\0\0\0\x20"])
def test_bytes_arrive_as_they_were(store, mine):
    from ray_nccl_guard.probe.meet import _Exchange

    assert _Exchange(store, 9, [9])("round 1", mine, 2.0) == {9: mine}


def test_a_silent_host_costs_its_deadline_once(store):
    from ray_nccl_guard.probe.meet import _Exchange

    exchange = _Exchange(store, 0, [0, 1])
    started_s = time.monotonic()
    assert exchange("listen", b"a", 1.0) == {0: b"a"}
    assert time.monotonic() - started_s >= 0.9
    started_s = time.monotonic()
    assert exchange("round 1", b"b", 60.0) == {0: b"b"}
    assert time.monotonic() - started_s < 30
