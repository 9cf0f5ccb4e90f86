"""A report in one sentence that stands alone, for the first line of a message, an exception, or a log."""

from __future__ import annotations

from collections.abc import Mapping

from ray_nccl_guard.classes import CLASSES, FailureClass
from ray_nccl_guard.evidence import Origin
from ray_nccl_guard.policy import Action
from ray_nccl_guard.report import Report, ranks_text
from ray_nccl_guard.rung import GLOO


def headline(report: Report) -> str:
    """`level[class]: one sentence that stands alone and ends in the consequence`."""
    verdict = report.verdict
    level = "error" if report.decision.action is Action.REFUSE else "warning"
    summary = verdict.summary or CLASSES[verdict.failure].summary
    return marked(report, f"{level}[{verdict.failure.value}]: {_who(report)}: {summary}; {_consequence(report)}")


def drill_sentence(report: Report) -> str:
    """What of a drill's report was acted out and what is real; empty if it is no drill."""
    if not report.drill:
        return ""
    failed = report.failed
    if report.verdict.failure is FailureClass.OK or failed is None or not failed.drill:
        real = "" if report.verdict.failure is FailureClass.OK else ", and this failure is REAL"
        return f"{report.drill} made nothing fail{real}"
    decision = report.decision
    then = f"; {decision.backend} is proved and used for real" if decision.action is Action.FALL_BACK else ""
    return f"{failed.drill}: acted out, NCCL was not touched; this is no failure of the cluster{then}"


def short(report: Report) -> str:
    """Line one, the reason and where the whole report lies: the text of an exception."""
    lines = [headline(report), f"because {report.decision.because}"]
    if report.path:
        lines.append(f"report: {report.path}")
    return "\n".join(lines)


def marked(report: Report, text: str) -> str:
    """`text`, marked where it speaks of a drill."""
    return f"DRILL: {text}" if report.drill else text


def _who(report: Report) -> str:
    failed = report.failed
    backend = failed.rung.backend if failed else report.backend_wanted
    name = GLOO if backend == GLOO else "NCCL"
    where = "pre-flight" if failed is None or failed.evidence.origin is Origin.PROBE else "the start of the training group"
    culprits = report.verdict.culprit_ranks
    if not culprits or len(culprits) == report.world_size:
        return f"{name} failed {where}"
    return f"{name} failed {where} on rank{'s' if len(culprits) > 1 else ''} {ranks_text(culprits)}"


def _consequence(report: Report) -> str:
    decision = report.decision
    if decision.action is Action.REFUSE:
        return "training refused"
    if decision.action is Action.RETRY:
        return "trying again with fresh workers"
    if decision.action is Action.PROCEED:
        return f"training goes on with {decision.backend} all the same"
    if decision.relief:
        return f"training will use {decision.backend} with {settings_text(decision.relief)}"
    return f"training will use {decision.backend}"


def settings_text(env: Mapping[str, str]) -> str:
    """Settings as one would type them: `NAME=value NAME=value`."""
    return " ".join(f"{name}={value}" for name, value in env.items())
