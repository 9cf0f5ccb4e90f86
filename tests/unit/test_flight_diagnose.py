"""The verdict over dumps: who holds up the others, across groups, and what is not claimed."""

from __future__ import annotations

import json

import pytest

from ray_nccl_guard import flight
from ray_nccl_guard.classes import FailureClass
from ray_nccl_guard.flight import Kind
from ray_nccl_guard.verdict import Certainty
from tests.unit.flight_builders import DATA, diagnose, dump, record

TP = [("1", "tp"), ("2", "tp")]  # ranks [0, 1] and [2, 3]
DP = [("3", "dp"), ("4", "dp")]  # ranks [0, 2] and [1, 3]
MESH = {("0", "default_pg"): (0, 1, 2, 3), TP[0]: (0, 1), TP[1]: (2, 3), DP[0]: (0, 2), DP[1]: (1, 3)}
PAIR = {("0", "default_pg"): (0, 1)}


def test_what_torch_recorded_names_whom_the_test_made_fail():
    """Dumps that torch wrote in jobs that were made to fail (tests/process/make_flight_dumps.py; NCCL on a fake CUDA)."""
    truth = json.loads((DATA / "truth.json").read_text())
    found = {name: flight.diagnose(flight.load([DATA / name])) for name in truth}
    assert {name: {"kind": v.kind.value, "culprits": list(v.culprit_ranks)} for name, v in found.items()} == truth
    certain = {name for name, v in found.items() if v.certainty is Certainty.ESTABLISHED}
    assert certain == {"skips", "mesh_skips", "other_size"}, "where gloo or one dump alone tell, less is claimed"
    assert {found[name].certainty for name in ("one_more", "nccl_legacy_skips")} == {Certainty.LIKELY}


def test_the_culprits_last_line_stands_beside_the_line_the_others_are_in():
    stacks = flight.diagnose(flight.load([DATA / "skips"])).stacks
    sides = {stack.culprit: (stack.ranks, stack.op, [frame.name for frame in stack.frames]) for stack in stacks}
    assert sides[True][:2] == ((2,), "broadcast") and "_steps" in sides[True][2]
    assert sides[False][:2] == ((0, 1, 3), "all_reduce") and "skips" in sides[False][2] and "_steps" not in sides[False][2]


def test_a_wait_is_followed_across_groups_to_the_rank_that_nobody_explains():
    # Rank 0 never comes to step 2 of its tp group. Rank 1 waits for it, so rank 3 waits for rank 1, and rank 2 for both.
    steps = {
        0: [record("all_reduce", 1, group=TP[0]), record("all_reduce", 1, group=DP[0])],
        1: [
            record("all_reduce", 1, group=TP[0]), record("all_reduce", 1, group=DP[1]),
            record("all_reduce", 2, "scheduled", group=TP[0]),
        ],
        2: [
            record("all_reduce", 1, group=TP[1]), record("all_reduce", 1, group=DP[0]), record("all_reduce", 2, group=TP[1]),
            record("all_reduce", 2, "scheduled", group=DP[0]),
        ],
        3: [
            record("all_reduce", 1, group=TP[1]), record("all_reduce", 1, group=DP[1]), record("all_reduce", 2, group=TP[1]),
            record("all_reduce", 2, "scheduled", group=DP[1]),
        ],
    }  # fmt: skip
    verdict = diagnose(*(dump(steps[rank], MESH) for rank in range(4)))
    assert (verdict.kind, verdict.culprit_ranks) == (Kind.MISSING_RANK, (0,))
    assert verdict.failure is FailureClass.COLLECTIVE_TIMEOUT_DESYNC


def test_a_rank_that_queued_behind_another_wait_is_not_blamed():
    # All are in the world's barrier except that rank 1 is still in its tp group, where rank 0 never came.
    waits = [record("barrier", 1, "scheduled")]
    behind = [record("all_reduce", 1, "scheduled", group=TP[0]), record("barrier", 1, "scheduled")]
    verdict = diagnose(dump([], MESH), dump(behind, MESH), dump(waits, MESH), dump(waits, MESH))
    assert verdict.culprit_ranks == (0,)


def test_a_call_that_ended_on_the_peers_only_names_the_rank_that_did_not_notice():
    done = [record("all_reduce", seq) for seq in range(1, 6)]
    stuck = [record("all_reduce", seq, "completed" if seq < 3 else "scheduled") for seq in range(1, 6)]
    verdict = diagnose(dump(done), dump(done), dump(stuck), dump(done))
    assert (verdict.kind, verdict.culprit_ranks, verdict.certainty) == (Kind.STALLED, (2,), Certainty.LIKELY)


def test_the_root_of_a_broadcast_may_be_done_before_the_others():
    # Rank 0 sent and went on; the others receive. That convicts nobody of a dead device.
    others = [record("broadcast", 1, "started")]
    verdict = diagnose(dump([record("broadcast", 1)]), dump(others), dump(others), dump(others))
    assert (verdict.kind, verdict.culprit_ranks) == (Kind.STALLED, ())


