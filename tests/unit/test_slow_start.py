"""NCCL's own timings: read from its log, and turned into the name of the rank that a slow start waited for."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from ray_nccl_guard.network.findings import Host
from ray_nccl_guard.network.slow_start import slow_start
from ray_nccl_guard.probe import nccl_timings

ROOT = Path(__file__).resolve().parents[2]
HEAD = "node-0:41:90 [0] NCCL INFO "
# As NCCL 2.27 and 2.30 print them (NVIDIA/nccl, src/bootstrap.cc and src/init.cc).
BOOTSTRAP = "Bootstrap timings total 9.800000 (create 0.100000, send 0.200000, recv 0.300000, ring 0.400000, delay 0.000000)"
INIT = (
    "Init timings - ncclCommInitRankConfig: rank 3 nranks 8 total 10.42 (kernels 0.17, alloc 0.04, bootstrap 9.80, "
    "allgathers 0.01, topo 0.30, graphs 0.02, connections 0.06, rest 0.02)"
)


def read(*lines: str, world_size: int = 8) -> dict[str, float]:
    fd = os.memfd_create("log")
    try:
        os.write(fd, "".join(f"{line}\n" for line in lines).encode())
        return nccl_timings.read(fd, world_size)
    finally:
        os.close(fd)


def test_both_lines_are_read_and_what_nccl_leaves_untimed_is_the_connecting_of_the_ring():
    told = read(HEAD + "Channel 00/02 : 0 1", HEAD + BOOTSTRAP, HEAD + INIT)
    assert (told["total"], told["kernels"], told["bootstrap"], told["bootstrap.send"]) == (10.42, 0.17, 9.8, 0.2)
    assert told["bootstrap.connect"] == pytest.approx(8.8)


def test_a_real_log_is_read():
    cases = map(json.loads, (ROOT / "benchmarks" / "data" / "reports.jsonl").read_text().splitlines())
    log = next(case["log"] for case in cases if case["id"] == "nccl-1936")
    told = read(*log.split("\n"), world_size=2)
    assert told["total"] == 0.64 and told["connections"] == 0.44 and "bootstrap.send" not in told


def test_the_line_of_nccl_2_22_is_read():
    line = "Init timings: rank 5 nranks 8 total 2.46 (kernels 0.18, bootstrap 1.60, allgathers 0.00, topo 0.52, graphs 0.01)"
    assert read(HEAD + line) == {
        "total": 2.46, "kernels": 0.18, "bootstrap": 1.6, "allgathers": 0.0, "topo": 0.52, "graphs": 0.01,
    }  # fmt: skip


def test_a_smaller_communicator_of_the_same_process_is_not_taken_for_the_whole():
    other = INIT.replace("nranks 8", "nranks 2").replace("total 10.42", "total 0.10")
    assert read(HEAD + other, HEAD + INIT)["total"] == 10.42
    assert read(HEAD + other) == {}


@pytest.mark.parametrize("line", ["", "Init timings", INIT[:120], BOOTSTRAP, "Init timings - x: rank a nranks b total c ()"])
def test_a_log_without_the_whole_line_tells_nothing(line: str):
    assert read(HEAD + line) == {}


def test_a_line_across_two_reads_is_read():
    assert read("x" * ((1 << 20) - 60), HEAD + INIT)["total"] == 10.42


HOSTS = [Host(rank=2 * h, name=f"h{h}", ranks=(2 * h, 2 * h + 1)) for h in range(4)]
USUAL = {
    "total": 0.5, "kernels": 0.2, "alloc": 0.0, "bootstrap": 0.1, "topo": 0.1, "graphs": 0.0, "connections": 0.1,
    "bootstrap.create": 0.0, "bootstrap.send": 0.0, "bootstrap.recv": 0.1, "bootstrap.connect": 0.0,
}  # fmt: skip


def slow(of: dict[int, dict[str, float]], others: dict[str, float], *, took: float = 10.5, ranks: int = 8) -> list[str]:
    """The sentences where `of` are the odd ranks' phases, and `others` what the rest sees of it."""
    phases = {rank: {**USUAL, **of.get(rank, others)} for rank in range(ranks)}
    return [one.text for one in slow_start(phases, dict.fromkeys(phases, took), HOSTS)]


WAITS = {"total": 10.5, "bootstrap": 10.0, "bootstrap.recv": 10.0}


def test_a_phase_of_its_own_names_the_rank_and_the_waiting_of_the_others_nobody():
    (text,) = slow({5: {"total": 10.5, "kernels": 10.2}}, WAITS)
    assert text == (
        "comm_init passed, but rank 5 on h2 spent 10.2 s loading NCCL's kernels, where the median of the others is 0.2 s"
    )
    (text,) = slow({5: {"total": 10.5, "bootstrap": 10.0, "bootstrap.send": 10.0}}, WAITS)
    assert "rank 5 on h2 spent 10.0 s connecting to the bootstrap root" in text


def test_who_came_late_for_a_reason_outside_nccl_is_named_by_it():
    (text,) = slow({5: {}}, WAITS)
    assert "rank 5 on h2 spent 10.0 s outside NCCL" in text


def test_who_waits_for_nobody_came_last():
    # Its own phases do not tell why: something that NCCL does not time.
    (text,) = slow({5: {"total": 10.5}}, WAITS)
    assert text == "comm_init passed, but rank 5 on h2 came late to it: the others waited 10.0 s in NCCL's bootstrap"


def test_the_neighbour_of_a_late_rank_is_not_blamed_for_waiting_in_the_ring():
    neighbour = {**WAITS, "bootstrap.recv": 0.0, "bootstrap.connect": 10.0}
    (text,) = slow({5: {"total": 10.5}, 6: neighbour}, WAITS)
    assert "rank 5 on h2 came late" in text


def test_a_slow_way_between_neighbours_names_both_where_nobody_came_late():
    in_ring = {**WAITS, "bootstrap.recv": 0.0, "bootstrap.connect": 10.0}
    (text,) = slow({2: in_ring, 3: in_ring}, {**WAITS, "bootstrap.recv": 0.0, "bootstrap.ring": 10.0})
    assert "ranks 2 and 3 on h1 spent 10.0 s connecting to its neighbours in the bootstrap ring" in text


def test_two_ranks_are_enough():
    (text,) = slow({1: {"total": 10.5, "kernels": 10.2}}, WAITS, ranks=2)
    assert "rank 1 on h0 spent 10.2 s loading" in text


@pytest.mark.parametrize(
    "of, others, took",
    [
        ({}, {}, 0.5),
        ({}, WAITS, 10.5),  # all slow alike
        ({r: {"kernels": 10.2, "total": 10.5} for r in range(6)}, WAITS, 10.5),  # most of them: that is the rule here
        ({5: {"kernels": 2.1, "total": 2.4}}, {"bootstrap": 2.0, "total": 2.4}, 2.4),  # within two seconds
    ],
    ids=["quick", "all slow", "most slow", "a little"],
)
def test_nobody_is_named_where_nobody_stands_out(of, others, took):
    assert slow(of, others, took=took) == []


def test_without_nccls_timings_nothing_is_said():
    assert slow_start({0: {}, 1: {}}, {0: 1.0, 1: 9.0}, HOSTS) == ()
