"""The matrix: each fault of NCCL and CUDA, played to a whole pre-flight; what is named, on whom, where, and what is done."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import pytest

from tests.fakegpu.double import Double
from tests.fakegpu.matrix import BACKENDS, CASES, IN_MAKE_TEST, TORCH, Case
from tests.fakegpu.stage import Stage

pytestmark = pytest.mark.torch_versions


@pytest.fixture(scope="module")
def stage(request: pytest.FixtureRequest, double: Double, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    chosen = [
        (item.callspec.params["case"], item.callspec.params["backend"])
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.path == request.path and "case" in item.callspec.params
    ]
    with Stage(double, chosen, tmp_path_factory) as stage:
        yield stage


def named(case: Case, backend: str) -> Any:
    """torch 2.15's `nccl-legacy` is the code of 2.14's `nccl`, which the gate plays whole: beside it, one fault of each kind is enough."""
    levels = [(), pytest.mark.slow, pytest.mark.long]
    level = levels[(case.name not in IN_MAKE_TEST) + (backend == "nccl-legacy")]
    return pytest.param(case, backend, id=f"{case.name}-{backend}", marks=level)


@pytest.mark.parametrize(
    ("case", "backend"), [named(case, b) for case in CASES for b in BACKENDS if case.backend in ("", b)]
)
def test_a_fault_is_named_and_dealt_with(case: Case, backend: str, stage: Stage) -> None:
    played = stage.played(case, backend)
    ended = played.ended
    assert ended.value is not None, ended.output[-3000:]
    report = ended.value["report"]
    seen = {
        "failure": report["verdict"]["failure"],
        "culprits": tuple(report["verdict"]["culprit_ranks"]),
        "step": report["verdict"]["step"],
        "action": report["action"],
        "backend": report["backend_chosen"],
        "relief": report["relief"],
    }
    record(case, backend, seen, ended.value["seconds"])
    assert seen == case.expected(backend), said(report)
    if case.detail:
        assert any(case.detail in detail for detail in ended.value["details"]), ended.value["details"]
    if case.note:
        assert any(case.note in note for note in [*ended.value["said"], *report["notes"]]), ended.value["said"]
    assert ended.value["seconds"] < case.within_s
    assert ended.value["left"] == []
    assert played.left == []


def record(case: Case, backend: str, seen: dict[str, Any], seconds: float) -> None:
    """With FAULT_MATRIX_RECORD, one line of JSON for `python -m tests.fakegpu.matrix_page`."""
    if path := os.environ.get("FAULT_MATRIX_RECORD"):
        line = {
            "case": case.name,
            "fault": case.fault,
            "ranks": case.ranks,
            "torch": TORCH,
            "torch_backend": backend,
            **seen,
            "right": seen == case.expected(backend),
            "seconds": round(seconds, 1),
        }
        with open(path, "a") as file:
            file.write(json.dumps(line) + "\n")


def said(report: dict[str, Any]) -> str:
    """The attempts in a few lines, for whoever reads a failed case."""
    lines = [report["because"]]
    for a in report["attempts"]:
        ends = ", ".join(f"{o['rank']} {o['outcome']} in {o['step']} {o['seconds']:.1f} s" for o in a["outcomes"])
        lines.append(f"{a.get('located')} {a['backend']} {a['env']}: {a['failure']}, {a['summary']}; {ends}")
    return "\n".join([*lines, *(f"  {q['rank']} {q['role']}: {q['text'][:200]}" for q in report["verdict"]["evidence"])])