def test_a_rank_whose_stream_has_not_started_what_runs_on_the_others_is_named():
    verdict = diagnose(*(dump([record("all_reduce", 1, "scheduled" if rank == 3 else "started")]) for rank in range(4)))
    assert (verdict.kind, verdict.culprit_ranks, verdict.certainty) == (Kind.STALLED, (3,), Certainty.LIKELY)


def test_a_stall_of_all_names_nobody_and_says_so():
    verdict = diagnose(*(dump([record("all_reduce", 1, "started")]) for _ in range(4)))
    assert (verdict.kind, verdict.culprit_ranks, verdict.certainty) == (Kind.STALLED, (), Certainty.OPEN)


def test_a_stall_is_placed_where_it_began_not_where_others_queue_up_behind_it():
    groups = {("0", "default_pg"): (0, 1, 2, 3, 4), TP[0]: (0, 1)}
    stalled = [record("all_reduce", 1, "started", group=TP[0]), record("barrier", 1, "scheduled")]
    queued = [record("barrier", 1, "scheduled")]
    verdict = diagnose(dump(stalled, groups), dump(stalled, groups), *(dump(queued, groups) for _ in range(3)))
    assert verdict.kind is Kind.STALLED
    assert verdict.summary.startswith("ranks 0-1 are in all_reduce [16] Float, call 1 of group 1 (tp)")


def test_a_verdict_is_given_in_the_form_that_reports_take_too():
    verdict = flight.diagnose(flight.load([DATA / "skips"])).as_verdict()
    assert (verdict.failure, verdict.culprit_ranks, verdict.gloo_can_help) == (
        FailureClass.COLLECTIVE_TIMEOUT_DESYNC,
        (2,),
        False,
    )
    assert verdict.evidence and verdict.to_json()["certainty"] == "established"


def test_ranks_that_enter_their_groups_in_a_different_order_are_a_circle():
    groups = {("1", "a"): (0, 1), ("2", "b"): (0, 1)}
    first = [record("all_reduce", 1, "scheduled", group=("1", "a"))]
    second = [record("all_reduce", 1, "scheduled", group=("2", "b"))]
    verdict = diagnose(dump(first, groups), dump(second, groups))
    assert (verdict.kind, verdict.culprit_ranks, verdict.certainty) == (Kind.OP_MISMATCH, (0, 1), Certainty.OPEN)


def test_a_receiver_whose_sender_never_sent_names_the_sender():
    waiting = [record("recv 1<-0", 1, "scheduled", p2p=True)]
    verdict = diagnose(dump([], PAIR), dump(waiting, PAIR))
    assert (verdict.kind, verdict.culprit_ranks) == (Kind.MISSING_RANK, (0,))
    assert "recv 1<-0" in verdict.summary


def test_a_receiver_of_any_source_blames_nobody():
    verdict = diagnose(dump([], PAIR), dump([record("recv 1<-?", 1, "scheduled", p2p=True)], PAIR))
    assert verdict.culprit_ranks == ()


@pytest.mark.parametrize(
    ("odd", "kind"),
    [
        (record("broadcast", 2, "scheduled"), Kind.OP_MISMATCH),
        (record("all_reduce", 2, "scheduled", size=[32]), Kind.SIZE_MISMATCH),
        (record("all_reduce", 2, "scheduled", dtype="Half"), Kind.DTYPE_MISMATCH),
    ],
)
def test_the_rank_that_differs_from_the_rest_is_named(odd, kind):
    same = [record("all_reduce", 1), record("all_reduce", 2, "scheduled")]
    verdict = diagnose(dump(same), dump(same), dump([record("all_reduce", 1), odd]), dump(same))
    assert (verdict.kind, verdict.culprit_ranks, verdict.certainty) == (kind, (2,), Certainty.ESTABLISHED)


def test_a_mismatch_that_completed_everywhere_is_no_reason_for_a_hang():
    verdict = diagnose(*(dump([record("all_reduce", 1, size=[16 + (rank == 2)])]) for rank in range(4)))
    assert verdict.kind is Kind.NONE


@pytest.mark.parametrize(
    "op", ["all_to_all", "all_to_all_single", "alltoall_base"],
)  # fmt: skip
def test_unequal_splits_are_not_a_mismatch(op):
    verdict = diagnose(*(dump([record(op, 1, "started", size=[16 + rank])]) for rank in range(4)))
    assert verdict.kind is Kind.STALLED


def test_buffers_that_only_the_root_passes_are_not_a_mismatch():
    gather = [dump([record("gather", 1, "started", out=[64] if rank == 0 else [0])]) for rank in range(4)]
    assert diagnose(*gather).kind is Kind.STALLED


def test_two_shapes_of_one_size_are_not_a_mismatch():
    verdict = diagnose(*(dump([record("all_reduce", 1, "started", size=[16] if rank else [4, 4])]) for rank in range(4)))
    assert verdict.kind is Kind.STALLED


