"""Which ranks to look at first: those that name the cause of themselves, those that others name, those that are silent."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ray_nccl_guard.classes import FailureClass
from ray_nccl_guard.diagnosis.collectives import rank_of
from ray_nccl_guard.diagnosis.weigh import Sighting, Weighed
from ray_nccl_guard.evidence import Evidence
from ray_nccl_guard.probe.spec import Outcome
from ray_nccl_guard.rulebook import Blames, RuleRole

_F = FailureClass


def name(evidence: Evidence, sightings: Sequence[Sighting], top: Weighed) -> tuple[int, ...]:
    """The suspects in rank order; empty if nothing singles anybody out."""
    for reason in top.reasons:
        if reason.culprits:
            return reason.culprits
    named: set[int] = set()
    own: set[int] = set()
    for s in sightings:
        if s.failure is not top.failure:
            continue
        if s.rule.blames is Blames.NAMED:
            named.update(_listed(s.fields.get("culprits", "")))
        elif s.rule.blames is Blames.SELF and s.rule.role is RuleRole.CAUSE:
            rank = rank_of(s)
            if rank is not None:
                own.add(rank)
    if named:
        return tuple(sorted(named))
    everybody = {r.rank for r in evidence.ranks if r.rank is not None}
    if own and not (own >= everybody and len(everybody) > 1):
        return tuple(sorted(own))
    if top.failure in (_F.REMOTE_PEER_DIED, _F.COLLECTIVE_TIMEOUT_DESYNC, _F.INIT_TIMEOUT_HANG, _F.MISSING_RANK):
        return _silent(evidence, sightings, top)
    failed = {r.rank for r in evidence.with_outcome(Outcome.FAILED, Outcome.DIED) if r.rank is not None}
    return tuple(sorted(failed)) if failed and failed < everybody else ()


def silence(evidence: Evidence, sightings: Sequence[Sighting], ranks: Sequence[int]) -> str:
    """What is known of suspects that say nothing: no record at all, or one without a complaint. Empty if one says something."""
    if any(rank_of(s) in ranks and s.rule.role is not RuleRole.BOILERPLATE for s in sightings):
        return ""
    there = {r.rank for r in evidence.ranks if r.outcome is not Outcome.MISSING}
    if there.isdisjoint(ranks):
        return "there is no record of it" if len(ranks) == 1 else "there is no record of them"
    return "what it printed complains of nothing" if len(ranks) == 1 and there.issuperset(ranks) else ""


def hosts_of_the_cause(evidence: Evidence, sightings: Sequence[Sighting], top: Weighed) -> tuple[str, ...]:
    """The hosts whose own lines name the cause, where no line says its rank; empty if that is every host there is."""
    own = {s.record for s in sightings if s.failure is top.failure and s.rule.role is RuleRole.CAUSE}
    hosts = {evidence.ranks[record].host for record in own} - {""}
    everywhere = {r.host for r in evidence.ranks} - {""}
    return tuple(sorted(hosts)) if hosts < everywhere else ()


def _listed(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d{1,6}", text)]


def _silent(evidence: Evidence, sightings: Sequence[Sighting], top: Weighed) -> tuple[int, ...]:
    """Ranks of a known world that complain of nothing while others do: no record, or none of the complaints."""
    complaints = [s for s in sightings if s.rule.role in (RuleRole.SYMPTOM, RuleRole.CASCADE)]
    # A line that passes on another rank's trouble may speak of a timeout too: it is no complaint of this one's.
    relayed = {(s.record, s.order) for s in sightings if s.rule.blames is Blames.RELAY}
    complaining = {rank_of(s) for s in complaints if (s.record, s.order) not in relayed}
    if not complaining or evidence.world_size <= 0:
        return ()
    cut_short = (Outcome.OK, Outcome.WAITING)  # ended by the guard, so their silence means nothing
    absent = {r.rank for r in evidence.ranks if r.outcome not in cut_short} - complaining
    absent |= set(range(evidence.world_size)) - {r.rank for r in evidence.ranks}
    others = {r.rank for r in evidence.ranks} - complaining
    if top.failure in (_F.REMOTE_PEER_DIED, _F.INIT_TIMEOUT_HANG) and not absent and len(others) == 1:
        absent = others  # all but one complain of it, in the time that each had to fail by itself
    quiet = {r for r in absent if r is not None}
    return tuple(sorted(quiet)) if 0 < len(quiet) <= max(1, evidence.world_size // 2) else ()
