"""A saved report as a value again: what `Report.to_json` wrote, so that it can be rendered, published or priced once more."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ray_nccl_guard.classes import FailureClass
from ray_nccl_guard.errors import UsageError
from ray_nccl_guard.evidence import Evidence, Origin, RankEvidence
from ray_nccl_guard.facts import Gpu, RankFacts
from ray_nccl_guard.locate.result import Located
from ray_nccl_guard.network.addresses import AddressChoice, Chosen
from ray_nccl_guard.network.grid import Matrix
from ray_nccl_guard.policy import Action, Policy
from ray_nccl_guard.probe.spec import LogLine, Outcome, ProbeResult, Start, Step, StepRecord
from ray_nccl_guard.report import Attempt, Report
from ray_nccl_guard.rung import Decision, Rung
from ray_nccl_guard.verdict import Candidate, Certainty, Quote, Role, Verdict

_MOST_BYTES = 256 << 20  # 4,096 ranks with three attempts are 10 MB; what is far larger is something else


def load(path: str) -> Report:
    """The report in a file.

    Raises:
        UsageError: there is no such file, or it is not a report that this version can read.
    """
    try:
        if Path(path).stat().st_size > _MOST_BYTES:
            raise UsageError(f"{path} is too large for a report")
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise UsageError(f"{path} is not a JSON file: {error}") from None
    return from_json(data, source=path)


def from_json(data: Any, *, source: str = "the report") -> Report:
    """The value that `Report.to_json` was called on, as far as it is kept: logs beyond the quoted lines are not.

    Raises:
        UsageError: it is not a report. One of a later schema is read: keys are only ever added.
    """
    version = data.get("schema_version") if isinstance(data, dict) else None
    if not isinstance(version, int):
        raise UsageError(f"{source} is not a report of this tool: it has no schema_version")
    try:
        return _report(data)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UsageError(f"{source} is not a whole report: {type(error).__name__}: {error}") from None


def _report(data: Mapping[str, Any]) -> Report:
    verdict = _verdict(data["verdict"], {rank["rank"]: rank["host"] for rank in data["ranks"]})
    about = data.get("verdict_attempt")
    report = Report(
        world_size=data["world_size"],
        backend_wanted=data["backend_wanted"],
        decision=Decision(
            action=Action(data["action"]),
            backend=data["backend_chosen"],
            relief=dict(data["relief"]),
            because=data.get("because", ""),
        ),
        verdict=verdict,
        policy=Policy(**{k: v for k, v in data["policy"].items() if k in Policy.__dataclass_fields__}),
        facts=tuple(_facts(rank) for rank in data["ranks"]),
        attempts=tuple(
            _attempt(saved, data, verdict if number == about else None) for number, saved in enumerate(data["attempts"])
        ),
        guard_error=data["guard_error"],
        timings_s=dict(data["timings_s"]),
        run_name=data.get("run_name", ""),
        flight=data.get("flight"),
        drill=data.get("drill", ""),
    )
    known = report.all_notes  # the differences are found again from the facts
    return report.with_changes(notes=tuple(note for note in data["notes"] if note not in known))


def _verdict(data: Mapping[str, Any], hosts: Mapping[int, str]) -> Verdict:
    return Verdict(
        failure=FailureClass(data["failure"]),
        summary=data.get("summary", ""),
        rule=data.get("rule"),
        certainty=Certainty(data["certainty"]),
        candidates=tuple(
            Candidate(failure=FailureClass(c["failure"]), score=c["score"], rules=tuple(c["rules"]))
            for c in data["candidates"]
        ),
        culprit_ranks=tuple(data["culprit_ranks"]),
        gloo_can_help=data["gloo_can_help"],
        evidence=tuple(
            Quote(rank=q["rank"], line=q["line"], text=q["text"], role=Role(q["role"]), source=q.get("source", ""))
            for q in data["evidence"]
        ),
        against=tuple(data.get("against", ())),
        ruled_out=tuple(data.get("ruled_out", ())),
        relief=dict(data.get("relief", {})),
        step=_step(data.get("step")),
        next=data["next"],
        caution=data.get("caution", ""),
        signals=tuple(data.get("signals", ())),
        hosts=hosts if data.get("culprit_hosts") else {},
        silence=data.get("silence", ""),
        hosts_of_the_cause=() if data["culprit_ranks"] else tuple(data.get("culprit_hosts", ())),
    )


def _step(name: str | None) -> Step | None:
    return None if name is None else Step(name)


def _facts(data: Mapping[str, Any]) -> RankFacts:
    gpu, interface = data.get("gpu"), data.get("interface")
    return RankFacts(
        rank=data["rank"],
        host=data["host"],
        node=data.get("node", ""),
        address=data.get("address", ""),
        local_rank=data["local_rank"],
        gpu_ids=tuple(data.get("gpu_ids", ())),
        gpu=None if gpu is None else Gpu(**{**gpu, "capability": tuple(gpu["capability"]) if gpu["capability"] else None}),
        driver_version=data.get("driver_version", ""),
        torch_version=data.get("torch_version", ""),
        python_version=data.get("python_version", ""),
        settings=dict(data.get("settings", {})),
        shm_total_bytes=data.get("shm_total_bytes"),
        shm_free_bytes=data.get("shm_free_bytes"),
        limits=dict(data.get("limits", {})),
        libnccl=dict(data.get("libnccl", {})),
        addresses=None
        if interface is None
        else AddressChoice(nccl=_chosen(interface["nccl"]), gloo=_chosen(interface["gloo"])),
        not_run=dict(data.get("not_run", {})),
    )


def _chosen(interface: str) -> Chosen:
    return Chosen(address="", interface=interface, why="")


def _attempt(data: Mapping[str, Any], report: Mapping[str, Any], verdict: Verdict | None) -> Attempt:
    all_reduce_s = {int(size): seconds for size, seconds in data.get("all_reduce_s", {}).items()}
    of = {rank["rank"]: rank for rank in report["ranks"]}
    lines = _kept_lines(report) if verdict else {}
    results = tuple(
        _result(saved, of.get(saved["rank"], {}), all_reduce_s, lines.get(saved["rank"], ())) for saved in data["outcomes"]
    )
    by_rank = {r.rank: r for r in results}
    missing = ProbeResult(rank=-1, outcome=Outcome.MISSING)
    ranks = tuple(_evidence(rank, by_rank.get(rank, missing)) for rank in range(report["world_size"]))
    return Attempt(
        rung=Rung(backend=data["backend"], env=dict(data["env"]), why=data.get("why", "")),
        evidence=Evidence(
            origin=Origin(data.get("origin", Origin.PROBE.value)),
            backend=data["backend"],
            world_size=report["world_size"],
            ranks=ranks,
        ),
        verdict=verdict
        or Verdict(
            failure=FailureClass(data["failure"]),
            summary=data["summary"],
            culprit_ranks=tuple(data["culprit_ranks"]),
            step=_step(data["step"]),
        ),
        results=results,
        seconds=data["seconds"],
        group_attempt=data.get("group_attempt", 1),
        drill=data.get("drill", ""),
        matrix=Matrix.from_json(data["network"]) if data.get("network") else None,
        located=Located.from_json(data["located"]) if data.get("located") else None,
    )


def _kept_lines(report: Mapping[str, Any]) -> dict[int, tuple[LogLine, ...]]:
    """Of what ranks printed, only the neighbourhood of quoted lines is kept."""
    lines: dict[int, tuple[LogLine, ...]] = {}
    for excerpt in report.get("context", ()):
        kept = tuple(LogLine(source=excerpt["source"], number=n, text=text) for n, text in excerpt["lines"])
        lines[excerpt["rank"]] = lines.get(excerpt["rank"], ()) + kept
    return lines


def _result(
    data: Mapping[str, Any], rank: Mapping[str, Any], all_reduce_s: dict[int, float], lines: tuple[LogLine, ...]
) -> ProbeResult:
    return ProbeResult(
        rank=data["rank"],
        outcome=Outcome(data["outcome"]),
        step=_step(data["step"]),
        detail=data.get("detail", ""),
        error=data.get("error", ""),
        signal=data.get("signal"),
        process_state=data.get("process_state", ""),
        steps=tuple(
            StepRecord(step=Step(name), outcome=Outcome(outcome), seconds=seconds, detail="".join(detail))
            for name, (outcome, seconds, *detail) in data.get("steps", {}).items()
        ),
        lines=lines,
        proved=tuple(data.get("proved", ())),
        all_reduce_s=all_reduce_s,
        nccl_s=dict(data.get("nccl_s", {})),
        device=rank.get("device") or "",
        free_before_bytes=rank.get("free_before_bytes"),
        free_after_bytes=rank.get("free_after_bytes"),
        start=Start(data.get("start", Start.AUTO.value)),
        seconds=data["seconds"],
    )


def _evidence(rank: int, result: ProbeResult) -> RankEvidence:
    return RankEvidence(
        rank=rank, outcome=result.outcome, step=result.step, detail=result.detail, text=result.error, signal=result.signal
    )