def test_a_pair_that_disagrees_is_judged_by_groups_like_it():
    def steps(rank, size):
        return dump([record("all_reduce", 1, "scheduled", group=TP[rank // 2], size=[size])], MESH)

    verdict = diagnose(steps(0, 8), steps(1, 9), steps(2, 8), steps(3, 8))
    assert (verdict.kind, verdict.culprit_ranks, verdict.certainty) == (Kind.SIZE_MISMATCH, (1,), Certainty.LIKELY)


def test_a_pair_that_disagrees_is_judged_by_what_it_did_before():
    usual = [record("all_reduce", 1, line=10), record("all_reduce", 2, line=10)]
    verdict = diagnose(
        dump([*usual, record("all_reduce", 3, "scheduled", line=10)], PAIR),
        dump([*usual, record("barrier", 3, "scheduled", line=99)], PAIR),
    )
    assert (verdict.kind, verdict.culprit_ranks) == (Kind.OP_MISMATCH, (1,))


def test_a_pair_that_disagrees_with_nothing_to_judge_by_is_named_in_full():
    verdict = diagnose(dump([record("all_reduce", 1, "scheduled")], PAIR), dump([record("barrier", 1, "scheduled")], PAIR))
    assert (verdict.kind, verdict.culprit_ranks, verdict.certainty) == (Kind.OP_MISMATCH, (0, 1), Certainty.OPEN)


def test_a_call_left_out_is_told_from_a_call_too_many():
    calls = [record("all_reduce", 1), record("barrier", 2, "scheduled"), record("all_reduce", 3, "scheduled", size=[8])]
    left_out = [record("all_reduce", 1), record("all_reduce", 2, "scheduled", size=[8])]
    verdict = diagnose(dump(calls), dump(left_out), dump(calls), dump(calls))
    assert verdict.culprit_ranks == (1,)
    assert any("left one call out" in line for line in verdict.because)


def test_an_innocent_rank_without_a_dump_is_not_blamed_where_another_is_out_of_step():
    same = [record("all_reduce", 1), record("all_reduce", 2, "scheduled")]
    verdict = diagnose(dump(same), None, dump([record("all_reduce", 1)]), dump(same))
    assert verdict.culprit_ranks == (2,)
    assert verdict.missing_dumps == (1,)
    assert verdict.certainty is not Certainty.ESTABLISHED
    assert any("not the absence of one" in line for line in verdict.cannot_say)


def test_a_rank_without_a_dump_that_all_wait_for_is_named_but_left_open():
    same = [record("all_reduce", 1, "scheduled")]
    verdict = diagnose(dump(same), dump(same), None, dump(same))
    assert (verdict.kind, verdict.culprit_ranks, verdict.certainty) == (Kind.MISSING_RANK, (2,), Certainty.OPEN)


def test_a_rank_that_is_ahead_of_all_others_is_the_odd_one_if_its_line_is_new():
    same = [record("all_reduce", seq, backend="gloo", line=5) for seq in (1, 2)]
    extra = [*same, record("all_reduce", 3, backend="gloo", line=77)]
    verdict = diagnose(dump(same), dump(extra), dump(same), dump(same))
    assert (verdict.culprit_ranks, verdict.certainty) == ((1,), Certainty.LIKELY)


def test_a_ring_that_has_wrapped_differently_on_two_ranks_is_lined_up_by_number():
    def last(first, upto):
        state = {upto: "scheduled"}
        return dump([record("all_reduce", s, state.get(s, "completed")) for s in range(first, upto + 1)], first=first - 1)

    verdict = diagnose(last(500, 700), last(520, 700), last(480, 699), last(500, 700))
    assert verdict.culprit_ranks == (2,) and verdict.kind is Kind.STALLED  # 699 ended on the others, and not there
    behind = dump([record("all_reduce", s) for s in range(480, 700)], first=479)
    verdict = diagnose(last(500, 700), last(520, 700), behind, last(500, 700))
    assert (verdict.kind, verdict.culprit_ranks) == (Kind.MISSING_RANK, (2,))


def test_a_subgroup_of_gloo_without_members_on_record_says_that_it_does_not_know():
    pair = ("1", "undefined")
    verdict = diagnose(*(dump([record("barrier", 1, group=pair, backend="gloo")], {("", ""): ()}) for _ in range(2)))
    assert any("does not tell the members" in line for line in verdict.cannot_say)


def test_members_that_the_caller_knows_are_used():
    pair = ("1", "undefined")
    files = {
        "fr_0": dump([record("barrier", 1, group=pair, backend="gloo")], {("", ""): ()}),
        "fr_1": dump([], {("", ""): ()}),
    }
    assert flight.diagnose(flight.load(files)).culprit_ranks == ()
    assert flight.diagnose(flight.load(files, members={"1": [0, 1]})).culprit_ranks == (1,)


def test_dumps_of_active_calls_only_say_that_absence_may_be_completion():
    stuck = [record("all_reduce", 900, "scheduled")]
    verdict = diagnose(*(dump(stuck, first=899) for _ in range(3)), dump([], pg_status={"0": {}}))
    assert verdict.culprit_ranks == (3,)
    assert verdict.certainty is Certainty.LIKELY
    assert any("unfinished calls only" in line for line in verdict.cannot_say)


def test_nothing_to_read_is_no_verdict_of_health():
    verdict = flight.diagnose(flight.load({}))
    assert (verdict.kind, verdict.certainty) == (Kind.NONE, Certainty.OPEN)
