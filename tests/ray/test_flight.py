"""A guarded fit() that hangs or falls apart while training: the dumps are kept and the culprit is named, with its line."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ray_nccl_guard import GuardedTorchConfig, ProbeSpec, flight
from tests.ray import flight_loops as loops

# A fit() takes 12 s alone, and minutes on a crowded two-core machine.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

# gloo ends a call after this; it is also how long a rank waits for another to join the warm-up on a busy machine.
TIMEOUT_S = 15


@pytest.fixture
def hang(fit, tmp_path, capfd):
    """Train on 3 gloo workers with one of the loops; gives back the report's `flight`, the driver's output, the run's folder."""

    def run(loop, workers=3):
        capfd.readouterr()
        config = GuardedTorchConfig(backend="gloo", timeout_s=TIMEOUT_S, probe=ProbeSpec())
        outcome = fit(config, train=loop, workers=workers, name="hung")
        out, err = capfd.readouterr()
        folder = tmp_path / "storage" / "hung" / "nccl_guard" / "flight" / "1"
        assert len(outcome.metrics) == workers
        assert not any(os.path.exists(os.path.dirname(m["dumps"])) for m in outcome.metrics), "the node's folder is removed"
        return outcome, out + err, folder

    return run


def named(outcome, output, folder, kind, line=None, workers=3):
    """The culprit stands in the report, in the driver's output (once), and in the dumps that were kept."""
    assert outcome.error is not None
    found = outcome.report["flight"]
    assert (found["kind"], found["culprit_ranks"]) == (kind, [loops.CULPRIT]), found
    assert output.count(f"error[{kind}]") == 1, output
    if line is not None:
        assert f"flight_loops.py:{line}" in output
    again = flight.diagnose(flight.load([folder / found["recorder"]], world_size=workers))
    assert (again.kind.value, again.culprit_ranks) == (kind, (loops.CULPRIT,)), "the same from the kept files"
    assert "Flight Recorder" in (folder.parents[1] / "report.html").read_text()
    return found


def test_a_rank_that_skips_a_collective_is_named(hang):
    outcome, output, folder = hang(loops.rank_skips)
    line = loops.line_of("if rank != CULPRIT") + 1
    found = named(outcome, output, folder, "missing_rank", line)  # the line where the others wait
    assert found["ranks_ended"][loops.CULPRIT]["how"] == "train_func has ended"


def test_a_rank_in_another_operation_is_named_with_its_line(hang):
    outcome, output, folder = hang(loops.other_operation)
    named(outcome, output, folder, "op_mismatch", loops.line_of("# the odd line"))


def test_a_rank_with_another_size_is_named_with_its_line(hang):
    outcome, output, folder = hang(loops.other_size, workers=4)
    found = named(outcome, output, folder, "size_mismatch", loops.line_of("640 if rank == CULPRIT"), workers=4)
    assert found["ranks_ended"][loops.CULPRIT]["how"] != "died", (
        "gloo aborts another rank, which is not taken for the culprit"
    )


def test_a_rank_that_died_is_named_although_it_left_no_dump(hang):
    outcome, output, folder = hang(loops.rank_dies)
    found = named(outcome, output, folder, "missing_rank")
    assert found["missing_dumps"] == [loops.CULPRIT]
    assert found["ranks_ended"][loops.CULPRIT]["how"] == "died"


def test_a_rank_that_sleeps_in_the_data_loader_is_named_with_the_line_where_it_sleeps(hang):
    outcome, output, folder = hang(loops.sleeps_in_the_data_loader)
    line = loops.line_of("# the data loader stands still")
    found = named(outcome, output, folder, "missing_rank", line)
    assert found["ranks_ended"][loops.CULPRIT]["place"].endswith(f"flight_loops.py:{line} in next_batch")
    assert "next_batch" in (folder / "stacks" / f"rank_{loops.CULPRIT}.txt").read_text()


def test_a_rank_with_one_collective_more_is_named_with_its_line(hang):
    outcome, output, folder = hang(loops.one_more_collective)
    named(outcome, output, folder, "missing_rank", loops.line_of("# only if loss.isnan()"))


def test_a_rank_that_raised_for_its_own_reason_is_told_from_a_hang(hang):
    outcome, output, folder = hang(loops.raises_alone)
    found = named(outcome, output, folder, "missing_rank", loops.line_of("a label out of range"))
    assert found["failure"] == "user_code_not_infra"
    assert found["summary"].startswith("rank 1 raised ValueError: a label out of range")


def test_a_rank_that_answers_nothing_is_named_with_the_line_that_its_node_can_see(hang):
    outcome, output, folder = hang(loops.keeps_the_gil)
    found = named(outcome, output, folder, "missing_rank", loops.line_of("ctypes.PyDLL(None).sleep"))
    assert found["ranks_ended"][loops.CULPRIT]["how"] == "does not answer"


def test_of_a_healthy_run_nothing_is_collected(hang):
    outcome, _, folder = hang(loops.healthy)
    assert outcome.error is None and outcome.report["flight"] is None
    assert not Path(folder).exists() and "flight" not in os.listdir(folder.parents[1])
