"""The page: a report as one self-contained HTML file, for those who look. No script, no network; everything is escaped."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from ray_nccl_guard import headline, price, render
from ray_nccl_guard.attempt import Attempt
from ray_nccl_guard.classes import CLASSES, FailureClass
from ray_nccl_guard.errors import GuardError
from ray_nccl_guard.flight import FlightVerdict
from ray_nccl_guard.flight.html import fragment
from ray_nccl_guard.network import grid
from ray_nccl_guard.policy import Action
from ray_nccl_guard.probe.spec import Outcome, ProbeResult, Step
from ray_nccl_guard.report import Report, ranks_text

# A letter beside the colour: one reader in twelve men does not tell red from green.
_LETTERS = {
    Outcome.OK: "", Outcome.FAILED: "F", Outcome.DIED: "D", Outcome.TIMED_OUT: "T", Outcome.WAITING: "w",
    Outcome.MISSING: "?", Outcome.NOT_RUN: "",
}  # fmt: skip
_WORDS = {
    Outcome.OK: "ok", Outcome.FAILED: "failed", Outcome.DIED: "died", Outcome.TIMED_OUT: "timed out",
    Outcome.WAITING: "waiting on another rank", Outcome.MISSING: "no answer", Outcome.NOT_RUN: "not run",
}  # fmt: skip
_LARGE_CELLS = 16  # as many fit beside each other with their seconds
_MOST_HOSTS = 512  # 4,096 ranks of 8 a host; the page is 3 MB then


class NoTemplates(GuardError):
    """jinja2 is not installed, so there is no page."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One rank in one stage: the outcome, what stands in the cell, and what it says when pointed at."""

    kind: str
    letter: str
    title: str
    seconds: str = ""


def page(report: Report) -> str:
    """The whole page.

    Raises:
        NoTemplates: jinja2 is not installed.
    """
    return str(
        _template().render(
            report=report,
            level=_level(report),
            sentence=_sentence(report),
            drill=headline.drill_sentence(report),
            ended=_ended(report),
            decision=_decision(report),
            grids=[_grid(report, attempt) for attempt in _shown(report)],
            ladder=[_rung(report, number, attempt) for number, attempt in enumerate(report.attempts, 1)],
            legend=[(o.value, _LETTERS[o], _WORDS[o]) for o in Outcome],
            timings=_timings(report),
            timings_of=_timed(report).rung.name if report.attempts else "",
            notes=(*report.decision.notes, *report.notes),
            matrices=[(a.rung.name, a.matrix) for a in report.attempts if a.matrix],
            candidates=[(c, CLASSES[c.failure].summary) for c in report.verdict.candidates],
            facts=_facts(report),
            ranks_text=ranks_text,
            ok=report.verdict.failure is FailureClass.OK,
            codes=_codes(report),
            flight=_flight(report),
        )
    )


@functools.cache
def _template() -> Any:
    try:
        import jinja2
    except ImportError:
        raise NoTemplates("the page needs jinja2", help=("pip install 'ray-nccl-guard[html]'",)) from None
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(resources.files(__package__).joinpath("page.html").read_text(encoding="utf-8"))


def _level(report: Report) -> str:
    if report.decision.action is Action.REFUSE or _ended(report)["bad"]:
        return "error"
    return "ok" if report.verdict.failure is FailureClass.OK and not report.guard_error else "warning"


def _sentence(report: Report) -> str:
    return render.render(report).splitlines()[0]


def _flight(report: Report) -> str:
    """The tables of a run that ended badly, and its record sheet."""
    if not report.flight:
        return ""
    try:
        verdict = FlightVerdict.from_json(report.flight)
    except (KeyError, TypeError, ValueError):  # of another version, or by hand: the page is worth having without
        return "<p>What the Flight Recorder told is not in a form that this version knows; see report.json.</p>"
    return fragment(verdict, str(report.flight.get("sheet", "")))


def _ended(report: Report) -> dict[str, Any]:
    """How training ended, if it ended badly and dumps were collected: the sentence, and who is where."""
    found = report.flight or {}
    same: dict[tuple[str, str, str], list[int]] = {}
    for end in found.get("ranks_ended", ()):
        same.setdefault((end["how"], end["what"], end["place"]), []).append(end["rank"])
    return {
        "bad": found.get("kind", "none") != "none",
        "summary": found.get("summary", ""),
        "failure": found.get("failure", ""),
        "because": found.get("because", ()),
        "next": found.get("next", ""),
        "folder": found.get("folder", ""),
        "ranks": [(ranks_text(ranks), how, what, place) for (how, what, place), ranks in same.items()],
    }


def _decision(report: Report) -> list[tuple[str, str]]:
    decision, verdict = report.decision, report.verdict
    relief = " ".join(f"{k}={v}" for k, v in decision.relief.items())
    rows = [
        ("decision", {
            Action.PROCEED: f"proceed with {decision.backend}", Action.RETRY: "try again with fresh workers",
            Action.FALL_BACK: f"fall back: {report.backend_wanted} → {decision.backend}", Action.REFUSE: "refuse to train",
        }[decision.action]),
        ("setting", relief),
        ("because", decision.because),
        ("cost", price.sentence(report) if decision.action is Action.FALL_BACK else ""),
        ("proved", ", ".join(report.collectives_proved)),
        ("certainty", verdict.certainty.value if verdict.failure is not FailureClass.OK else ""),
        ("located", report.located.sentence if report.located else ""),
        ("ruled out", "; ".join(verdict.ruled_out)),
        ("against", "; ".join(verdict.against)),
        ("caution", verdict.caution),
        ("first remedy", CLASSES[verdict.failure].remedy if verdict.failure is not FailureClass.OK else ""),
        ("to be sure", verdict.next),
        ("guard took", f"{report.timings_s['guard']:.2f} s" if "guard" in report.timings_s else ""),
    ]  # fmt: skip
    return [(name, text) for name, text in rows if text]


