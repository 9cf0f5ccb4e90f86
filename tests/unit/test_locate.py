"""`locate` against simulated clusters: which fault it names, in how many parallel rounds, and what it never asks."""

from __future__ import annotations

import itertools
import math
import random
import time
from collections import Counter
from collections.abc import Sequence

import pytest

from ray_nccl_guard.locate.locate import locate
from ray_nccl_guard.locate.result import Group, Kind, Located, Trial
from tests.unit.locate_oracle import (
    Cluster,
    Fault,
    bad_link,
    bad_node,
    bad_node_link,
    bad_rank,
    cluster_of,
    sometimes,
    threshold,
)

# Ranks and ranks per node: one node, one rank a node, even, odd and ragged clusters.
SHAPES = [(3, 1), (3, 3), (4, 1), (4, 2), (4, 4), (5, 1), (5, 5), (6, 3), (7, 7), (8, 8), (9, 3), (16, 8), (17, 8), (24, 8),
          (100, 8), (1024, 8), (1024, 1)]  # fmt: skip


def find(shape: tuple[int, int], *faults: Fault) -> Located:
    cluster = Cluster(*faults)
    found = locate(cluster_of(*shape), cluster)
    assert (found.rounds, found.probes) == (cluster.rounds, len(cluster.asked))
    assert found.sentence
    return found


def some(shape: tuple[int, int], most: int = 8) -> Sequence[int]:
    ranks = range(shape[0])
    return ranks if len(ranks) <= most else sorted({0, shape[0] - 1, *random.Random(0).sample(ranks, most)})


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_single_bad_rank_is_found_exactly_within_log_n_plus_two_rounds(shape: tuple[int, int], alone: bool):
    for rank in some(shape):
        found = find(shape, bad_rank(rank, alone=alone))
        assert (found.kind, found.ranks) == (Kind.RANK, (rank,))
        assert found.rounds <= math.ceil(math.log2(shape[0])) + 2
        assert f"rank {rank} " in found.sentence


@pytest.mark.parametrize("shape", SHAPES)
def test_a_bad_link_is_named_as_a_link(shape: tuple[int, int]):
    pairs = list(itertools.combinations(some(shape), 2))
    for a, b in pairs if len(pairs) <= 12 else random.Random(1).sample(pairs, 6):
        found = find(shape, bad_link(a, b))
        assert (found.kind, found.ranks) == (Kind.LINK, (a, b)), found
        # Two rounds a halving, three to be sure, and the four before.
        assert found.rounds <= 2 * math.ceil(math.log2(shape[0])) + 8


@pytest.mark.parametrize("shape", [(4, 2), (6, 3), (16, 8), (24, 8), (100, 10), (1024, 8)])
def test_a_bad_node_is_named_as_a_node(shape: tuple[int, int]):
    nodes = cluster_of(*shape)
    for node in (next(iter(nodes)), list(nodes)[-1]):
        found = find(shape, bad_node(nodes[node], inside=True))
        assert (found.kind, found.nodes, found.ranks) == (Kind.NODE, (node,), tuple(nodes[node]))
        if len(nodes) > 2:
            nic = find(shape, bad_node(nodes[node], inside=False))
            assert (nic.kind, nic.nodes) == (Kind.NODE, (node,))


@pytest.mark.parametrize("shape", [(4, 2), (16, 8), (24, 8), (100, 10), (1024, 8)])
def test_two_nodes_that_cannot_meet_are_a_link_of_nodes(shape: tuple[int, int]):
    nodes = cluster_of(*shape)
    one, other = list(nodes)[:2]
    found = find(shape, bad_node_link(nodes[one], nodes[other]))
    assert (found.kind, found.nodes) == (Kind.LINK, (one, other))
    assert f"the link {one} and {other}" in found.sentence


def test_with_two_nodes_a_bad_network_card_is_a_link_and_no_node_is_accused():
    nodes = cluster_of(16, 8)
    found = find((16, 8), bad_node(nodes["n0"], inside=False))
    assert (found.kind, found.nodes) == (Kind.LINK, ("n0", "n1"))


