"""A guarded fit() that hangs or falls apart while training, the cases that every change is tried on: the dumps are kept and the culprit is named, with its line."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.ray import flight_loops as loops
from tests.ray.flight_fits import named

# A fit() takes 12 s alone, and minutes on a crowded two-core machine.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_a_rank_that_sleeps_in_the_data_loader_is_named_with_the_line_where_it_sleeps(hang):
    outcome, output, folder = hang(loops.sleeps_in_the_data_loader)
    line = loops.line_of("# the data loader stands still")
    found = named(outcome, output, folder, "missing_rank", line)
    assert found["ranks_ended"][loops.CULPRIT]["place"].endswith(f"flight_loops.py:{line} in next_batch")
    assert "next_batch" in (folder / "stacks" / f"rank_{loops.CULPRIT}.txt").read_text()


@pytest.mark.long
def test_a_branch_of_a_ddp_model_that_one_rank_does_not_take_is_named(hang):
    outcome, output, folder = hang(loops.ddp_unused_branch)
    found = named(outcome, output, folder, "missing_rank", loops.line_of("# DDP reduces here"))
    assert found["ranks_ended"][loops.CULPRIT]["how"] == "train_func has ended"


def test_a_rank_that_died_is_named_although_it_left_no_dump(hang):
    outcome, output, folder = hang(loops.rank_dies)
    found = named(outcome, output, folder, "missing_rank")
    assert found["missing_dumps"] == [loops.CULPRIT]
    assert found["ranks_ended"][loops.CULPRIT]["how"] == "died"


def test_a_rank_that_raised_for_its_own_reason_is_told_from_a_hang(hang):
    outcome, output, folder = hang(loops.raises_alone)
    found = named(outcome, output, folder, "missing_rank", loops.line_of("a label out of range"))
    assert found["failure"] == "user_code_not_infra"
    assert found["summary"].startswith("rank 1 raised ValueError: a label out of range")


def test_of_a_healthy_run_nothing_is_collected(hang):
    outcome, _, folder = hang(loops.healthy)
    assert outcome.error is None and outcome.report["flight"] is None
    assert not Path(folder).exists() and "flight" not in os.listdir(folder.parents[1])
