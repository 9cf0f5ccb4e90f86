"""A guarded fit() of a real Ray on fake GPUs: the fault is named before train_func, and the same fit() goes on or is refused."""

from __future__ import annotations

import pytest

from tests.fakegpu.fits import SHORT, WHOLE, Fit, Fits, trained_on, verdict
from tests.fakegpu.matrix import NEW

pytestmark = pytest.mark.timeout(600)  # of which a fit() of two workers takes 12 s on an idle machine


def test_a_healthy_job_proceeds_on_nccl_each_worker_on_its_own_gpu(fits: Fits) -> None:
    run = fits.guarded(train="train", workers=4, spec=WHOLE)
    trained_on(run, "nccl", 4)
    assert run.report["action"] == "proceed" and run.report["verdict"]["failure"] == "ok"
    assert len({n["gpu"] for n in run.notes}) == 4
    assert [r["gpu"]["uuid"] for r in run.report["ranks"]] == ["GPU-" + n["gpu"] for n in run.notes], (
        "the facts name the GPU that training used"
    )
    same_losses(run)


@pytest.mark.torch_versions
def test_nccl_that_breaks_from_four_workers_on_is_named_and_the_same_fit_trains_on_gloo(fits: Fits) -> None:
    run = fits.guarded("allreduce:cuda700@world>=4", train="train", workers=4, spec=WHOLE)
    trained_on(run, "gloo", 4)
    assert verdict(run) == ("illegal_memory_access", [], "collective")
    assert run.report["action"] == "fall_back" and run.report["backend_wanted"] == "nccl"
    smaller = "worlds of 3 work and fail from 4 on"
    assert smaller in run.report["located"]["sentence"] and run.told(smaller), "the report and the message say so"
    same_losses(run)


def same_losses(run: Fit) -> None:
    # float32 sums in another order: differences of single roundings, which three steps do not amplify beyond 1e-5.
    for noted in run.notes:
        assert noted["losses"] == pytest.approx(noted["alone"], rel=1e-5)


@pytest.mark.long
def test_nccl_that_breaks_from_512_kib_on_is_not_passed_by_a_small_message(fits: Fits) -> None:
    run = fits.guarded("allreduce:cuda700@bytes>=512K", spec=WHOLE)
    trained_on(run, "gloo")
    assert verdict(run) == ("illegal_memory_access", [0, 1], "collective"), "each of the two meets it alone"
    assert "all_reduce 1048576 B" in str(run.report["attempts"][0]), run.report["attempts"][0]


@pytest.mark.torch_versions
def test_a_setting_that_cures_the_fault_keeps_training_on_nccl(fits: Fits) -> None:
    run = fits.guarded("init:preset=p2p@without=NCCL_P2P_DISABLE=1")
    trained_on(run, "nccl")
    assert verdict(run)[0] == "p2p_or_acs"
    assert run.report["action"] == "fall_back" and run.report["relief"] == {"NCCL_P2P_DISABLE": "1"}
    assert [n["nccl"] for n in run.notes] == [{"NCCL_P2P_DISABLE": "1"}] * 2


@pytest.mark.torch_versions
def test_a_training_group_that_fails_although_the_probe_passed_gets_fresh_workers(fits: Fits) -> None:
    # The probe's communicator is rank 1's first on the node, the training group's its second.
    run = fits.guarded("init:error=2@rank1#2@shared")
    origins = [(a["origin"], a["backend"], a["failure"]) for a in run.report["attempts"]]
    following = "nccl-legacy" if NEW else "gloo"
    trained_on(run, following)
    assert origins[:2] == [("probe", "nccl", "ok"), ("training_group", "nccl", "unknown")], origins
    assert origins[2][:2] == ("probe", following), origins
    assert run.report["attempts"][1]["culprit_ranks"] == [1]


@pytest.mark.slow
def test_a_training_group_that_hangs_is_ended_at_its_deadline(fits: Fits) -> None:
    run = fits.guarded("init:hang@rank1#2@shared", spec=SHORT)
    trained_on(run, "nccl-legacy" if NEW else "gloo")
    assert [a["origin"] for a in run.report["attempts"][:2]] == ["probe", "training_group"]
    assert run.report["attempts"][1]["failure"] == "init_timeout_hang"