@pytest.mark.parametrize("shape", SHAPES)
def test_a_size_from_which_worlds_fail_is_found_exactly(shape: tuple[int, int]):
    count = shape[0]
    for size in {2, 3, 4, count // 2, count // 2 + 1, count - 1, count}:
        if 2 <= size <= count:
            found = find(shape, threshold(size))
            assert (found.kind, found.smallest, found.largest_ok) == (Kind.THRESHOLD, size, size - 1), (size, found)
            assert found.ranks == ()
            assert found.rounds <= 2 * math.ceil(math.log2(count)) + 9


@pytest.mark.parametrize("shape", [(5, 5), (8, 8), (8, 4), (16, 8), (64, 8), (1024, 8)])
def test_two_bad_ranks_are_both_found(shape: tuple[int, int]):
    dice = random.Random(shape[0])
    for _ in range(20):
        pair = sorted(dice.sample(range(shape[0]), 2))
        found = find(shape, *map(bad_rank, pair))
        assert (found.kind, list(found.ranks)) == (Kind.RANK, pair)


@pytest.mark.parametrize("shape", [(4, 1), (4, 2), (4, 4), (6, 3)])
def test_two_bad_ranks_of_few_are_both_found(shape: tuple[int, int]):
    for pair in itertools.combinations(range(shape[0]), 2):
        found = find(shape, *map(bad_rank, pair))
        assert found.ranks == pair, (pair, found)  # all ranks of one node are that node


def test_two_bad_ranks_of_three_leave_no_pair_that_works_and_nobody_is_accused():
    found = find((3, 1), bad_rank(0), bad_rank(1))
    assert (found.kind, found.ranks) == (Kind.THRESHOLD, ())


def test_of_two_ranks_with_a_fault_in_one_of_three_tries_none_is_accused_alone():
    for seed in range(30):
        assert find((2, 1), sometimes(bad_rank(1), 1 / 3, seed)).ranks in ((), (0, 1))


def test_a_dead_gpu_does_not_hide_a_second_fault():
    found = find((8, 4), bad_rank(1, alone=True), bad_rank(6))
    assert found.ranks == (1, 6)


@pytest.mark.parametrize("shape", [(3, 1), (4, 1), (8, 8), (8, 4), (16, 8), (64, 8), (1024, 8)])
def test_a_fault_in_one_of_three_tries_is_called_intermittent_and_its_rank_is_found(shape: tuple[int, int]):
    outcomes: Counter[str] = Counter()
    for seed in range(30):
        rank = random.Random(seed).randrange(shape[0])
        found = find(shape, sometimes(bad_rank(rank), 1 / 3, seed))
        if found.ranks == (rank,) and found.kind in (Kind.INTERMITTENT, Kind.RANK):
            outcomes["right"] += 1
        else:
            # With one chance in three the answers can agree by luck; then the rank is at least among those named,
            # or nobody is.
            assert not found.ranks or rank in found.ranks, (seed, found)
            outcomes["open"] += 1
    assert outcomes["right"] >= 27, outcomes


def test_two_ranks_do_not_pretend_to_know_which():
    found = find((2, 1), bad_rank(1))
    assert (found.kind, found.ranks) == (Kind.LINK, (0, 1))
    assert "rank and link cannot be told apart" in found.sentence
    assert find((2, 2), bad_rank(1, alone=True)).ranks == (1,)


@pytest.mark.parametrize("shape", [(1, 1), (2, 1), (8, 4)])
def test_a_fault_that_does_not_come_back_accuses_nobody(shape: tuple[int, int]):
    found = find(shape)
    assert (found.kind, found.ranks) == (Kind.NONE, ())


def test_one_rank_that_fails_is_that_rank():
    assert find((1, 1), bad_rank(0, alone=True)).ranks == (0,)


def test_no_ranks_at_all_are_no_fault():
    assert locate({}, Cluster()).kind is Kind.NONE


def test_all_ranks_bad_alone_are_all_named():
    found = find((4, 2), *[bad_rank(rank, alone=True) for rank in range(4)])
    assert found.ranks == (0, 1, 2, 3)


@pytest.mark.parametrize("fault", [bad_rank(5), bad_rank(3, alone=True), bad_node(range(8, 16), inside=False)])
def test_a_world_is_never_asked_twice_while_the_answers_agree(fault: Fault):
    cluster = Cluster(fault)
    locate(cluster_of(32, 8), cluster)
    assert max(Counter(frozenset(group) for group in cluster.asked).values()) == 1


def test_the_budget_ends_the_search_and_names_the_suspects():
    cluster = Cluster(bad_link(3, 900))

    def slow(groups: Sequence[Group]) -> Sequence[Trial]:
        time.sleep(0.05)
        return cluster(groups)

    found = locate(cluster_of(1024, 8), slow, budget_s=0.4)
    assert found.kind is Kind.UNDECIDED and {3, 900} <= set(found.ranks)
    assert "not located" in found.sentence


def test_a_world_that_could_not_be_run_is_no_pass():
    def broken(groups: Sequence[Group]) -> Sequence[Trial]:
        return [Trial.NOT_RUN] * len(groups)

    found = locate(cluster_of(4, 2), broken)
    assert found.kind is Kind.UNDECIDED and found.ranks == ()
    assert found.sentence == "not located in 1 round; no world that was run failed"


def test_a_threshold_says_the_largest_size_that_works():
    assert find((8, 8), threshold(4)).sentence == "worlds of 3 work and fail from 4 on, with any 4 ranks tried"
