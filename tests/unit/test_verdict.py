"""What the verdict makes of a probe's outcomes, of findings, and of ranks that disagree."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ray_nccl_guard.classes import CLASSES
from ray_nccl_guard.classes import FailureClass as F
from ray_nccl_guard.evidence import Origin
from ray_nccl_guard.probe.spec import Outcome, ProbeResult, Step, StepRecord
from ray_nccl_guard.verdict import Certainty, Role, classify
from tests.unit.builders import died, failed, finding, lines, ok, timed_out, waiting, world
from tests.unit.test_verdict_misleading import logs, named, timeout

OOM = "host-0:1:2 [3] include/alloc.h:178 NCCL WARN Cuda failure 'out of memory'"
CLOSED = "host-0:1:2 [0] misc/socket.cc:49 NCCL WARN socketProgress: Connection closed by remote peer host-0<51159>"


def test_a_world_without_a_failure_is_ok_and_established():
    verdict = classify(world(ok(0), ok(1)))
    assert (verdict.failure, verdict.certainty) == (F.OK, Certainty.ESTABLISHED)


def test_a_log_without_a_failure_is_unknown_and_never_ok():
    assert classify(logs()).failure is F.UNKNOWN
    assert named("epoch 3 done").failure is F.UNKNOWN


def test_a_cause_on_one_rank_beats_echoes_on_all_others():
    verdict = classify(
        world(failed(0, Step.COMM_INIT, CLOSED), failed(1, Step.COMM_INIT, OOM), failed(2, Step.COMM_INIT, CLOSED))
    )
    assert (verdict.failure, verdict.culprit_ranks, verdict.certainty) == (F.GPU_OUT_OF_MEMORY, (1,), Certainty.ESTABLISHED)
    assert [quote.role for quote in verdict.evidence] == [Role.CAUSE, Role.CASCADE, Role.CASCADE]
    assert verdict.evidence[0].text == OOM


def test_a_rank_still_on_its_way_when_another_failed_is_no_culprit_and_its_step_is_not_the_failing_one():
    closed = "[gloo/transport/tcp/pair.cc:561] Connection closed by peer [127.0.0.1]:31896."
    behind = failed(2, Step.COMM_INIT, f"RuntimeError: Gloo connectFullMesh failed with {closed}")
    verdict = classify(world(failed(0, Step.COLLECTIVE, closed), failed(1, Step.COLLECTIVE, OOM), behind, backend="gloo"))
    assert (verdict.failure, verdict.culprit_ranks, verdict.step) == (F.GPU_OUT_OF_MEMORY, (1,), Step.COLLECTIVE)


@pytest.mark.parametrize(
    "own", ["ncclSystemError: System call failed or device error.", "RuntimeError: a text of tomorrow's NCCL"]
)
def test_an_error_that_no_rule_knows_stands_above_the_echoes_of_its_end(own: str):
    echoes = [failed(rank, Step.COLLECTIVE, CLOSED) for rank in (0, 2, 3)]
    verdict = classify(world(*echoes, failed(1, Step.COLLECTIVE, own)))
    assert (verdict.failure, verdict.culprit_ranks) == (F.UNKNOWN, (1,)) and own in verdict.summary
    assert {quote.role for quote in verdict.evidence} == {Role.CASCADE}
    assert classify(world(*echoes, waiting(1))).failure is F.REMOTE_PEER_DIED


def test_a_rank_that_torch_aborts_for_an_error_of_nccl_has_not_crashed_and_nothing_has_timed_out():
    work = "[Rank 1] Collective WorkNCCL(SeqNum=1, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000)"
    raised = f"{work} raised the following async exception: NCCL error: unhandled system error, NCCL version 2.30.7"
    dump = "[PG ID 0 Rank 1] Received a dump signal due to a collective timeout from this local rank and we will try our best to dump"
    aborted = died(1, Step.COLLECTIVE, 6, raised, dump)
    for others in (waiting(0), failed(0, Step.COLLECTIVE, CLOSED)):
        verdict = classify(world(others, aborted, waiting(2)))
        assert (verdict.failure, verdict.culprit_ranks) == (F.UNKNOWN, (1,)) and "unhandled system error" in verdict.summary
    assert classify(world(waiting(0), died(1, Step.COLLECTIVE, 11, raised))).failure is F.PROCESS_CRASHED


def test_the_same_watchdog_text_is_a_hang_from_a_probe_and_a_desync_from_a_training_log():
    text = timeout(0, seq=1580)
    from_probe = classify(world(failed(0, Step.COLLECTIVE, text), failed(1, Step.COLLECTIVE, timeout(1, seq=1580))))
    from_log = named(text, timeout(1, seq=1580))
    assert from_probe.failure is F.INIT_TIMEOUT_HANG
    assert from_log.failure is F.COLLECTIVE_TIMEOUT_DESYNC
    assert from_log.certainty is Certainty.OPEN


@pytest.mark.parametrize("origin", [Origin.PROBE, Origin.TRAINING_GROUP])
def test_our_own_program_is_never_blamed(origin: Origin):
    text = "RuntimeError: Detected mismatch between collectives on ranks. Rank 1 is running collective: X"
    verdict = classify(world(failed(0, Step.COLLECTIVE, text), waiting(1), origin=origin))
    assert verdict.failure is F.VERSION_MISMATCH
    blamed = {F.COLLECTIVE_TIMEOUT_DESYNC, F.SHAPE_OR_DTYPE_MISMATCH, F.USER_CODE_NOT_INFRA}
    assert not blamed & {c.failure for c in verdict.candidates}


def test_silence_of_all_ranks_is_a_hang_and_never_established():
    verdict = classify(world(*(timed_out(rank, Step.COMM_INIT, silent_s=1.0) for rank in range(4))))
    assert (verdict.failure, verdict.certainty, verdict.culprit_ranks) == (F.INIT_TIMEOUT_HANG, Certainty.OPEN, ())
    assert verdict.step is Step.COMM_INIT


def test_the_rank_whose_python_stands_still_is_the_suspect():
    results = [timed_out(rank, Step.COMM_INIT, silent_s=31.0 if rank == 2 else 0.6) for rank in range(4)]
    verdict = classify(world(*results))
    assert verdict.culprit_ranks == (2,)
    assert "rank 2 stands still" in verdict.summary


def test_ranks_that_a_busy_machine_held_up_for_a_moment_do_not_stand_still():
    in_step = (StepRecord(step=Step.COLLECTIVE, outcome=Outcome.TIMED_OUT, seconds=7.0),)
    silent_s = [0.4, 2.4, 6.5, 2.8]
    held_up = [timed_out(rank, Step.COLLECTIVE, steps=in_step, silent_s=min(s, 2.8)) for rank, s in enumerate(silent_s)]
    frozen = [timed_out(rank, Step.COLLECTIVE, steps=in_step, silent_s=s) for rank, s in enumerate(silent_s)]
    assert classify(world(*held_up)).culprit_ranks == ()
    assert classify(world(*frozen)).culprit_ranks == (2,)


def test_a_stopped_process_is_the_suspect():
    results = [timed_out(rank, Step.COMM_INIT, process_state="T" if rank == 1 else "S") for rank in range(3)]
    assert classify(world(*results)).culprit_ranks == (1,)


def test_the_rank_whose_nccl_log_got_least_far_is_a_suspect_and_not_more():
    done = "host-0:1:2 [0] NCCL INFO ncclCommInitRank comm 0x0 rank 0 nranks 3 cudaDev 0 - Init COMPLETE"
    start = "host-0:1:2 [0] NCCL INFO Bootstrap : Using eth0:10.0.0.1<0>"
    verdict = classify(world(
        timed_out(0, Step.COLLECTIVE, done), timed_out(1, Step.COLLECTIVE, start), timed_out(2, Step.COLLECTIVE, done),
    ))  # fmt: skip
    assert verdict.culprit_ranks == (1,)
    assert verdict.certainty is not Certainty.ESTABLISHED


def test_a_rank_that_died_by_a_signal_is_named_and_the_waiting_ones_are_not():
    verdict = classify(world(waiting(0), died(1, Step.COMM_INIT, 11), waiting(2)))
    assert (verdict.failure, verdict.culprit_ranks) == (F.PROCESS_CRASHED, (1,))
    assert "signal 11" in verdict.summary


def test_a_kernel_line_explains_a_death():
    line = "Memory cgroup out of memory: Killed process 77 (python)"
    verdict = classify(world(waiting(0), died(1, Step.COMM_INIT, 9, kernel_lines=(line,))))
    assert (verdict.failure, verdict.culprit_ranks) == (F.HOST_OOM_KILLED, (1,))


def test_an_xid_line_explains_a_hang():
    xid = "NVRM: Xid (PCI:0000:41:00): 79, pid=7, GPU has fallen off the bus."
    verdict = classify(world(timed_out(0, Step.COLLECTIVE), timed_out(1, Step.COLLECTIVE, kernel_lines=(xid,))))
    assert (verdict.failure, verdict.culprit_ranks, verdict.gloo_can_help) == (F.HARDWARE_XID_ECC, (1,), False)


def test_a_rank_without_an_answer_is_missing_and_not_acquitted():
    verdict = classify(world(ok(0), waiting(1), size=3))
    assert (verdict.failure, verdict.culprit_ranks) == (F.MISSING_RANK, (2,))


def test_a_wrong_value_is_corruption_for_sure():
    text = "WrongResult: wrong result: all_reduce returned 3 where 6 is right (1 of 8 elements differ, the first at 0)"
    verdict = classify(world(failed(0, Step.COLLECTIVE, error=text), ok(1)))
    assert (verdict.failure, verdict.certainty, verdict.culprit_ranks) == (
        F.WRONG_RESULT_CORRUPTION,
        Certainty.ESTABLISHED,
        (0,),
    )


def test_a_finding_that_decides_is_a_verdict_even_where_nothing_has_failed():
    hazard = finding("no_kernel_image", "libnccl has no image for sm_120", decides=True, culprit_ranks=(1,))
    verdict = classify(world(ok(0), ok(1), findings=(hazard,)))
    assert (verdict.failure, verdict.certainty) == (F.NO_KERNEL_IMAGE, Certainty.ESTABLISHED)
    assert (verdict.summary, verdict.culprit_ranks) == ("libnccl has no image for sm_120", (1,))


def test_a_finding_that_only_explains_is_silent_where_nothing_failed_and_speaks_where_something_did():
    acs = finding("p2p_or_acs", "ACS is on between GPU 0 and 1", relief={"NCCL_P2P_DISABLE": "1"})
    assert classify(world(ok(0), ok(1), findings=(acs,))).failure is F.OK
    verdict = classify(world(timed_out(0, Step.COLLECTIVE), timed_out(1, Step.COLLECTIVE), findings=(acs,)))
    assert (verdict.failure, dict(verdict.relief)) == (F.P2P_OR_ACS, {"NCCL_P2P_DISABLE": "1"})
    assert verdict.certainty is Certainty.OPEN
    assert verdict.candidates[1].failure is F.INIT_TIMEOUT_HANG


def test_a_finding_that_only_explains_does_not_outweigh_a_named_cause():
    acs = finding("p2p_or_acs", "ACS is on")
    assert classify(world(failed(0, Step.COMM_INIT, OOM), waiting(1), findings=(acs,))).failure is F.GPU_OUT_OF_MEMORY


def test_an_unknown_error_is_quoted_and_its_rank_named():
    verdict = classify(world(failed(0, Step.COMM_INIT, error="RuntimeError: the moon is in the wrong house"), waiting(1)))
    assert (verdict.failure, verdict.culprit_ranks) == (F.UNKNOWN, (0,))
    assert "the moon is in the wrong house" in verdict.summary


def test_gloo_is_never_promised_on_a_guess_from_a_log():
    for text in ("NCCL all_reduce_perf test hangs with multiple RTX 4090 GPUs", timeout(0, seq=1)):
        assert named(text).gloo_can_help is not True


def test_ranks_in_different_collectives_have_diverged_and_the_odd_one_is_the_suspect():
    verdict = named(timeout(0, seq=532341, op="_ALLGATHER_BASE", numel=513), timeout(1, seq=532339), timeout(2, seq=532339))
    assert (verdict.failure, verdict.certainty, verdict.culprit_ranks) == (
        F.COLLECTIVE_TIMEOUT_DESYNC,
        Certainty.LIKELY,
        (0,),
    )


def test_sequence_numbers_of_different_groups_are_not_compared():
    texts = (
        "[PG ID 1 PG GUID 3 Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5, OpType=ALLREDUCE, NumelIn=1",
        "[PG ID 2 PG GUID 9 Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=900, OpType=ALLREDUCE, NumelIn=1",
    )
    assert named(*texts).certainty is Certainty.OPEN


def test_the_rank_that_only_relays_a_timeout_had_nothing_pending_and_is_the_suspect():
    own = "[rank1]:[E] [PG ID 0 PG GUID 0(default_pg) Rank 1] Received a dump signal due to a collective timeout from this local rank"
    relay = "[rank0]:[E] [PG ID 0 Rank 0] Observed flight recorder dump signal from another rank via TCPStore."
    assert named(relay, own).culprit_ranks == (0,)


def test_ranks_absent_from_a_barrier_are_named_by_it():
    verdict = named("RuntimeError: [Rank 0]: Ranks 4, 5, 6, 7 failed to pass monitoredBarrier in 2000000 ms", world=8)
    assert (verdict.failure, verdict.culprit_ranks) == (F.MISSING_RANK, (4, 5, 6, 7))


def test_every_class_can_be_said_of_a_rank_and_has_a_next_step():
    for failure, facts in CLASSES.items():
        assert facts.summary[0].islower() or facts.summary.startswith(
            ("NCCL", "NVLink", "CUDA", "InfiniBand", "/dev/shm", "GPU")
        )
        assert not facts.summary.endswith("."), failure
    for failure in set(F) - {F.OK, F.UNKNOWN}:
        verdict = classify(
            world(failed(0, Step.COMM_INIT, error="x"), ok(1), findings=(finding(failure.value, decides=True),))
        )
        assert verdict.next, failure


def test_a_verdict_is_json():
    import json

    verdict = classify(world(failed(0, Step.COMM_INIT, OOM), waiting(1)))
    told = json.loads(json.dumps(verdict.to_json()))
    assert set(told) >= {"failure", "certainty", "candidates", "culprit_ranks", "scope", "gloo_can_help", "evidence", "next"}
    assert told["evidence"][0] == {"rank": 0, "line": 1, "text": OOM, "role": "cause", "source": "nccl"}


def test_a_probe_that_never_ran_is_unknown():
    results = [ProbeResult(rank=rank, outcome=Outcome.NOT_RUN) for rank in range(2)]
    assert classify(world(*results)).failure is F.UNKNOWN


def test_lines_with_carriage_returns_and_colours_are_read():
    result = ProbeResult(
        rank=0, outcome=Outcome.FAILED, step=Step.COMM_INIT, lines=lines(f"10%|#\r20%|##\r\x1b[31m{OOM}\x1b[0m")
    )
    assert classify(world(result, waiting(1))).failure is F.GPU_OUT_OF_MEMORY


def test_a_more_specific_signature_voids_the_general_one():
    ordinal = named("host-0:1:2 [0] transport/p2p.cc:275 NCCL WARN Cuda failure 101 'invalid device ordinal'")
    assert ordinal.failure is F.CUMEM_CONTAINER_CAPS
    assert F.NO_GPU_VISIBLE not in [c.failure for c in ordinal.candidates]
    shm = named(
        "host-0:1:2 [1] transport/shm.cc:590 NCCL WARN Cuda failure 217 'peer access is not supported between these two'"
    )
    assert "p2p-ipc-handle" not in [rule for c in shm.candidates for rule in c.rules]


def test_a_signature_that_needs_another_is_void_without_it():
    ordinary = "[rank3]: KeyError: 'loss'"
    assert named("", "", "", ordinary).failure is F.UNKNOWN
    assert named(timeout(0, seq=40), "", "", ordinary).failure is F.USER_CODE_NOT_INFRA


def test_the_hosts_of_the_culprits_stand_in_the_json_and_follow_a_change_of_the_ranks():
    evidence = world(*(failed(r, Step.COMM_INIT, OOM if r in (2, 3) else CLOSED) for r in range(6)))
    hosted = tuple(replace(record, host=f"node-{record.rank // 2}") for record in evidence.ranks)
    verdict = classify(replace(evidence, ranks=hosted))
    assert verdict.culprit_ranks == (2, 3)
    assert verdict.to_json()["culprit_hosts"] == ["node-1"]
    assert replace(verdict, culprit_ranks=(0, 5)).culprit_hosts == ("node-0", "node-2")
    assert classify(evidence).to_json()["culprit_hosts"] == []