def _shown(report: Report) -> list[Attempt]:
    """The attempt that the verdict is about, and the one that is trained on."""
    found = [a for a in (report.failed, report.chosen) if a is not None]
    return found[:1] if len(found) == 2 and found[0] is found[1] else found


def _grid(report: Report, attempt: Attempt) -> dict[str, Any]:
    """The ranks by host, stages down and ranks across: what one looks at to see who is different."""
    results = {r.rank: r for r in attempt.results}
    steps = [s for s in Step if any(record.step is s for r in attempt.results for record in r.steps)] or list(Step)
    hosts: dict[str, list[int]] = {}
    for fact in report.facts:
        hosts.setdefault(fact.host or fact.node, []).append(fact.rank)
    missing = ProbeResult(rank=-1, outcome=Outcome.MISSING)
    blocks = []
    for host, ranks in list(hosts.items())[:_MOST_HOSTS]:
        columns = [results.get(rank, missing) for rank in ranks]
        rows = [(s.value, [_cell(rank, result, s) for rank, result in zip(ranks, columns, strict=True)]) for s in steps]
        blocks.append({"host": host, "ranks": ranks, "rows": rows})
    odd = [r for r in attempt.results if r.outcome not in (Outcome.OK, Outcome.WAITING, Outcome.NOT_RUN)]
    return {
        "name": attempt.rung.name,
        "outcome": "passed on every rank" if attempt.evidence.ok else attempt.verdict.failure.value,
        "blocks": blocks,
        "left": len(hosts) - len(blocks),
        "small": len(report.facts) > _LARGE_CELLS,
        "folded": attempt.evidence.ok and attempt is not report.failed,
        "culprits": set(attempt.verdict.culprit_ranks),
        "odd": [(r.rank, _WORDS[r.outcome], r.step.value if r.step else "", r.detail, r.error) for r in odd[:16]],
        "odd_left": max(0, len(odd) - 16),
    }


def _cell(rank: int, result: ProbeResult, step: Step) -> Cell:
    record = next((s for s in result.steps if s.step is step), None)
    if record is not None:
        title = f"rank {rank}, {step.value}: {_WORDS[record.outcome]}, {record.seconds:.3f} s"
        title = f"{title}; {record.detail}" if record.detail else title
        taken = f"{record.seconds:.2f}" if record.outcome is Outcome.OK else ""  # a step that was not run took none
        return Cell(record.outcome.value, _LETTERS[record.outcome], title, taken)
    lost = result.outcome in (Outcome.MISSING, Outcome.DIED) and not result.steps
    outcome = result.outcome if lost else Outcome.NOT_RUN
    return Cell(outcome.value, _LETTERS[outcome], f"rank {rank}, {step.value}: {_WORDS[outcome]}")


def _rung(report: Report, number: int, attempt: Attempt) -> dict[str, Any]:
    measured = attempt.all_reduce_s
    size = max(measured, default=0)
    return {
        "number": number,
        "name": attempt.rung.name,
        "origin": attempt.evidence.origin.value.replace("_", " "),
        "why": attempt.rung.why,
        "ok": attempt.evidence.ok,
        "chosen": attempt is report.chosen,
        "drill": attempt.drill,
        "failure": "passed" if attempt.evidence.ok else attempt.verdict.failure.value,
        "ranks": "" if attempt.evidence.ok else ranks_text(attempt.verdict.culprit_ranks),
        "seconds": attempt.seconds,
        "group": attempt.group_attempt,
        "price": f"{size / (1 << 20):.3g} MiB in {measured[size] * 1e3:.3g} ms" if measured else "",
    }


def _timed(report: Report) -> Attempt:
    return report.chosen or report.failed or report.attempts[-1]


def _timings(report: Report) -> list[tuple[str, float, float, int | None]]:
    """Stage, slowest and median seconds on the rung that is trained on (or that failed), and the slowest rank."""
    rows: list[tuple[str, float, float, int | None]] = []
    for step in Step:
        taken = [
            (s.seconds, r.rank)
            for r in (_timed(report).results if report.attempts else ())
            for s in r.steps
            if s.step is step
        ]
        if taken:
            slowest, rank = max(taken)
            median = sorted(seconds for seconds, _ in taken)[len(taken) // 2]
            rows.append((step.value, slowest, median, rank if len(taken) > 1 else None))
    return rows


def _codes(report: Report) -> list[tuple[str, str]]:
    """What the words of the matrix mean, those that are in it."""
    present = {word for a in report.attempts if a.matrix for row in a.matrix.rows for word in row}
    return [(word, meaning) for word, meaning in grid.MEANINGS.items() if word in present]


def _facts(report: Report) -> dict[str, Any]:
    differ = {d.name: d for d in report.skew}
    first = report.facts[0] if report.facts else None
    common: Sequence[tuple[str, str]] = () if first is None else (
        ("hosts", str(len({f.node for f in report.facts}))),
        ("torch", first.torch_version),
        ("python", first.python_version),
        ("driver", first.driver_version),
        ("GPU", first.gpu.name if first.gpu else ""),
        ("libnccl", " ".join(filter(None, (first.libnccl.get("version"), first.libnccl.get("path"))))),
        *((f"env.{k}", v) for k, v in first.settings.items()),
    )  # fmt: skip
    return {
        "common": [(k, v) for k, v in common if v and k not in differ and f"{k}.version" not in differ],
        "skew": list(differ.values()),
        "not_run": [(f.rank, name, why) for f in report.facts for name, why in f.not_run.items()][:16],
    }
