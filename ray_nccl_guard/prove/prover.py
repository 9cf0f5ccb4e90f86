"""Proves one rung on the workers: the network between hosts, a store in rank 0's worker, one launcher per rank."""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from ray_nccl_guard.facts import Finding, RankFacts
from ray_nccl_guard.guard import GroupLost, Proof
from ray_nccl_guard.network.grid import Matrix
from ray_nccl_guard.network.plan import first_round, row
from ray_nccl_guard.network.stage import MARGIN_S, longest_s
from ray_nccl_guard.probe import launch, look_around, meet, memory, store
from ray_nccl_guard.probe.drill import Fault, text_of
from ray_nccl_guard.probe.meet import Meeting
from ray_nccl_guard.probe.spec import Outcome, ProbeResult, ProbeSpec, RankTask, Step
from ray_nccl_guard.probe.workers import Answer, WorkerGroup, values
from ray_nccl_guard.prove import hosts
from ray_nccl_guard.prove.lost import lost_result, without_answer
from ray_nccl_guard.rung import Rung

# After one rank has failed, every launcher ends its own child within the grace and answers; what is still missing then is
# a worker that died, is stopped or hangs itself.
_SILENCE_S = 1.8
_STORE_S = 30.0
# What DESIGN D5 allows once for the driver to compile libnccl for a GPU that it has no code for.
_JIT_S = 300.0


