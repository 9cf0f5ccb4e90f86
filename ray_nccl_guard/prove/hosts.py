"""The hosts of a run as the network stages know them, and what those stages found, for the verdict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ray_nccl_guard.facts import Finding, RankFacts
from ray_nccl_guard.network import grid
from ray_nccl_guard.network.across import together
from ray_nccl_guard.network.addresses import AddressChoice, Library, choose
from ray_nccl_guard.network.findings import Host, Kind, NetworkFinding, ranks_of
from ray_nccl_guard.network.grid import Matrix
from ray_nccl_guard.network.stage import diagnose_rows
from ray_nccl_guard.network.store import store_findings
from ray_nccl_guard.probe.meet import Meeting
from ray_nccl_guard.probe.spec import Outcome, ProbeResult, RankTask, Step, StepRecord
from ray_nccl_guard.rung import GLOO, Rung


def of(facts: Sequence[RankFacts]) -> tuple[Host, ...]:
    """One `Host` per node, in rank order; its lowest rank speaks for it."""
    ranks: dict[str, list[RankFacts]] = {}
    for fact in facts:
        ranks.setdefault(fact.node, []).append(fact)
    return tuple(
        Host(rank=on[0].rank, name=on[0].host, ranks=tuple(f.rank for f in on), choice=on[0].addresses)
        for on in ranks.values()
    )


def address_findings(hosts: Sequence[Host], rung: Rung) -> tuple[Finding, ...]:
    """What is wrong with the addresses that the rung's backend would take under its settings, before anything connects."""
    library = Library.GLOO if rung.backend == GLOO else Library.NCCL
    known = [replace(host, choice=under(host.choice, rung.env)) for host in hosts]
    return tuple(found.finding() for found in together(known, library))


def under(choice: AddressChoice | None, env: Mapping[str, str]) -> AddressChoice | None:
    """The addresses that this host takes once `env` is set as well."""
    if choice is None or not any(name.endswith(("SOCKET_IFNAME", "SOCKET_FAMILY")) for name in env):
        return choice
    settings = {**(choice.env or {}), **env}
    return choose(settings, choice.interfaces, own_name=choice.own_name, node_ip=choice.node_ip)


def network_findings(hosts: Sequence[Host], met: Sequence[Meeting], task: RankTask) -> tuple[Finding, ...]:
    """What the store and peers stages saw, as sentences with names in them."""
    absent = sorted({rank for meeting in met for rank in meeting.absent})
    found = store_findings(
        {meeting.rank: meeting.reach for meeting in met},
        hosts,
        store=f"{task.store_host} port {task.store_port}",
        absent=absent,
    )
    rows = [meeting.row for meeting in met if meeting.row is not None]
    backend = GLOO if task.backend == GLOO else "nccl"
    if not any(f.decides for f in found):
        found += diagnose_rows(rows, hosts, backend)
    elif found[0].kind is Kind.STORE and rows:
        found = (_explained(found[0], diagnose_rows(rows, hosts, backend), hosts), *found[1:])
    return tuple(f.finding() for f in found)


def _explained(store: NetworkFinding, around: Sequence[NetworkFinding], hosts: Sequence[Host]) -> NetworkFinding:
    """The store's finding with what the hosts see of each other: the store alone cannot tell its host's fault from everybody's."""
    if not around:
        return store
    met, bracket, _guess = store.text.partition("): ")
    text = f"{met}{')' if bracket else ''}; {'; '.join(one.text for one in around[:3])}"
    if any(one.kind is Kind.ALL_PAIRS for one in around):
        return replace(store, text=text, hosts=(), ranks=ranks_of(hosts))
    blamed = [one for one in around if one.decides] or around
    ranks = sorted({rank for one in blamed for rank in one.ranks})
    return replace(store, text=text, hosts=tuple(name for one in blamed for name in one.hosts), ranks=tuple(ranks))


def matrix(hosts: Sequence[Host], met: Sequence[Meeting]) -> Matrix | None:
    """Who reached whom in the first round, for those who look at it; None if no host got that far."""
    rows = [meeting.row for meeting in met if meeting.row is not None and meeting.row.rounds]
    return grid.matrix([cell for row in rows for cell in row.rounds[0]], hosts) if rows else None


def met_result(meeting: Meeting) -> ProbeResult:
    """How far a rank got if the network stops everything."""
    at_store = not meeting.reach.ok or bool(meeting.error) or bool(meeting.absent)
    step = Step.STORE if at_store else Step.PEERS
    error = meeting.reach.text or meeting.error
    outcome = Outcome.FAILED if not meeting.reach.ok or meeting.error else Outcome.NOT_RUN
    return ProbeResult(
        rank=meeting.rank,
        outcome=outcome,
        step=step,
        error=error,
        steps=(StepRecord(step=step, outcome=outcome, seconds=meeting.seconds, detail=error),),
        seconds=meeting.seconds,
    )


def with_network_times(results: Sequence[ProbeResult], met: Sequence[Meeting]) -> tuple[ProbeResult, ...]:
    """The ranks' results with what the stages before their child took, so that a slow one can be seen although it passed."""
    by_rank = {meeting.rank: meeting for meeting in met}
    return tuple(_with_times(result, by_rank[result.rank]) if result.rank in by_rank else result for result in results)


def _with_times(result: ProbeResult, meeting: Meeting) -> ProbeResult:
    before = [StepRecord(step=Step.STORE, outcome=Outcome.OK, seconds=meeting.reach.seconds)]
    if meeting.row is not None:
        before.append(StepRecord(step=Step.PEERS, outcome=Outcome.OK, seconds=meeting.row.seconds))
    # The launcher comes to the store a second time, over a way that is known to be open.
    again = {Step.STORE} if any(s.step is Step.STORE and s.outcome is Outcome.OK for s in result.steps) else set()
    return replace(result, steps=(*before, *(s for s in result.steps if s.step not in again)))