@pytest.mark.long
def test_a_slow_but_healthy_init_proceeds_and_shows_in_the_timings(fits: Fits) -> None:
    run = fits.guarded("init:delay=3000@rank1")
    trained_on(run, "nccl")
    assert run.report["action"] == "proceed" and run.report["timings_s"]["comm_init"] > 3.0


@pytest.mark.long
def test_an_init_slower_than_its_deadline_that_still_logs_is_waited_for_once(fits: Fits) -> None:
    run = fits.guarded("init:delay=11000@rank1@chatty#1@shared", spec=SHORT)
    trained_on(run, "nccl")
    assert run.report["action"] == "proceed" and run.report["timings_s"]["comm_init"] > 10.0


@pytest.mark.parametrize("module", ["asks_cuda", pytest.param("uses_threads", marks=pytest.mark.long)])
def test_a_users_module_that_spoils_a_fork_at_import_costs_a_healthy_job_nothing(fits: Fits, module: str) -> None:
    run = fits.guarded(brings=f"tests.fakegpu.{module}")
    trained_on(run, "nccl")
    assert run.report["action"] == "proceed" and run.report["verdict"]["failure"] == "ok"
    starts = {o["start"] for a in run.report["attempts"] for o in a["outcomes"]}
    assert starts == ({"spawn"} if module == "asks_cuda" else {"fork"})


def test_two_workers_on_one_gpu_are_named_before_any_call_of_nccl(fits: Fits) -> None:
    run = fits.guarded("init:abort", gpus=0.5)
    trained_on(run, "gloo")
    assert verdict(run)[:2] == ("duplicate_gpu", [0, 1])
    assert {o["outcome"] for o in run.report["attempts"][0]["outcomes"]} == {"not_run"}
    assert len({n["gpu"] for n in run.notes}) == 1


@pytest.mark.slow
def test_a_worker_with_several_gpus_is_proved_on_the_one_that_it_trains_on(fits: Fits) -> None:
    run = fits.guarded(train="train", gpus=2)
    trained_on(run, "nccl")
    assert run.report["action"] == "proceed" and run.report["verdict"]["failure"] == "ok"
    assert [len(r["gpu_ids"]) for r in run.report["ranks"]] == [2, 2]
    assert [r["gpu"]["uuid"] for r in run.report["ranks"]] == ["GPU-" + n["gpu"] for n in run.notes]
    same_losses(run)


@pytest.mark.slow
def test_settings_made_inside_train_func_are_warned_about(fits: Fits) -> None:
    run = fits.guarded(train="sets_late")
    trained_on(run, "nccl")
    assert run.told("train_func changed NCCL_P2P_DISABLE=1, which had no effect"), run.logged[-3000:]


@pytest.mark.slow
def test_code_that_reads_the_group_and_code_that_makes_its_own_both_work(fits: Fits) -> None:
    run = fits.guarded(train="makes_its_own_group")
    trained_on(run, "nccl")
    for noted in run.notes:
        assert noted["launch"] and noted["bound"] == noted["accelerate"] == f"cuda:{noted['rank']}"


@pytest.mark.long
def test_a_fault_that_gloo_would_not_help_is_refused_before_train_func(fits: Fits) -> None:
    run = fits.guarded("init:preset=ecc@rank1")
    assert run.error is not None and run.error[0] == "NcclInitRefused", run.error
    assert verdict(run) == ("hardware_xid_ecc", [1], "comm_init")
    assert run.notes == [] and run.left == []


@pytest.mark.slow
def test_a_job_that_loses_a_worker_is_guarded_again_and_resumes_to_the_same_loss(fits: Fits) -> None:
    fault = "allreduce:cuda700@bytes>=512K"
    loop = {"checkpoints": True, "steps": 4, "dies_at": 2}
    run = fits.guarded(fault, train="train", loop=loop, max_failures=1)
    trained_on(run, "gloo")
    # The last checkpoint before the death may or may not have been taken in by then.
    assert {n["first"] for n in run.notes} in ({1}, {2}), "it resumed from a checkpoint"
    assert [a["group_attempt"] for a in run.report["attempts"]][-1] == 2, "the new workers were proved again"
    same_losses(run)
