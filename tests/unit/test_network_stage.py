"""The peers stage with all hosts as threads on loopback, and the matrix as text."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from ray_nccl_guard.network.addresses import AddressChoice, choose
from ray_nccl_guard.network.cells import Cell, Code
from ray_nccl_guard.network.findings import Host, Kind
from ray_nccl_guard.network.grid import grid
from ray_nccl_guard.network.interfaces import Interface
from ray_nccl_guard.network.stage import Exchange, PeersRow, diagnose_rows, peers_stage


class Meeting:
    """An exchange among threads: everybody who comes gets what everybody gave, or what there is at the deadline."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.given: dict[str, dict[int, bytes]] = {}
        self.changed = threading.Condition()
        self.names: list[str] = []

    def at(self, rank: int) -> Exchange:
        def exchange(name: str, mine: bytes, deadline_s: float) -> Mapping[int, bytes]:
            with self.changed:
                here = self.given.setdefault(name, {})
                here[rank] = mine
                if rank == 0:
                    self.names.append(name)
                self.changed.notify_all()
                self.changed.wait_for(lambda: len(here) >= self.count, timeout=deadline_s)
                return dict(here)

        return exchange


def choice(address: str) -> AddressChoice:
    return choose({}, [Interface(name="eth0", address=address)], own_name=address, node_ip=address)


def run(choices: Mapping[int, AddressChoice], count: int, deadline_s: float = 2.0) -> tuple[list[PeersRow], Meeting]:
    meeting = Meeting(len(choices))
    with ThreadPoolExecutor(len(choices)) as pool:
        rows = [
            pool.submit(
                peers_stage, rank=rank, speakers=range(count), choice=one, backend="gloo", run_id="r",
                exchange=meeting.at(rank), deadline_s=deadline_s,
            )
            for rank, one in choices.items()
        ]  # fmt: skip
        return [row.result(timeout=60) for row in rows], meeting


def hosts(count: int) -> list[Host]:
    return [Host(rank=rank, name=f"h{rank}", ranks=(rank,)) for rank in range(count)]


def test_healthy_hosts_take_one_round_and_say_nothing():
    begin_s = time.monotonic()
    rows, meeting = run({rank: choice(f"127.0.0.{rank + 1}") for rank in range(4)}, 4)
    assert meeting.names == ["listen", "round 1", "done"]
    assert [len(row.rounds) for row in rows] == [1] * 4
    assert all(cell.ok for row in rows for cell in row.rounds[0])
    # Loopback addresses are what gloo would take on "four hosts": said, and not denied by the connections.
    assert {finding.kind for finding in diagnose_rows(rows, hosts(4), "gloo")} == {Kind.ADDRESS}
    assert time.monotonic() - begin_s < 20
    assert not any(thread.name == "nccl-guard-peers" for thread in threading.enumerate())


def test_a_host_whose_address_is_not_its_own_cannot_listen_and_is_still_told_apart():
    rows, _ = run({0: choice("127.0.0.1"), 1: choice("127.0.0.2"), 2: choice("192.0.2.77")}, 3)
    assert "cannot listen on 192.0.2.77" in rows[2].error
    assert [len(row.rounds[0]) for row in rows] == [1, 1, 2]


def test_a_host_that_never_comes_is_silent_and_the_others_end():
    rows, _ = run({0: choice("127.0.0.1"), 1: choice("127.0.0.2")}, 3, deadline_s=0.3)
    found = diagnose_rows(rows, hosts(3), "gloo")
    silent = next(finding for finding in found if finding.kind is Kind.SILENT)
    assert silent.hosts == ("h2",)


def test_no_rows_at_all_name_every_host():
    assert [finding.hosts for finding in diagnose_rows([], hosts(2), "nccl")] == [("h0",), ("h1",)]


def test_the_matrix_reads_from_row_to_column():
    cells = [Cell(src=0, dst=1, code=Code.OK), Cell(src=1, dst=0, code=Code.SYN_TIMEOUT)]
    assert grid(cells, hosts(3)).splitlines() == [
        "from/to    h0    h1    h2",
        "h0          -    ok     .",
        "h1        SYN     -     .",
        "h2          .     .     -",
    ]


def test_a_wide_matrix_shows_those_with_failures_and_says_so():
    cells = [Cell(src=7, dst=90, code=Code.ECONNREFUSED), Cell(src=1, dst=2, code=Code.OK)]
    text = grid(cells, hosts(100))
    assert text.splitlines()[-1] == "(2 of 100 hosts; 2 have a failed connection)"
    assert "REFUS" in text and len(text.splitlines()) == 4