class Prover:
    """Runs rungs on one worker group.

    Attributes:
        drill: the faults of a drill: rungs that they may strike are acted out.
        store: address and port of a store that serves anyway; None to serve one from rank 0's worker for each rung.
        say: told what is going on, for whoever watches.
    """

    def __init__(
        self,
        workers: WorkerGroup,
        facts: Sequence[RankFacts],
        collectives: tuple[str, ...],
        spec: ProbeSpec,
        *,
        drill: tuple[Fault, ...] = (),
        store: tuple[str, int] | None = None,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.workers, self.facts, self.collectives, self.spec = workers, facts, collectives, spec
        self.drill, self.store, self.say = drill, store, say
        self._outlived: list[str] = []
        self.hosts = hosts.of(facts)
        self.notes: list[str] = []
        self.accept_s = 0.0
        self._ends_s = math.inf

    def prove(self, rung: Rung, within_s: float = math.inf) -> Proof:
        """One probe of `rung` on every rank; in a drill acted out, where a fault of it strikes.

        Args:
            within_s: seconds for it, whatever its steps may take; what grows with the job (`RankTask.jit_s`, the parts for
                each rank) comes on top.

        Raises:
            GroupLost: a worker died or gave no answer.
        """
        self._ends_s = time.monotonic() + within_s
        proof = self._prove(rung)
        if not proof.drill or any(r.outcome is not Outcome.OK for r in proof.results):
            return proof
        # Acting proves nothing, and what has passed will be trained on.
        self.notes.append(f"drill: {rung.name} outlived {proof.drill}, so it was proved for real")
        self._outlived.append(rung.name)
        return self._prove(rung)

    def struck(self, rung: Rung) -> tuple[Fault, ...]:
        """The faults of the drill that strike some rank on `rung`; without any it is proved for real."""
        # What a drill falls back to is trained on, so gloo is acted out only where the job asked for it.
        if rung.name in self._outlived or ("nccl" not in rung.backend and rung.price):
            return ()
        world = len(self.facts)
        return tuple(
            fault
            for fault in self.drill
            if ("nccl" in rung.backend or not fault.of_nccl)
            and any(fault.strikes(f.rank, world, {**f.settings, **rung.env}) for f in self.facts)
        )

    def _prove(self, rung: Rung) -> Proof:
        found, seen = hosts.address_findings(self.hosts, rung), None
        met: tuple[Meeting, ...] = ()
        if any(f.decides for f in found):
            return self._not_run(found)
        with self.open_store() as (run_id, host, port):
            tasks = [self.task(rung, fact, run_id, host, port) for fact in self.facts]
            if len(self.hosts) > 1:
                self.say(f"{rung.name}: the store, and the connections between {len(self.hosts)} hosts")
                met, found, seen = self._meet(tasks)
                if any(f.decides for f in found):
                    return Proof(results=tuple(map(hosts.met_result, met)), findings=found, matrix=seen)
            self.say(f"{rung.name}: the communicator and its collectives on {len(tasks)} ranks")
            drill = text_of(self.struck(rung))
            try:
                results = self._launch(tasks, found, seen)
            except GroupLost as lost:
                lost.proof = replace(lost.proof, drill=drill)
                raise
        return Proof(results=hosts.with_network_times(results, met), findings=found, matrix=seen, drill=drill)

    @contextmanager
    def open_store(self) -> Iterator[tuple[str, str, int]]:
        """A run id, and the address and port of a store for it.

        Raises:
            GroupLost: rank 0's worker does not answer.
        """
        run_id = uuid.uuid4().hex[:12]
        if self.store is not None:
            yield run_id, *self.store
            return
        opened = self.workers.ask_one(0, store.open_store, run_id, self.facts[0].address, deadline_s=_STORE_S)
        if not opened.ok:
            values([opened])
            raise GroupLost([lost_result(opened)])
        self._heed(opened.value)
        try:
            yield run_id, self.facts[0].address, opened.value.port
        finally:
            self.workers.ask_one(0, store.close_store, deadline_s=_SILENCE_S)

    def _heed(self, opened: store.Opened) -> None:
        """A store that answers slowly gets its time from every rank, and is named: plain torch would wait as long."""
        if opened.accept_s and not self.accept_s:
            self.notes.append(
                f"torch's store on rank 0 takes {opened.accept_s:.1f} s for each connection: it asks for the name of whoever "
                "connects, and the name server in /etc/resolv.conf there does not answer in time; name the job's hosts in "
                "/etc/hosts, or mend the name server"
            )
        self.accept_s = max(self.accept_s, opened.accept_s)

    def _store_s(self) -> float:
        return self.spec.store_s + self.accept_s * len(self.facts)

    def _not_run(self, found: tuple[Finding, ...]) -> Proof:
        return Proof(results=tuple(ProbeResult(rank=f.rank, outcome=Outcome.NOT_RUN) for f in self.facts), findings=found)

    def _meet(self, tasks: list[RankTask]) -> tuple[tuple[Meeting, ...], tuple[Finding, ...], Matrix | None]:
        """The store and the peers, before any child: a network that cannot carry the backend is named in seconds."""
        speakers = [host.rank for host in self.hosts]
        choices = [hosts.under(fact.addresses, task.env) for fact, task in zip(self.facts, tasks, strict=True)]
        answers = self.workers.ask(
            meet.meet,
            [(task, speakers, choice) for task, choice in zip(tasks, choices, strict=True)],
            deadline_s=2 * self._store_s() + longest_s(self.spec.peers_s),
            patience_s=self._met_patience_s,
        )
        values(answers)
        met = tuple(a.value for a in answers if a.ok)
        lost = any(not a.ok for a in answers)
        if not lost and any(not meeting.reach.ok for meeting in met):
            met = self._look_around(tasks, met)
        found = hosts.network_findings(self.hosts, met, tasks[0])
        seen = hosts.matrix(self.hosts, met)
        if lost:
            results = [hosts.met_result(a.value) if a.ok else lost_result(a) for a in answers]
            raise GroupLost(results, found, seen)
        return met, found, seen

    def _look_around(self, tasks: list[RankTask], met: tuple[Meeting, ...]) -> tuple[Meeting, ...]:
        """The meetings with rows of their own: hosts that cannot exchange through the store are led through one round."""
        speakers = [host.rank for host in self.hosts]
        own = [(tasks[rank], hosts.under(self.facts[rank].addresses, tasks[rank].env)) for rank in speakers]
        margin_s = self.spec.peers_s + MARGIN_S
        try:
            listening = self.workers.ask(look_around.listen, own, deadline_s=margin_s, ranks=speakers)
            targets = [a.value for a in listening if a.ok and a.value is not None]
            pairs = first_round(speakers)
            wanted = [(*mine, [t for t in targets if t.rank in row(pairs, mine[0].rank)]) for mine in own]
            rows = self.workers.ask(look_around.look, wanted, deadline_s=margin_s, ranks=speakers)
        finally:
            self.workers.ask(look_around.stop, deadline_s=margin_s, ranks=speakers)
        seen = {a.rank: a.value for a in rows if a.ok}
        return tuple(replace(meeting, row=seen.get(meeting.rank, meeting.row)) for meeting in met)

    def _met_patience_s(self, answer: Answer) -> float | None:
        if answer.ok and answer.value.row is not None:
            # All speakers leave the stage within one exchange of each other; a worker that is still missing then is stopped.
            return self.spec.peers_s + MARGIN_S
        return self._store_s() + longest_s(self.spec.peers_s)

    def _launch(self, tasks: list[RankTask], found: tuple[Finding, ...], seen: Matrix | None) -> tuple[ProbeResult, ...]:
        longest = 2 * sum(tasks[0].deadline_s(step) for step in Step) + launch.GRACE_S
        answers = self.workers.ask(
            launch.run_rank, [(task,) for task in tasks], deadline_s=longest, patience_s=self._patience_s
        )
        values(answers)
        died = any(a.died is not None for a in answers)
        results = [a.value if a.ok else without_answer(a, cut_short=died) for a in answers]
        if any(not a.ok for a in answers):
            raise GroupLost(results, found, seen)
        return tuple(self.settle(results))

    def task(
        self, rung: Rung, fact: RankFacts, run_id: str, host: str, port: int, world: Sequence[int] | None = None
    ) -> RankTask:
        """One rank's task; `world` are the ranks that take part, in the order of their ranks there (default: all)."""
        members = list(world) if world is not None else [f.rank for f in self.facts]
        rank = members.index(fact.rank)
        struck = self.struck(rung)
        settings = {**fact.settings, **rung.env}
        jit_s = _JIT_S if any(f.jit for f in self.facts) else 0.0
        grown_s = jit_s + (self.spec.comm_init_per_rank_s + 2 * self.accept_s) * len(members)
        return RankTask(
            run_id=run_id,
            backend=rung.backend,
            rank=rank,
            world_size=len(members),
            store_host=host,
            store_port=port,
            device_index=fact.device_index,
            local_rank=fact.local_rank,
            collectives=self.collectives,
            price=rung.price,
            jit_s=jit_s,
            accept_s=self.accept_s,
            drill=tuple(f for f in struck if f.strikes(fact.rank, len(members), settings)) if struck else None,
            within_s=max(0.0, self._ends_s - time.monotonic()) + grown_s,
            env={**_launch_variables(fact, rank, len(members)), **rung.env},
            spec=self.spec,
        )

    def _patience_s(self, answer: Answer) -> float | None:
        result = answer.value
        if isinstance(result, ProbeResult) and result.outcome is Outcome.OK:
            return self.spec.teardown_s + launch.GRACE_S
        return launch.GRACE_S + _SILENCE_S

    def settle(self, results: list[ProbeResult]) -> list[ProbeResult]:
        """Give children that failed the time to be reaped and their GPU memory the time to come back."""
        failed = [r for r in results if r.stuck or (r.outcome is not Outcome.OK and r.free_before_bytes)]
        if not failed:
            return results
        gpus = {f.rank: f.gpu.uuid if f.gpu else "" for f in self.facts}
        late = self.workers.ask(
            launch.settle,
            [(gpus[r.rank], r.free_before_bytes) for r in failed],
            deadline_s=launch.SETTLE_S + memory.BACK_S + _SILENCE_S,
            ranks=[r.rank for r in failed],
        )
        settled = {a.rank: a.value for a in late if a.ok}
        self.notes += [note for _, note in settled.values() if note]
        return [replace(r, stuck=settled.get(r.rank, (r.stuck, ""))[0]) for r in results]


def _launch_variables(fact: RankFacts, rank: int, world_size: int) -> dict[str, str]:
    # torch 2.15's nccl and libraries read them where a device is not given.
    return {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(fact.local_rank)}
