"""The report of benchmarks/syncbn.py out of given answers: shares, ratios, refusals and marks."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import syncbn_report
from benchmarks.syncbn_names import bus_bytes, proved, sizes


def case(arm: str, total_ms: float, statistics_ms: float = 0.0, gradients_ms: float = 0.0, **more: Any) -> dict[str, Any]:
    steps = [
        {"total_s": (total_ms + wobble) / 1e3, "statistics_s": statistics_ms / 1e3, "gradients_s": gradients_ms / 1e3,
         "gradients_busy_s": 2 * gradients_ms / 1e3}
        for wobble in (-0.1, 0.0, 0.1)
    ]  # fmt: skip
    return {"model": "tiny", "dtype": "fp32", "batch": 8, "arm": arm, "steps": steps, "losses": [2.0, 1.0], **more}


def answer(**changes: Any) -> dict[str, Any]:
    whole: dict[str, Any] = {
        "world": 2, "hosts": 1, "device": "NVIDIA H100", "fake": False, "asked": ["nccl", "gloo"], "backends": ["nccl", "gloo"],
        "guard": {"action": "proceed", "backend": "nccl", "relief": {}, "failure": "ok"}, "not_run": [],
        "cases": [case("no exchange", 10), case("nccl, SyncBN", 20, 4, 6), case("nccl, BN unsynchronised", 16, 0, 6),
                  case("gloo, SyncBN", 40, 20, 10), case("gloo, BN unsynchronised", 20, 0, 10)],
        "sweep": [{"operation": "all_reduce", "bytes": 4096, "backend": b, "seconds": [s, s]}
                  for b, s in (("nccl", 1e-5), ("gloo", 1e-4))],
    }  # fmt: skip
    return {**whole, **changes}


def test_a_step_is_split_and_compared():
    rows = {row["arm"]: row for row in syncbn_report.rows([answer()]) if "arm" in row}
    gloo = rows["gloo, SyncBN"]
    assert gloo["median"] == pytest.approx(40) and gloo["images/s"] == pytest.approx(2 * 8 / 0.040)
    assert (gloo["compute"], gloo["gradients"], gloo["gradients busy"], gloo["statistics"]) == pytest.approx(
        (10, 10, 20, 20)
    )
    assert gloo["lost %"] == pytest.approx(75) and gloo["x nccl"] == pytest.approx(2)
    assert rows["no exchange"]["lost %"] is None and "x nccl" not in rows["nccl, SyncBN"]


def test_no_share_is_printed_that_does_not_stand_out_from_the_spread():
    cases = [case("no exchange", 10), case("gloo, SyncBN", 10.05), case("gloo, BN unsynchronised", 10.02)]
    only = answer(cases=cases, backends=["gloo"], asked=["gloo"], sweep=[])
    assert all(row["lost %"] is None for row in syncbn_report.rows([only]))
    assert syncbn_report.found([only]) == [
        "2 workers, tiny, batch 8, fp32: a step with SyncBatchNorm by one without, on gloo: not told from the noise."
    ]


def test_what_was_found_is_said_for_each_backend_and_between_them():
    assert syncbn_report.found([answer()]) == [
        "2 workers, tiny, batch 8, fp32: a step with SyncBatchNorm by one without, on nccl: 1.25 x.",
        "2 workers, tiny, batch 8, fp32: a step with SyncBatchNorm by one without, on gloo: 2 x.",
        "2 workers, tiny, batch 8, fp32: a step with SyncBatchNorm on gloo by one on nccl: 2 x.",
    ]


def test_single_collectives_have_bus_bandwidth_and_a_ratio():
    row = next(row for row in syncbn_report.rows([answer()]) if "operation" in row)
    assert row["nccl GB/s"] == pytest.approx(4096 / 1e-5 / 1e9) and row["gloo x nccl"] == pytest.approx(10)
    assert bus_bytes("all_gather", 1000, 4) == 750 and bus_bytes("all_reduce", 1000, 1) == 0
    assert sizes(256 << 20)[0] == 4 and sizes(256 << 20)[-1] == 256 << 20 and sizes(0) == []


def test_fake_gpus_and_the_cpu_are_named_in_the_title():
    assert syncbn_report.title([answer()]) == "NCCL against gloo in training with SyncBatchNorm"
    assert syncbn_report.title([answer(), answer(fake=True)]).startswith("NOT A MEASUREMENT")
    on_cpu = answer(device="cpu", backends=["gloo"], asked=["gloo"])
    assert "no GPU, no NCCL" in syncbn_report.title([on_cpu])
    assert any("written out by hand" in note for note in syncbn_report.notes([on_cpu]))


def test_the_notes_say_what_the_guard_did_and_what_is_missing():
    fell_back = {"action": "fall_back", "backend": "gloo", "relief": {}, "failure": "duplicate_gpu"}
    notes = syncbn_report.notes([answer(guard=fell_back, backends=["gloo"], not_run=["tiny, batch 9, fp32: over"])])
    assert "2 workers on 1 host, NVIDIA H100: the guard's verdict duplicate_gpu, fall_back on gloo." in notes
    assert "2 workers on 1 host, NVIDIA H100: nccl not measured: the guard did not choose it." in notes
    assert "2 workers on 1 host, NVIDIA H100, not run: tiny, batch 9, fp32: over" in notes
    cured = {**fell_back, "backend": "nccl", "relief": {"NCCL_P2P_DISABLE": "1"}}
    assert any("with NCCL_P2P_DISABLE=1" in note for note in syncbn_report.notes([answer(guard=cured)]))
    assert any("not guarded" in note for note in syncbn_report.notes([answer(guard=None)]))


def test_only_what_the_guard_has_proved_is_measured():
    assert proved(["nccl", "gloo"], "nccl") == ["nccl", "gloo"]
    assert proved(["nccl", "gloo"], "gloo") == ["gloo"] == proved(["gloo", "nccl"], "gloo")
    assert proved(["nccl", "gloo"], "nccl-legacy") == ["nccl-legacy", "gloo"]
    assert proved(["nccl", "nccl-legacy"], "nccl") == ["nccl", "nccl-legacy"]
