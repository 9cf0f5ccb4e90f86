"""The matrix: each fault of NCCL and CUDA, played to a whole pre-flight; what is named, on whom, where, and what is done."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakegpu.double import Double
from tests.fakegpu.matrix import BACKENDS, CASES, IN_MAKE_TEST, PATIENT, TORCH, Case
from tests.fakegpu.ranks import Ranks, abandoned_shared_memory

BODY = "tests.fakegpu.guarded:preflight"


@pytest.fixture(scope="module")
def server(double: Double, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with Ranks(double.env(devices=8, ops=True, state=tmp_path_factory.mktemp("ledger"))) as server:
        yield server


def named(case: Case, backend: str) -> Any:
    slow = [pytest.mark.slow] if case.name not in IN_MAKE_TEST or backend == "nccl-legacy" else []
    return pytest.param(case, backend, id=f"{case.name}-{backend}", marks=slow)


@pytest.mark.parametrize(
    ("case", "backend"), [named(case, b) for case in CASES for b in BACKENDS if case.backend in ("", b)]
)
def test_a_fault_is_named_and_dealt_with(case: Case, backend: str, server: Ranks, double: Double, tmp_path: Path) -> None:
    shared_before = abandoned_shared_memory()
    env = {**double.env(devices=8, state=tmp_path, fault=case.fault, **case.options), **case.env}
    env = {
        name: value for name, value in env.items() if name.startswith(("FAKE_", "NCCL_", "CUDA_"))
    }  # the server has the rest
    (ended,) = server.run(
        BODY,
        1,
        deadline_s=150,
        env=env,
        ranks=case.ranks,
        backend=backend,
        spec={**PATIENT, **case.spec},
        devices=case.devices,
        asked_gpus=case.asked_gpus,
        policy=case.policy,
        touched=case.touched,
    )
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
    nothing_left(tmp_path, shared_before)


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


def nothing_left(state: Path, shared_before: set[str], within_s: float = 10.0) -> None:
    """No process that was started for this case, and none of NCCL's files."""
    end_s = time.monotonic() + within_s
    while left := [*of_case(state), *sorted(abandoned_shared_memory() - shared_before)]:
        assert time.monotonic() < end_s, f"left: processes and files {left}"
        time.sleep(0.05)


def of_case(state: Path) -> list[int]:
    """Living processes whose working directory is this case's folder: the pre-flight makes it so for all that it starts."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if os.readlink(entry / "cwd") == str(state):
                found.append(int(entry.name))
        except OSError:
            continue  # it ended while we looked
    return found
