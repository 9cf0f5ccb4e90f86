"""What changed since the last run that passed, and what that says of where the failure lives: reports' facts side by side.

    then = [saved.load(path) for path in ...]            # of the same storage, oldest first
    print("\n".join(compare(report, then).sentences))

It explains nothing by itself: it is the first question that whoever meets a failure asks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ray_nccl_guard import saved
from ray_nccl_guard.classes import FailureClass
from ray_nccl_guard.errors import UsageError
from ray_nccl_guard.facts import SETTING_PREFIXES, RankFacts
from ray_nccl_guard.report import Report

UNSET = "(unset)"
MAX_NAMED = 4  # hosts named in one sentence; a list of hundreds hides what the sentence says

# By host: the values that its ranks have of a fact, in order. Several where the ranks of one host differ.
_Values = tuple[str, ...]
_OWN = ("CUDA_VISIBLE_DEVICES",)  # each rank's own: schedulers set it anew in every run
# Below the program: a change of these is where a failure on the same program comes from.
_SYSTEM = ("driver", "libnccl", "torch", "gpu", "limit", "shm", "interface", "NCCL_")
_SPEECH = ("NCCL_DEBUG",)  # what is printed, with all that goes with it


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One fact that is not what it was.

    Attributes:
        before: empty for what only came in, as new hosts do.
        hosts: where; empty if it is so on every host.
    """

    name: str
    before: str
    now: str
    hosts: tuple[str, ...] = ()

    @property
    def sentence(self) -> str:
        where = f" on {_names(self.hosts)}" if self.hosts else ""
        return f"{self.name}{where}: {self.now}" + (f" now, {self.before} then" if self.before else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One report beside those of earlier runs.

    Attributes:
        largest_passed: ranks of the largest world that ever passed with the backend wanted, 0 if none did.
        against: world size of the run that the facts were compared with, 0 if there was none: the latest that passed with as
            many ranks, else the latest that passed.
        changes: what is not as it was in that run.
        signals: what speaks for the infrastructure or for the program. None of them proves it.
    """

    largest_passed: int = 0
    against: int = 0
    changes: tuple[Change, ...] = ()
    signals: tuple[str, ...] = ()

    @property
    def sentences(self) -> tuple[str, ...]:
        if not self.against:
            return ("no earlier run has passed, so nothing can be compared", *self.signals)
        since = f"since {_ranks(self.against)} passed"
        lines = [f"{since}: {change.sentence}" for change in self.changes] or [f"{since}: no recorded fact has changed"]
        if self.largest_passed != self.against:
            lines.append(f"the largest world that ever passed has {_ranks(self.largest_passed)}")
        return (*lines, *self.signals)

    def to_json(self) -> dict[str, Any]:
        return {
            "largest_passed": self.largest_passed,
            "against": self.against,
            "changes": [
                {"name": c.name, "before": c.before, "now": c.now, "hosts": list(c.hosts)} for c in self.changes
            ],
            "signals": list(self.signals),
        }  # fmt: skip


def compare_json(report: Mapping[str, Any], earlier: Iterable[Any]) -> Comparison:
    """`compare` of what `Report.to_json` wrote. What cannot be read among the earlier ones is passed over.

    Raises:
        UsageError: `report` itself is none.
    """
    readable = []
    for data in earlier:
        try:
            readable.append(saved.from_json(data))
        except UsageError:  # a file of another tool, or one that was cut, says nothing about this run
            continue
    return compare(saved.from_json(report), readable)


def compare(report: Report, earlier: Sequence[Report]) -> Comparison:
    """`report` beside the last good one of `earlier` (oldest first, without `report`)."""
    # A drill fails on a healthy cluster: it says nothing of any other run.
    alike = [other for other in earlier if other.backend_wanted == report.backend_wanted and not other.drill]
    good = [other for other in alike if passed(other)]
    largest = max((other.world_size for other in good), default=0)
    if not good:
        return Comparison()
    last = next((other for other in reversed(good) if other.world_size == report.world_size), good[-1])
    changes = _changes(report, last)
    signals = () if passed(report) else tuple(_signals(report, alike, last, changes, largest))
    return Comparison(largest_passed=largest, against=last.world_size, changes=changes, signals=signals)


def passed(report: Report) -> bool:
    """It trained on the backend that was asked for, proved on every rank, and its training did not end in a hang. No drill did."""
    chosen = report.chosen
    return (
        chosen is not None
        and chosen.rung.backend == report.backend_wanted
        and report.guard_error is None
        and report.flight is None
        and not report.drill
    )


def _changes(report: Report, last: Report) -> tuple[Change, ...]:
    now, then = _by_host(report.facts), _by_host(last.facts)
    found = [change for change in _of_run(report, last) if change.now != change.before]
    new = tuple(host for host in now if host not in then)
    if then and new and len(new) < len(now):
        found.append(Change(name="new hosts", before="", now=_names(new)))
    names = sorted({name for host in (*now.values(), *then.values()) for name in host})
    for name in names:
        found += _of_fact(name, {h: f.get(name, (UNSET,)) for h, f in now.items()},
                          {h: f.get(name, (UNSET,)) for h, f in then.items()})  # fmt: skip
    return tuple(found)


def _of_run(report: Report, last: Report) -> tuple[Change, ...]:
    """What is true of the run as a whole: its size, and the settings with which it passes."""
    now, then = (", ".join(f"{k}={v}" for k, v in sorted(r.decision.relief.items())) or "none" for r in (report, last))
    return (
        Change(name="world size", before=str(last.world_size), now=str(report.world_size)),
        Change(name="relief that was needed", before=then, now=now if passed(report) else then),
    )


def _of_fact(name: str, now: Mapping[str, _Values], then: Mapping[str, _Values]) -> list[Change]:
    """A host of both runs is compared with itself, a new one with all values that were there."""
    if not name.startswith(SETTING_PREFIXES):  # a setting can be unset; another fact without a value was not looked at
        now, then = ({host: v for host, v in side.items() if v != (UNSET,)} for side in (now, then))
    ever = {value for values in then.values() for value in values}
    hosts: dict[tuple[str, str], list[str]] = {}
    for host, values in now.items():
        before = then.get(host, tuple(sorted(ever)))
        same = values == before if host in then else set(values) <= ever
        if not same and before:
            hosts.setdefault((", ".join(before), ", ".join(values)), []).append(host)
    return [
        Change(name=name, before=before, now=value, hosts=() if len(where) == len(now) else tuple(where))
        for (before, value), where in hosts.items()
    ]


def _by_host(facts: Sequence[RankFacts]) -> dict[str, dict[str, _Values]]:
    """The facts of each host; the values of its ranks side by side."""
    hosts: dict[str, dict[str, set[str]]] = {}
    ranks: dict[str, int] = {}
    for fact in facts:
        ranks[fact.host] = ranks.get(fact.host, 0) + 1
        values = hosts.setdefault(fact.host, {})
        for name, value in _of_rank(fact).items():
            values.setdefault(name, set()).add(value)
    return {
        host: {"ranks on a host": (str(ranks[host]),), **{name: tuple(sorted(found)) for name, found in values.items()}}
        for host, values in hosts.items()
    }


def _of_rank(fact: RankFacts) -> dict[str, str]:
    gpu, chosen = fact.gpu, fact.addresses
    library = fact.libnccl
    values = {
        "torch": fact.torch_version,
        "python": fact.python_version,
        "driver": fact.driver_version,
        "gpu": gpu.name if gpu else "",
        # The same version may be another build.
        "libnccl": " ".join(library[k] for k in ("version", "fingerprint") if library.get(k)),
        "shm size in bytes": "" if fact.shm_total_bytes is None else str(fact.shm_total_bytes),
        "interface of NCCL": chosen.nccl.interface if chosen else "",
        "interface of gloo": chosen.gloo.interface if chosen else "",
        **{f"limit {name}": str(value) for name, value in fact.limits.items()},
        **{name: value for name, value in fact.settings.items() if name not in _OWN},
    }
    return {name: value for name, value in values.items() if value}


def _signals(
    report: Report, alike: Sequence[Report], last: Report, changes: Sequence[Change], largest: int
) -> Iterable[str]:
    if largest < report.world_size:
        yield (
            f"it fails from a world size on: {_ranks(largest)} passed, {_ranks(report.world_size)} did not; "
            "that speaks for the infrastructure"
        )
    system = [c.name for c in changes if c.name.startswith(_SYSTEM) and not c.name.startswith(_SPEECH)]
    if system:
        yield f"right after a change of {_names(tuple(dict.fromkeys(system)))}: that speaks for the infrastructure"
    old = {fact.host for fact in last.facts}
    strangers = tuple(host for host in report.verdict.culprit_hosts if host not in old)
    known = any(fact.host in old for fact in report.facts)  # pods have a new name in every run, which says nothing
    if known and strangers and strangers == report.verdict.culprit_hosts:
        yield f"the hosts to look at ({_names(strangers)}) were not in the run that passed: that speaks for these hosts"
    if not changes:
        same = [other for other in alike if other.world_size == report.world_size and not _changes(report, other)]
        good = sum(map(passed, same))
        failures = {other.verdict.failure for other in (*same, report)} - {FailureClass.OK}
        kinds = " and its failure changes" if len(failures) > 1 else ""
        yield (
            f"{good} of {len(same)} earlier runs with the same facts and size passed: it comes and goes{kinds}, "
            "or the cause is not among the facts (the program, the load, a device)"
        )


def _ranks(number: int) -> str:
    return f"{number} rank{'s' * (number != 1)}"


def _names(names: Sequence[str]) -> str:
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return ", ".join(names[:MAX_NAMED]) + more
