"""A guarded fit() with a drill: the decision is carried out for real, and every reader is told that the failure was rehearsed."""

from __future__ import annotations

import json
import time

import pytest

from ray_nccl_guard import GuardedTorchConfig, NcclInitRefused, Policy, ProbeSpec
from ray_nccl_guard.ray_train import metrics
from tests.ray.test_publish import FALLBACKS, scrape, series
from tests.unit import report_cases

QUICK = ProbeSpec(store_s=5, comm_init_s=5, comm_init_per_rank_s=0, collective_s=5)
FAULT = "allreduce:cuda700@rank1"


def drilled(**options) -> GuardedTorchConfig:
    return GuardedTorchConfig(**{"backend": "nccl", "probe": QUICK, "drill": FAULT, **options})


def note_the_drill(config) -> None:
    import torch.distributed as dist

    from ray_nccl_guard import current_report

    note = {"backend": dist.get_backend(), "drill": current_report()["drill"]}
    with open(f"{config['notes']}/{dist.get_rank()}", "w") as file:
        json.dump(note, file)


def test_a_drill_of_nccl_falls_back_for_real_and_marks_report_page_and_train_func(fit, tmp_path):
    run = fit(drilled(), train=note_the_drill, name="drilled")
    assert run.error is None and run.metrics == [{"backend": "gloo", "drill": FAULT}] * 2
    report = run.report
    assert (report["action"], report["backend_wanted"], report["backend_chosen"]) == ("fall_back", "nccl", "gloo")
    assert report["verdict"]["failure"] == "illegal_memory_access" and report["verdict"]["culprit_ranks"] == [1]
    assert report["drill"] == FAULT and report["attempts"][0]["drill"] == FAULT
    assert report["attempts"][-1]["backend"] == "gloo" and report["attempts"][-1]["drill"] == ""
    page = (tmp_path / "storage" / "drilled" / "nccl_guard" / "report.html").read_text()
    assert "<title>DRILL: drilled" in page


@pytest.mark.slow
def test_a_refused_drill_says_so_in_its_exception(fit):
    run = fit(drilled(policy=Policy.strict()))
    assert isinstance(run.refused, NcclInitRefused) and str(run.refused).startswith("DRILL: error[illegal_memory_access]")
    assert run.refused.report["drill"] == FAULT and run.metrics == []


@pytest.mark.long
def test_no_later_failure_is_compared_with_a_drill(fit):
    assert fit(drilled(), name="before").report["drill"] == FAULT
    later = fit(GuardedTorchConfig(backend="nccl", probe=QUICK, policy=Policy.fallback()), name="after")
    assert later.report["verdict"]["failure"] == "no_gpu_visible" and later.report["drill"] == ""
    notes = " ".join(later.report["notes"])
    assert "no earlier run has passed" in notes and "earlier runs with the same facts" not in notes
    assert "drill" not in notes


@pytest.mark.long
def test_a_drill_of_gloo_is_tried_once_more_and_refused(fit):
    run = fit(drilled(backend="gloo", drill="allreduce:wrong@rank1"))
    assert isinstance(run.refused, NcclInitRefused), run.error
    assert [a["drill"] for a in run.refused.report["attempts"]] == ["allreduce:wrong@rank1"] * 2


@pytest.mark.parametrize("options", [{"drill": "init:hagn"}, {"probe": None}])
def test_a_drill_that_cannot_be_is_told_where_it_is_written(options):
    with pytest.raises(ValueError, match=r"did you mean hang|probe=None"):
        drilled(**options)


def test_the_metrics_carry_the_mark(cluster):
    metrics.record(report_cases.drilled().with_changes(run_name="marked"))
    metrics.record(report_cases.fell_back().with_changes(run_name="real"))
    end_s = time.monotonic() + 60
    while not series(text := scrape(), FALLBACKS, ray_train_run_name="real"):
        assert time.monotonic() < end_s, "the metrics never came"
        time.sleep(0.5)
    for name, wanted in (("marked", "yes"), ("real", "")):
        of = {"ray_train_run_name": name, "drill": wanted}
        assert series(text, "ray_nccl_guard_backend", backend="gloo", **of) == [1.0]
        assert series(text, "ray_nccl_guard_action", action="fall_back", **of) == [1.0]
        assert series(text, FALLBACKS, **of) == [1.0]
