"""What is done about each class, and which rung comes next."""

from __future__ import annotations

import time

import pytest

from ray_nccl_guard.classes import CLASSES, FailureClass
from ray_nccl_guard.guard import GroupLost, Preflight, Proof
from ray_nccl_guard.ladder import Ladder
from ray_nccl_guard.policy import Action, Policy
from ray_nccl_guard.probe.spec import Step
from ray_nccl_guard.rung import Decision, Rung, Wanted, has_legacy
from ray_nccl_guard.verdict import Verdict
from tests.unit.builders import failed, gpu_rank, ok

F = FailureClass
P2P_OFF = {"NCCL_P2P_DISABLE": "1"}


def ladder(policy: Policy | None = None, **wanted) -> Ladder:
    return Ladder(Wanted(**{"backend": "nccl", "world_size": 4, **wanted}), policy or Policy())


def verdict(failure: FailureClass, relief=None) -> Verdict:
    return Verdict(failure=failure, relief=relief or {})


def refused(step) -> bool:
    return isinstance(step, Decision) and step.action is Action.REFUSE


def test_every_class_has_an_action_and_facts():
    for failure in FailureClass:
        assert isinstance(Policy().action_for(failure), Action) and failure in CLASSES


def test_the_default_table_is_the_designs():
    table = {failure: Policy().action_for(failure) for failure in FailureClass}
    assert table[F.ILLEGAL_MEMORY_ACCESS] is table[F.UNKNOWN] is table[F.NO_KERNEL_IMAGE] is Action.FALL_BACK
    assert table[F.PORT_IN_USE] is table[F.GLOO_NETWORK] is table[F.PROCESS_CRASHED] is Action.RETRY
    assert table[F.STORE_UNREACHABLE] is table[F.NO_GPU_VISIBLE] is table[F.USER_CODE_NOT_INFRA] is Action.REFUSE
    assert sum(action is Action.REFUSE for action in table.values()) == 10


def test_a_policy_changes_actions_by_name_and_says_the_nearest_name_on_a_typo():
    assert Policy(actions={"unknown": "refuse"}).action_for(F.UNKNOWN) is Action.REFUSE
    with pytest.raises(ValueError, match="did you mean 'unknown'"):
        Policy(actions={"unknwon": "refuse"})
    with pytest.raises(ValueError, match="did you mean 'fall_back'"):
        Policy(actions={"unknown": "fallback"})
    with pytest.raises(ValueError, match="did you mean 'strict'"):
        Policy.from_name("stict")


@pytest.mark.parametrize("bad", [{"budget_s": 0}, {"attempts": 0}, {"world_warn": 600}, {"on_guard_error": "panic"}])
def test_a_policy_refuses_what_makes_no_sense(bad):
    with pytest.raises(ValueError):
        Policy(**bad)


def test_relief_comes_before_gloo_and_gloo_is_the_last_rung():
    steps = ladder()
    rung = steps.after_failure(verdict(F.P2P_OR_ACS, P2P_OFF))
    assert isinstance(rung, Rung) and rung.backend == "nccl" and rung.env == P2P_OFF
    rung = steps.after_failure(verdict(F.P2P_OR_ACS, P2P_OFF))
    assert isinstance(rung, Rung) and rung.backend == "gloo" and not rung.env
    assert refused(steps.after_failure(verdict(F.GLOO_NETWORK)))


def test_a_rung_that_passes_is_chosen_with_its_setting():
    steps = ladder()
    steps.after_failure(verdict(F.P2P_OR_ACS, P2P_OFF))
    decision = steps.after_pass()
    assert (decision.action, decision.backend, decision.relief) == (Action.FALL_BACK, "nccl", P2P_OFF)
    assert "p2p_or_acs" in decision.because and "4/4" in decision.because


def test_a_setting_of_the_users_is_never_overridden_silently():
    steps = ladder(user_settings={"NCCL_P2P_DISABLE": "0"})
    rung = steps.after_failure(verdict(F.P2P_OR_ACS, P2P_OFF))
    assert isinstance(rung, Rung) and rung.backend == "gloo"
    assert "would have been tried" in steps.after_pass().notes[0]


def test_a_setting_in_nccls_own_file_is_the_users_too_and_the_note_names_the_file():
    steps = ladder(user_settings={"NCCL_P2P_DISABLE": "0"}, settings_from={"NCCL_P2P_DISABLE": "/etc/nccl.conf"})
    assert steps.after_failure(verdict(F.P2P_OR_ACS, P2P_OFF)).backend == "gloo"
    (note,) = steps.after_pass().notes
    assert note.endswith("you have set NCCL_P2P_DISABLE=0 in /etc/nccl.conf")


def test_relief_is_tried_at_most_twice():
    steps = ladder()
    for number in range(2):
        rung = steps.after_failure(verdict(F.P2P_OR_ACS, {f"NCCL_X{number}": "1"}))
        assert isinstance(rung, Rung) and rung.env
    assert steps.after_failure(verdict(F.P2P_OR_ACS, {"NCCL_X3": "1"})).backend == "gloo"


