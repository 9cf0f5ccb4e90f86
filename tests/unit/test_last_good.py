"""A failure beside the last run that passed: what changed, how large a world ever passed, what speaks for whom."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from ray_nccl_guard.errors import UsageError
from ray_nccl_guard.guard import Proof
from ray_nccl_guard.last_good import Comparison, compare, compare_json, passed
from ray_nccl_guard.probe.spec import Outcome, Step
from ray_nccl_guard.report import Report
from ray_nccl_guard.rung import Rung
from tests.unit import report_cases
from tests.unit.report_cases import ILLEGAL, facts, preflight

DRIVER = {"driver_version": "590.10.01"}


def good(world_size: int = 4, **of_rank: dict[str, object]) -> Report:
    ranks = facts(world_size, per_host=2, **of_rank)
    return preflight(ranks).run(lambda rung, within_s: Proof(results=tuple(report_cases.passed(r.rank) for r in ranks)))


def bad(world_size: int = 4, culprit: int = 3, **of_rank: dict[str, object]) -> Report:
    ranks = facts(world_size, per_host=2, **of_rank)

    def prove(rung: Rung, within_s: float) -> Proof:
        if rung.backend == "gloo":
            return Proof(results=tuple(report_cases.passed(r.rank) for r in ranks))
        results = [report_cases.ended(r.rank, Outcome.WAITING, Step.COLLECTIVE) for r in ranks]
        results[culprit] = report_cases.ended(culprit, Outcome.DIED, Step.COLLECTIVE, ILLEGAL, signal=6)
        return Proof(results=tuple(results))

    return preflight(ranks).run(prove)


def text(found: Comparison) -> str:
    return "\n".join(found.sentences)


def test_a_run_on_gloo_is_no_good_run_of_nccl():
    assert passed(good())
    assert not passed(bad())
    found = compare(bad(), [bad(), bad()])
    assert (found.largest_passed, found.against, found.changes) == (0, 0, ())
    assert text(found) == "no earlier run has passed, so nothing can be compared"


def test_a_run_whose_training_hung_or_whose_guard_failed_is_none_either():
    assert not passed(good().with_changes(flight={"kind": "hang"}))
    assert not passed(good().with_changes(guard_error="Traceback"))


def test_a_new_driver_on_one_host_is_named_with_its_host_and_speaks_for_the_infrastructure():
    found = compare(bad(r2=DRIVER, r3=DRIVER), [good()])
    assert "since 4 ranks passed: driver on gpu-02: 590.10.01 now, 580.95.05 then" in found.sentences
    assert [change.name for change in found.changes] == ["driver"]
    assert "right after a change of driver" in text(found)


def test_a_change_on_every_host_names_no_host():
    everywhere = {f"r{rank}": DRIVER for rank in range(4)}
    assert compare(bad(**everywhere), [good()]).changes[0].hosts == ()


def test_settings_that_come_and_go_are_changes_and_verbosity_speaks_for_nobody():
    loud = {f"r{rank}": {"settings": {"NCCL_DEBUG": "INFO", "CUDA_VISIBLE_DEVICES": str(rank)}} for rank in range(4)}
    found = compare(bad(**loud), [good()])
    assert [(c.name, c.before, c.now) for c in found.changes] == [("NCCL_DEBUG", "WARN", "INFO")]
    assert found.signals == ()
    off = {f"r{rank}": {"settings": {"NCCL_DEBUG": "WARN", "NCCL_P2P_DISABLE": "1"}} for rank in range(4)}
    gone = compare(bad(), [good(**off)])
    assert [(c.name, c.before, c.now) for c in gone.changes] == [("NCCL_P2P_DISABLE", "1", "(unset)")]


def test_a_fact_that_was_not_looked_at_is_no_change():
    blind = {f"r{rank}": {"libnccl": {}, "driver_version": ""} for rank in range(4)}
    assert compare(bad(), [good(**blind)]).changes == ()
    assert compare(bad(**blind), [good()]).changes == ()


def test_another_build_of_the_same_libnccl_is_a_change():
    other = {f"r{rank}": {"libnccl": {"version": "2.30.7", "fingerprint": "77aa"}} for rank in range(4)}
    assert [c.now for c in compare(bad(**other), [good()]).changes] == ["2.30.7 77aa"]


def test_a_size_that_never_passed_is_set_against_the_largest_that_did():
    found = compare(bad(8), [good(2), good(6), good(4)])
    assert (found.largest_passed, found.against) == (6, 4)
    assert "fails from a world size on: 6 ranks passed, 8 ranks did not" in text(found)
    assert "world size: 8 now, 4 then" in text(found)
    assert "new hosts: gpu-03, gpu-04" in text(found)


def test_the_last_good_run_of_the_same_size_is_compared_before_a_later_one_of_another():
    earlier = [good(4, r0={"torch_version": "2.14.1"}), good(2)]
    found = compare(bad(4), earlier)
    assert found.against == 4
    assert [c.name for c in found.changes] == ["torch"]
    assert "the largest world that ever passed has 8 ranks" in compare(bad(4), [good(8), good(4)]).sentences


def test_a_culprit_on_a_host_that_was_not_there_speaks_for_that_host():
    found = compare(bad(6, culprit=5), [good(4)])
    assert "the hosts to look at (gpu-03) were not in the run that passed" in text(found)
    assert "hosts to look at" not in text(compare(bad(6, culprit=0), [good(4)]))


def test_other_pods_with_the_same_facts_are_no_change():
    pods = {f"r{rank}": {"host": f"pod-{rank // 2}-x7f"} for rank in range(4)}
    found = compare(bad(**pods), [good()])
    assert found.changes == ()
    assert "hosts to look at" not in text(found)
    mixed = {rank: {**fact, **DRIVER} if rank in ("r2", "r3") else fact for rank, fact in pods.items()}
    assert compare(bad(**mixed), [good(r0=DRIVER, r1=DRIVER)]).changes == ()


def test_a_failure_between_equal_runs_comes_and_goes():
    found = compare(bad(), [good(), bad(culprit=1), good()])
    assert found.sentences[0] == "since 4 ranks passed: no recorded fact has changed"
    assert "2 of 3 earlier runs with the same facts and size passed: it comes and goes" in text(found)


def test_a_run_that_passed_is_told_what_changed_and_no_signals():
    found = compare(good(r0=DRIVER), [good()])
    assert [c.name for c in found.changes] == ["driver"]
    assert found.signals == ()


def test_many_hosts_are_not_all_named():
    found = compare(bad(20), [good(4)])
    assert next(c for c in found.changes if c.name == "new hosts").now == "gpu-03, gpu-04, gpu-05, gpu-06 and 4 more"


def test_saved_reports_give_the_same_and_what_is_none_is_passed_over():
    report, earlier = bad(6, culprit=5, r5=DRIVER), [good(), good(2), bad()]
    texts = [json.loads(json.dumps(one.to_json())) for one in earlier]
    found = compare_json(json.loads(json.dumps(report.to_json())), [{}, None, "x", {"schema_version": 1}, *texts])
    assert found == compare(report, earlier)
    assert json.loads(json.dumps(found.to_json()))["largest_passed"] == 4
    with pytest.raises(UsageError):
        compare_json({}, texts)


def test_backends_are_not_mixed():
    assert compare(bad(), [replace(good(), backend_wanted="cpu:gloo,cuda:nccl")]).against == 0
