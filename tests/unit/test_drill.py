"""The language of drills: what is a fault, whom it strikes, that its words lead to the class they are borrowed from, and the marks."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_nccl_guard import headline, html, render, saved
from ray_nccl_guard.classes import FailureClass
from ray_nccl_guard.evidence import align
from ray_nccl_guard.last_good import compare, passed
from ray_nccl_guard.probe import drill
from ray_nccl_guard.probe.drill import parse
from ray_nccl_guard.probe.operations import OPERATIONS
from ray_nccl_guard.probe.spec import LogLine, Outcome, ProbeResult, Step
from ray_nccl_guard.verdict import classify
from tests.unit import report_cases

ROOT = Path(__file__).resolve().parents[2]


def one(text):
    (fault,) = parse(text)
    return fault


def test_a_fault_has_a_point_an_action_and_conditions():
    fault = one("allreduce:cuda700@rank1@world>=4@bytes>=512K@without=NCCL_P2P_DISABLE=1")
    assert (fault.point, fault.action, fault.number) == ("allreduce", "cuda", 700)
    assert fault.strikes(1, 4, {}) and not fault.strikes(0, 4, {}) and not fault.strikes(1, 2, {})
    assert not fault.strikes(1, 4, {"NCCL_P2P_DISABLE": "1"}) and fault.strikes(1, 4, {"NCCL_P2P_DISABLE": "0"})
    assert fault.is_at("allreduce", 1 << 20) and not fault.is_at("allreduce", 4)
    assert not fault.is_at("allreduce"), "a barrier has no payload to speak of"


@pytest.mark.parametrize(
    "condition, ranks",
    [
        ("rank2", {2}),
        ("rank=2", {2}),
        ("rank>=2", {2, 3}),
        ("rank<=1", {0, 1}),
        ("notrank0", {1, 2, 3}),
        ("world<=2", set()),
    ],
)
def test_a_condition_chooses_ranks(condition, ranks):
    assert {rank for rank in range(4) if one(f"init:hang@{condition}").strikes(rank, 4, {})} == ranks


def test_any_collective_is_every_operation_that_a_job_may_declare():
    assert set(drill.OPERATIONS) == set(OPERATIONS)
    assert all(one("coll:hang").is_at(point, 4) for point in drill.OPERATIONS.values())
    assert not one("coll:hang").is_at("init") and not one("allgather:hang").is_at("allreduce", 4)


def test_several_faults_come_in_one_text_or_in_several():
    assert parse("init:hang@rank1, allreduce:abort") == parse(["init:hang@rank1", "allreduce:abort"])


@pytest.mark.parametrize(
    "text, said",
    [
        ("", "names no fault"),
        ("init", "point:action"),
        ("init:", "point:action"),
        ("inti:hang", "did you mean init?"),
        ("init:hagn", "did you mean hang?"),
        ("init:hang@rnak1", "did you mean rank?"),
        ("init:hang@rank", "did you mean rank?"),
        ("init:error", "error takes a whole number"),
        ("init:hang=3", "hang takes no number"),
        ("init:error=0", "from 1 to 6"),
        ("init:cuda1", "CUDA's errors"),
        ("init:cuda", "cuda700"),
        ("init:preset=p3p", "did you mean p2p?"),
        ("store:kill", "only hang and delay=MS"),
        ("init:wrong", "only a collective"),
    ],
)
def test_what_is_no_fault_is_told_with_the_nearest_name_that_is_one(text, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        parse(text)


@given(st.text(max_size=40))
def test_whatever_is_written_is_a_fault_or_a_value_error(text):
    try:
        assert parse(text)
    except ValueError as error:
        assert str(error)


def test_every_word_is_one_of_the_fake_gpus_or_a_step_of_the_probe():
    source = (ROOT / "tests/fakegpu/src/fault_language.c").read_text()
    presets = (ROOT / "tests/fakegpu/src/nccl_fault.c").read_text()
    assert all(f'"{point}"' in source for point in drill.POINTS if point not in ("import", "store", "device"))
    assert all(f'"{action}' in source for action in drill.ACTIONS)
    assert all(f'{{"{name}"' in presets for name in drill.PRESETS)


CLASSES = {
    "p2p": "p2p_or_acs",
    "nvls": "nvlink_fabric_error",
    "fabric": "nvlink_fabric_error",
    "ib": "ib_rdma_error",
    "shm": "shm_too_small",
    "cumem-host": "cumem_container_caps",
    "bootstrap": "nccl_bootstrap_network",
    "refused": "nccl_bootstrap_network",
    "kernel": "no_kernel_image",
    "illegal": "illegal_memory_access",
    "ecc": "hardware_xid_ecc",
    "topology": "topology_detection",
    "version": "version_mismatch",
}


@pytest.mark.parametrize("name", drill.PRESETS)
def test_a_preset_is_named_as_the_failure_whose_words_it_has(name):
    result, line = drill.PRESETS[name]
    log = (LogLine(source="output", number=1, text=f"host:7:7 [0] {line} (drill)"),)
    error = f"Drilled: NCCL error: {drill.RESULTS[result]} (drill)"
    results = [ProbeResult(rank=r, outcome=Outcome.FAILED, step=Step.COMM_INIT, error=error, lines=log) for r in (0, 1)]
    assert classify(align(results, world_size=2, backend="nccl")).failure is FailureClass(CLASSES[name])


def test_every_output_of_a_drill_is_marked_and_its_file_keeps_the_mark():
    report = report_cases.drilled()
    assert headline.headline(report).startswith("DRILL: warning[illegal_memory_access]: NCCL failed pre-flight on rank 3")
    assert headline.short(report).startswith("DRILL: ")
    told = " ".join(render.render(report).split())
    assert (
        "drill allreduce:cuda700@rank3: acted out, NCCL was not touched" in told
        and "gloo is proved and used for real" in told
    )
    page = html.page(report)
    assert "<title>DRILL: " in page and '<p class="drill">DRILL. ' in page and "probe (acted out)" in page
    data = json.loads(json.dumps(report.to_json()))
    assert data["drill"] == "allreduce:cuda700@rank3" and [a["drill"] for a in data["attempts"]] == [data["drill"], ""]
    assert render.render(saved.from_json(data)) == render.render(report)


def test_a_real_failure_in_a_drill_is_told_from_one_that_was_acted_out():
    real = report_cases.fell_back().with_changes(drill="init:hang@rank9")
    assert "init:hang@rank9 made nothing fail, and this failure is REAL" in render.render(real)
    well = report_cases.all_well().with_changes(drill="init:hang@rank9")
    assert render.render(well).startswith("DRILL: ok: ") and "init:hang@rank9 made nothing fail" in render.render(well)


def test_a_drill_is_neither_a_good_run_nor_one_to_compare_with():
    drill_run = report_cases.all_well().with_changes(drill="init:hang@rank9")
    assert passed(report_cases.all_well()) and not passed(drill_run)
    failed, good = report_cases.drilled().with_changes(drill=""), report_cases.all_well()
    found = compare(failed, [report_cases.drilled(), good, drill_run])
    assert found == compare(failed, [good]) and "1 of 1 earlier runs" in " ".join(found.sentences)
