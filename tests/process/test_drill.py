"""Drills in real processes: the verdict is that of the fault, NCCL is not touched, and what is fallen back to is proved for real."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace

import pytest

from ray_nccl_guard.classes import FailureClass
from ray_nccl_guard.evidence import align
from ray_nccl_guard.probe.drill import parse
from ray_nccl_guard.probe.spec import Outcome, ProbeSpec, Step
from ray_nccl_guard.verdict import classify
from tests.fakegpu.matrix import CASES
from tests.process.ranks import run_ranks
from tests.process.test_probe_verb import run

pytest.importorskip("torch", reason="torch is not installed")
SPEC = ProbeSpec(store_s=2, comm_init_s=3, comm_init_per_rank_s=0, collective_s=3, device_s=5, teardown_s=3)
F = FailureClass


def acted(fault: str, world_size: int = 3, spec: ProbeSpec = SPEC, environ: Mapping[str, str] | None = None):
    faults = parse(fault)
    return run_ranks(
        world_size, backend="nccl", spec=spec, collectives=("broadcast", "all_gather"),
        drill=lambda rank: tuple(f for f in faults if f.strikes(rank, world_size, environ or {})),
    )  # fmt: skip


def understood(fault: str) -> bool:
    try:
        return bool(parse(fault))
    except ValueError:
        return False


SAME = [case for case in CASES if understood(case.fault)]


def test_a_drill_can_play_most_of_what_the_fake_nccl_can():
    assert len(SAME) > len([case for case in CASES if case.fault]) / 2


@pytest.mark.long
@pytest.mark.parametrize("case", SAME, ids=lambda case: case.name)
def test_a_fault_of_the_fake_gpus_is_named_in_a_drill_as_it_is_named_there(case):
    spec = replace(SPEC, **{"comm_init_per_rank_s": 0, **case.spec})
    results = acted(case.fault, case.ranks, spec, case.env)
    verdict = classify(align(results, world_size=case.ranks, backend="nccl"))
    expected = [case.expected(backend) for backend in ("nccl", "nccl-legacy")]
    assert verdict.failure.value in [e["failure"] for e in expected], [(r.outcome, r.error) for r in results]
    assert (verdict.step.value if verdict.step else None) in [e["step"] for e in expected]
    # Where all fail alike, only small worlds can tell who it is.
    assert verdict.culprit_ranks in (case.culprits, ())


@pytest.mark.parametrize(
    "fault, failure, step, culprits",
    [
        ("init:error=2@rank1", F.UNKNOWN, Step.COMM_INIT, (1,)),
        ("init:preset=shm", F.SHM_TOO_SMALL, Step.COMM_INIT, (0, 1, 2)),
        ("init:oom@rank2", F.GPU_OUT_OF_MEMORY, Step.COMM_INIT, (2,)),
        ("allreduce:cuda700@rank1@bytes>=512K", F.ILLEGAL_MEMORY_ACCESS, Step.COLLECTIVE, (1,)),
        ("allgather:wrong@rank0", F.WRONG_RESULT_CORRUPTION, Step.COLLECTIVE, (0,)),
        ("coll:abort@rank2", F.PROCESS_CRASHED, Step.COLLECTIVE, (2,)),
        ("init:segv@rank1", F.PROCESS_CRASHED, Step.COMM_INIT, (1,)),
        ("allreduce:kill@rank0", F.PROCESS_CRASHED, Step.COLLECTIVE, (0,)),
        ("allreduce:hang-gil@rank1", F.INIT_TIMEOUT_HANG, Step.COLLECTIVE, (1,)),
        ("store:hang@rank1", F.MISSING_RANK, Step.STORE, (1,)),
    ],
)
def test_a_fault_is_named_on_the_rank_and_in_the_step_where_it_is_acted_out(fault, failure, step, culprits):
    results = acted(fault)
    verdict = classify(align(results, world_size=3, backend="nccl"))
    assert (verdict.failure, verdict.step) == (failure, step), [(r.outcome, r.error) for r in results]
    # Where all fail alike, nobody is singled out before small worlds have been tried.
    assert verdict.culprit_ranks == culprits or (len(culprits) == 3 and verdict.culprit_ranks == ())
    assert not any(r.proved for r in results), "what was acted out proves nothing"


def test_the_detail_tells_the_size_at_which_it_struck():
    assert acted("allreduce:cuda700@bytes>=32M", 2)[0].detail == "all_reduce 33554432 B"


def test_ranks_that_meet_no_fault_wait_for_the_one_that_does():
    outcomes = [r.outcome for r in acted("allreduce:cuda700@rank1")]
    assert outcomes == [Outcome.WAITING, Outcome.FAILED, Outcome.WAITING], "NCCL does not notice that a peer has gone"


def drill(*words: str) -> tuple[int, dict, str]:
    code, out, err = run("drill", "--json", "--timeout", "3", *words)
    return code, json.loads(out) if out else {}, err


def test_the_verb_falls_back_for_real_and_says_in_the_report_what_was_acted_out():
    code, report, err = drill("--ranks", "2", "--fault", "allreduce:cuda700@rank1")
    assert code == 0 and report["exit"] == 10 and "would have ended with exit code 10" in err
    assert report["verdict"]["failure"] == "illegal_memory_access" and report["verdict"]["culprit_ranks"] == [1]
    assert (report["action"], report["backend_chosen"]) == ("fall_back", "gloo") and report["collectives_proved"]
    acted_out = {a["backend"]: a["drill"] for a in report["attempts"]}
    assert report["drill"] == acted_out["nccl"] == "allreduce:cuda700@rank1" and acted_out["gloo"] == ""


def test_a_setting_that_cures_the_fault_is_then_proved_for_real():
    code, report, _ = drill("--ranks", "2", "--fault", "init:preset=p2p@without=NCCL_P2P_DISABLE=1")
    first, relieved, last = report["attempts"]
    assert code == 0 and first["failure"] == "p2p_or_acs" and first["drill"]
    assert relieved["env"] == {"NCCL_P2P_DISABLE": "1"} and relieved["drill"] == ""
    assert relieved["failure"] == "no_gpu_visible", (
        "a machine without a GPU has no NCCL to go back to, whatever the drill says"
    )
    assert last["backend"] == "gloo" and last["failure"] == "ok"


def test_a_hang_is_located_by_small_worlds_that_are_acted_out_too():
    code, report, _ = drill("--ranks", "3", "--fault", "init:hang@rank2", "--policy", "strict")
    assert code == 0 and report["exit"] == 20 and report["action"] == "refuse"
    assert report["verdict"]["failure"] == "init_timeout_hang" and report["verdict"]["culprit_ranks"] == [2]


def test_a_delay_that_nothing_fails_on_is_followed_by_a_real_proof():
    code, report, _ = drill("--ranks", "2", "--backend", "gloo", "--fault", "init:delay=300@rank1")
    assert code == 0 and report["action"] == "proceed" and report["collectives_proved"]
    assert [a["drill"] for a in report["attempts"]] == [""] and "outlived init:delay=300@rank1" in " ".join(report["notes"])


@pytest.mark.parametrize(
    "words, said",
    [
        (("--fault", "init:hagn"), "did you mean hang?"),
        (("--fault", "init:hang@rank7", "--ranks", "2"), "strikes none of the 2 ranks on nccl"),
        (("--fault", "init:error=2", "--ranks", "2", "--backend", "gloo"), "strikes none of the 2 ranks on gloo"),
        (("--fault", "init:hang", "--sweep"), "--sweep"),
    ],
)
def test_a_drill_that_cannot_be_is_wrong_usage(words, said):
    code, report, err = drill(*words)
    assert code == 2 and report == {} and said in err
