"""The message: a report as the text that a person reads once, on the driver. ASCII, 100 columns, help last."""

from __future__ import annotations

import re
import textwrap

from ray_nccl_guard import price
from ray_nccl_guard.classes import CLASSES, FailureClass
from ray_nccl_guard.headline import drill_sentence, headline, marked, settings_text
from ray_nccl_guard.policy import Action
from ray_nccl_guard.probe.spec import Outcome, Step
from ray_nccl_guard.report import Attempt, Report, outcomes, ranks_text, step_of
from ray_nccl_guard.verdict import Certainty, Quote, Role

_WIDTH = 100
_LABEL = 11
_MOST_QUOTES = 3
_NUMBERS = re.compile(r"0x[0-9a-f]+|\d+")

# Said with every NCCL failure: people try settings inside train_func, where they come too late once the group is eager.
_SETTINGS_HELP = (
    'settings       NCCL_* set inside train_func come too late: ray.init(runtime_env={"env_vars": {"NCCL_X": "..."}})'
)


def render(report: Report) -> str:
    """The whole message of a report."""
    if report.guard_error:
        return marked(report, _guard_error(report))
    if report.verdict.failure is FailureClass.OK:
        return marked(report, _passed(report))
    return "\n".join([headline(report), "", *_body(report), "", *_decision(report), "", *_help(report)])


def _row(label: str, text: str) -> list[str]:
    if not text:
        return []
    indent = " " * (_LABEL + 2)
    wrapped = textwrap.wrap(text, _WIDTH - _LABEL - 2, break_long_words=False, break_on_hyphens=False) or [""]
    return [f"  {label:<{_LABEL}}{wrapped[0]}", *(indent + line for line in wrapped[1:])]


def _body(report: Report) -> list[str]:
    failed = report.failed
    verdict = report.verdict
    lines = _row("drill", drill_sentence(report)) + _row("where", _where(report, failed))
    if failed is not None:
        lines += _row("step", _step(failed))
    lines += _evidence(report)
    if failed is not None:
        lines += _row("ranks", _ranks(failed))
    if report.located is not None:
        lines += _row("located", report.located.sentence)
    lines += _row("ruled out", "; ".join(verdict.ruled_out))
    lines += _row("against", "; ".join(verdict.against))
    lines += _row("certainty", _certainty(report))
    return lines


def _where(report: Report, failed: Attempt | None) -> str:
    facts = {f.rank: f for f in report.facts}
    culprits = report.verdict.culprit_ranks
    if not culprits:
        hosts = sorted({f.host for f in report.facts})
        return f"{report.world_size} ranks on {len(hosts)} host{'s' if len(hosts) != 1 else ''} ({', '.join(hosts[:4])})"
    if len(culprits) > 1:
        hosts = sorted({facts[r].host for r in culprits if r in facts})
        return f"ranks {ranks_text(culprits)} of {report.world_size}, host {', '.join(hosts[:4])}"
    rank = culprits[0]
    parts = [f"rank {rank} of {report.world_size}"]
    if rank in facts:
        parts += [f"host {facts[rank].host}", f"local_rank {facts[rank].local_rank}"]
        if facts[rank].gpu is not None:
            parts.append(facts[rank].gpu.uuid)  # type: ignore[union-attr]
    result = next((r for r in (failed.results if failed else ()) if r.rank == rank), None)
    if result is not None and result.signal is not None and not result.killed_by_guard:
        parts.append(f"ended by signal {result.signal}")
    if result is not None and result.process_state == "T":
        parts.append("its process was stopped")
    return ", ".join(parts)


def _step(failed: Attempt) -> str:
    step = step_of(failed)
    if step is None:
        lost = any(r.outcome in (Outcome.DIED, Outcome.MISSING) for r in failed.evidence.ranks)
        return "not known: the worker itself was lost" if lost else "decided from the facts, before any collective"
    bad = [r for r in failed.evidence.ranks if r.step is step and r.outcome is not Outcome.OK]
    detail = next((r.detail for r in bad if r.detail), "")
    passed = [s.value for s in Step if s.position < step.position and _all_passed(failed, s)]
    text = f"{step.value}{': ' + detail if detail else ''}"
    return f"{text}; {', '.join(passed)} ok on every rank" if passed else text


def _all_passed(failed: Attempt, step: Step) -> bool:
    return bool(failed.results) and all(
        any(s.step is step and s.outcome is Outcome.OK for s in r.steps) for r in failed.results
    )