def test_a_class_that_gloo_shares_is_refused_without_trying_it():
    for failure in (F.STORE_UNREACHABLE, F.HARDWARE_XID_ECC, F.NO_GPU_VISIBLE, F.DRIVER_TOO_OLD):
        assert refused(ladder().after_failure(verdict(failure)))


def test_a_gpu_that_hangs_on_its_own_is_refused_since_gloo_would_hang_on_it_too():
    hung = Verdict(failure=F.INIT_TIMEOUT_HANG, step=Step.DEVICE)
    decided = ladder(on_gpu=True).after_failure(hung)
    assert refused(decided) and "gloo moves a GPU's tensors by CUDA too" in decided.because
    assert ladder(Policy.fallback(), on_gpu=True).after_failure(hung).backend == "gloo", "who wants it tried has it tried"
    assert ladder(on_gpu=True).after_failure(Verdict(failure=F.INIT_TIMEOUT_HANG, step=Step.COMM_INIT)).backend == "gloo"


def test_the_fallback_preset_tries_gloo_whatever_the_class():
    rung = ladder(Policy.fallback()).after_failure(verdict(F.NO_GPU_VISIBLE))
    assert isinstance(rung, Rung) and rung.backend == "gloo"


def test_strict_never_falls_back_and_observe_always_proceeds():
    assert refused(ladder(Policy.strict()).after_failure(verdict(F.ILLEGAL_MEMORY_ACCESS, P2P_OFF)))
    decision = ladder(Policy.observe()).after_failure(verdict(F.STORE_UNREACHABLE))
    assert isinstance(decision, Decision) and decision.action is Action.PROCEED and decision.backend == "nccl"


def test_a_retry_is_one_new_probe_and_then_the_new_verdict_decides():
    steps = ladder()
    rung = steps.after_failure(verdict(F.PROCESS_CRASHED))
    assert isinstance(rung, Rung) and rung.retry and rung.backend == "nccl"
    assert refused(steps.after_failure(verdict(F.PROCESS_CRASHED)))
    steps = ladder()
    steps.after_failure(verdict(F.PROCESS_CRASHED))
    assert steps.after_failure(verdict(F.ILLEGAL_MEMORY_ACCESS)).backend == "gloo"
    assert steps.primary is not None and steps.primary.failure is F.ILLEGAL_MEMORY_ACCESS


def test_a_shared_gpu_goes_to_gloo_only_if_sharing_was_asked_for():
    assert refused(ladder(asked_gpus=1).after_failure(verdict(F.DUPLICATE_GPU)))
    assert ladder(asked_gpus=0.5).after_failure(verdict(F.DUPLICATE_GPU)).backend == "gloo"


def test_gloo_has_a_ceiling_and_a_warning_below_it():
    assert refused(ladder(world_size=513).after_failure(verdict(F.UNKNOWN)))
    steps = ladder(world_size=200)
    assert steps.after_failure(verdict(F.UNKNOWN)).backend == "gloo" and "200 ranks" in steps.after_pass().notes[0]


def test_the_old_backend_is_a_rung_where_the_new_one_may_be_at_fault():
    steps = ladder(has_legacy=True)
    assert steps.after_failure(verdict(F.INIT_TIMEOUT_HANG)).backend == "nccl-legacy"
    assert steps.after_failure(verdict(F.INIT_TIMEOUT_HANG)).backend == "gloo"
    assert ladder(has_legacy=True).after_failure(verdict(F.SHM_TOO_SMALL)).backend == "gloo"
    assert has_legacy("2.15.0+cu132") and has_legacy("3.0") and not has_legacy("2.14.1") and not has_legacy("2.4.0")


def test_a_used_up_budget_refuses():
    decision = ladder().after_failure(verdict(F.UNKNOWN), budget_left_s=0)
    assert refused(decision) and "180 s" in decision.because


def test_a_rung_that_the_budget_cut_short_has_not_failed():
    steps = ladder()
    assert steps.after_failure(verdict(F.SHM_TOO_SMALL)).backend == "gloo"
    decision = steps.after_failure(verdict(F.INIT_TIMEOUT_HANG), budget_left_s=-0.1)
    assert refused(decision) and "used up while gloo was being proved" in decision.because
    plain = ladder().after_failure(verdict(F.STORE_UNREACHABLE), budget_left_s=-0.1)
    assert refused(plain) and "store_unreachable = refuse" in plain.because, "the first rung's verdict stands by itself"


