"""A guarded fit() that goes wrong in one more way (`make test-long`): the dumps are kept and the culprit is named, with its line."""

from __future__ import annotations

import pytest

from tests.ray import flight_loops as loops
from tests.ray.flight_fits import named

# A fit() takes 12 s alone, and minutes on a crowded two-core machine.
pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]


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


def test_a_rank_with_one_collective_more_is_named_with_its_line(hang):
    outcome, output, folder = hang(loops.one_more_collective)
    named(outcome, output, folder, "missing_rank", loops.line_of("# only if loss.isnan()"))


def test_a_rank_that_answers_nothing_is_named_with_the_line_that_its_node_can_see(hang):
    outcome, output, folder = hang(loops.keeps_the_gil)
    found = named(outcome, output, folder, "missing_rank", loops.line_of("ctypes.PyDLL(None).sleep"))
    assert found["ranks_ended"][loops.CULPRIT]["how"] == "does not answer"


def test_a_rank_in_another_operation_of_its_row_of_a_mesh_is_named_with_its_line(hang):
    outcome, output, folder = hang(loops.mesh_other_operation, workers=4)
    named(outcome, output, folder, "op_mismatch", loops.line_of("# the odd call of the mesh"), workers=4)