def _evidence(report: Report) -> list[str]:
    quotes = [q for q in report.verdict.evidence if q.role is Role.CAUSE] or list(report.verdict.evidence)
    # Many ranks say the same with other numbers in it (process, device, pointer): one of them is quoted.
    alike: dict[str, list[Quote]] = {}
    for quote in quotes:
        alike.setdefault(_NUMBERS.sub("0", quote.text), []).append(quote)
    lines: list[str] = []
    for number, group in enumerate(list(alike.values())[:_MOST_QUOTES]):
        first, *others = group
        rank = "" if first.rank is None else f"rank {first.rank}, "
        also = sorted({q.rank for q in others if q.rank is not None and q.rank != first.rank})
        same = f", the like on {ranks_text(also)}" if also else ""
        lines += _row("evidence" if number == 0 else "", f"{rank}{first.source or 'log'}:{first.line}{same}")
        indent = " " * (_LABEL + 4)
        lines += textwrap.wrap(
            first.text.strip()[:600], _WIDTH, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False
        )
    more = len(alike) - _MOST_QUOTES
    if more > 0:
        lines += _row("", f"and {more} more in the report")
    return lines


def _ranks(failed: Attempt) -> str:
    groups = (
        ("failed", (Outcome.FAILED, Outcome.DIED)),
        ("timed out", (Outcome.TIMED_OUT,)),
        ("waiting on them", (Outcome.WAITING,)),
        ("no answer", (Outcome.MISSING,)),
        ("ok", (Outcome.OK,)),
        ("not run", (Outcome.NOT_RUN,)),
    )
    parts = [(name, outcomes(failed, *wanted)) for name, wanted in groups]
    return "   ".join(f"{name} [{ranks_text(ranks)}]" for name, ranks in parts if ranks)


def _certainty(report: Report) -> str:
    verdict = report.verdict
    others = [c.failure.value for c in verdict.candidates if c.failure is not verdict.failure]
    text = verdict.certainty.value
    if verdict.certainty is not Certainty.ESTABLISHED and others:
        text += f"; also possible: {', '.join(others)}"
    return text


def _decision(report: Report) -> list[str]:
    decision = report.decision
    what = {
        Action.PROCEED: f"proceed with {decision.backend}",
        Action.RETRY: "retry with fresh workers",
        Action.FALL_BACK: f"fall back, {report.backend_wanted} -> {decision.backend}"
        + (f" with {settings_text(decision.relief)}" if decision.relief else ""),
        Action.REFUSE: "refuse",
    }[decision.action]
    lines = _row("decision", what) + _row("because", decision.because)
    lines += _row("tried", "; ".join(_tried(a) for a in report.attempts) if len(report.attempts) > 1 else "")
    if decision.action is Action.FALL_BACK:
        lines += _row("proved", ", ".join(report.collectives_proved))
        lines += _row("cost", price.sentence(report))
    for note in report.all_notes:
        lines += _row("note", note)
    return lines


def _tried(attempt: Attempt) -> str:
    how = "passed" if attempt.evidence.ok else attempt.verdict.failure.value
    return f"{attempt.rung.name} {how} in {attempt.seconds:.1f} s"


def _help(report: Report) -> list[str]:
    verdict = report.verdict
    lines = [f"help: {CLASSES[verdict.failure].remedy}"]
    if verdict.next:
        lines.append(f"help: to be sure     {verdict.next}")
    if "nccl" in report.backend_wanted:
        lines.append(f"help: {_SETTINGS_HELP}")
    if report.decision.action is Action.FALL_BACK:
        lines.append("help: to stop instead   GuardedTorchConfig(policy=Policy.strict())")
    elif report.decision.action is Action.REFUSE and report.decision.backend is None:
        lines.append("help: to go on anyway   GuardedTorchConfig(policy=Policy.observe()), or RAY_NCCL_GUARD=off")
    if report.path:
        lines.append(f"report: {report.path}")
    lines.append(f"more:   ray-nccl-guard explain {verdict.failure.value}")
    return lines


def _passed(report: Report) -> str:
    seconds = report.timings_s.get("guard")
    took = f" in {seconds:.2f} s" if seconds is not None else ""
    proved = ", ".join(report.collectives_proved) or "nothing"
    again = " (a passed check of the same workers was reused)" if not report.attempts else f" ({proved})"
    line = (
        f"ok: {report.decision.backend} passed pre-flight on {report.world_size} of {report.world_size} ranks{took}{again}"
    )
    drill = (f"drill: {sentence}",) if (sentence := drill_sentence(report)) else ()
    return "\n".join([line, *drill, *(f"note: {note}" for note in (*report.decision.notes, *report.notes))])


def _guard_error(report: Report) -> str:
    last = report.guard_error.strip().splitlines()[-1] if report.guard_error else ""
    lines = [
        f"warning[guard_error]: the guard itself failed ({last}); training goes on as plain TorchConfig would",
        "",
        textwrap.indent(report.guard_error or "", "  ").rstrip(),
        "",
        "note: NCCL was not proved. Please report this traceback; RAY_NCCL_GUARD=off switches the guard off meanwhile.",
    ]
    if report.path:
        lines.append(f"report: {report.path}")
    return "\n".join(lines)