def test_each_rung_is_given_what_the_budget_has_left():
    steps, given = ladder(Policy(budget_s=1000), world_size=2), []

    def prove(rung: Rung, within_s: float) -> Proof:
        given.append(within_s)
        time.sleep(0.05)
        works = rung.backend == "gloo"
        return Proof(results=tuple(ok(r) if works else failed(r, Step.COMM_INIT, "x") for r in range(2)))

    Preflight(facts=(gpu_rank(0), gpu_rank(1)), ladder=steps).run(prove)
    assert len(given) == 2 and 900 < given[0] <= 1000 and given[1] < given[0] - 0.04


def test_what_gloo_has_not_for_cuda_tensors_is_refused_by_name_before_it_is_tried():
    declared = {"collectives": ("broadcast", "send_recv", "coalesced_all_gather")}
    decision = ladder(on_gpu=True, **declared).after_failure(verdict(F.SHM_TOO_SMALL))
    assert refused(decision) and "no send_recv (pytorch#11387), coalesced_all_gather (" in decision.because
    assert ladder(on_gpu=False, **declared).after_failure(verdict(F.SHM_TOO_SMALL)).backend == "gloo", "CPU tensors it takes"
    assert ladder(on_gpu=True, collectives=("broadcast",)).after_failure(verdict(F.SHM_TOO_SMALL)).backend == "gloo"


def test_an_operation_in_which_gloo_fails_is_named():
    steps = ladder()
    steps.after_failure(verdict(F.SHM_TOO_SMALL))
    decision = steps.after_failure(verdict(F.PROCESS_CRASHED), during="all_to_all")
    assert refused(decision) and decision.because.startswith("gloo failed its own probe in all_to_all: ")


def test_a_plain_gloo_job_is_tried_once_more_and_then_refused():
    steps = ladder(backend="gloo")
    assert steps.after_failure(verdict(F.INIT_TIMEOUT_HANG)).retry
    assert refused(steps.after_failure(verdict(F.INIT_TIMEOUT_HANG)))
    assert refused(ladder(backend="gloo").after_failure(verdict(F.STORE_UNREACHABLE)))


THREE = {"NCCL_A": "1", "NCCL_B": "1", "NCCL_C": "1"}


def preflight(needed: set[str], policy: Policy | None = None, **fields):
    """A pre-flight in a world where NCCL works only with the settings `needed`, standing on the rung with THREE."""
    steps = ladder(policy, world_size=2)
    steps.after_failure(verdict(F.P2P_OR_ACS, THREE))
    asked = []

    def prove(rung: Rung, within_s: float) -> Proof:
        asked.append(dict(rung.env))
        works = rung.backend == "gloo" or needed <= set(rung.env)
        return Proof(results=tuple(ok(r) if works else failed(r, Step.COMM_INIT, "x") for r in range(2)))

    flight = Preflight(facts=(gpu_rank(0), gpu_rank(1)), ladder=steps, **fields)
    return flight, prove, asked


def test_a_relief_of_several_settings_is_cut_down_to_those_that_are_needed():
    flight, prove, asked = preflight({"NCCL_B"})
    report = flight.run(prove)
    assert report.decision.relief == {"NCCL_B": "1"} and report.decision.backend == "nccl"
    assert asked == [THREE, {"NCCL_B": "1", "NCCL_C": "1"}, {"NCCL_C": "1"}, {"NCCL_B": "1"}]
    assert [n.split()[0] for n in report.decision.notes] == ["NCCL_A", "NCCL_C"]
    assert report.chosen is not None and report.chosen.rung.env == {"NCCL_B": "1"}


def test_settings_that_are_all_needed_stay_and_the_report_is_about_the_rung_that_passed():
    flight, prove, asked = preflight(set(THREE))
    report = flight.run(prove)
    assert report.decision.relief == THREE and len(asked) == 4
    assert report.chosen is report.attempts[0] and report.collectives_proved, "the trials after it failed"


def test_cutting_down_ends_with_the_budget_and_says_so():
    flight, prove, asked = preflight({"NCCL_C"}, Policy(budget_s=1e-6))
    report = flight.run(prove)
    assert asked == [THREE] and report.decision.relief == THREE
    assert "no time is left" in report.decision.notes[-1]


def test_a_worker_lost_in_a_trial_costs_the_trial_and_not_the_rung_that_passed():
    flight, prove, _ = preflight({"NCCL_A"})

    def losing(rung: Rung, within_s: float) -> Proof:
        if "NCCL_A" not in rung.env:
            raise GroupLost([ok(0)])
        return prove(rung, within_s)

    with pytest.raises(GroupLost):
        flight.run(losing)
    flight.group_attempt = 2  # fresh workers, the same ladder
    report = flight.run(losing)
    assert report.decision.relief == THREE and "cost workers before" in report.decision.notes[-1]
    assert flight.ladder.primary is not None and flight.ladder.primary.failure is F.P2P_OR_ACS


def test_a_single_setting_is_not_asked_about_again():
    steps = ladder()
    steps.after_failure(verdict(F.P2P_OR_ACS, P2P_OFF))
    assert steps.smaller() is None
