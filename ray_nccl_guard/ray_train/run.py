"""One start of a worker group under the guard: facts, pre-flight, training group, and the decision to go on, restart or refuse."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

import ray

from ray_nccl_guard import differences, eager, facts, headline
from ray_nccl_guard.classes import FailureClass
from ray_nccl_guard.evidence import Origin
from ray_nccl_guard.guard import GroupLost, Preflight
from ray_nccl_guard.ladder import Ladder
from ray_nccl_guard.policy import Action, Policy
from ray_nccl_guard.probe.drill import text_of
from ray_nccl_guard.probe.spec import Outcome, ProbeSpec
from ray_nccl_guard.prove.prover import Prover
from ray_nccl_guard.prove.worlds import Worlds
from ray_nccl_guard.ray_train import earlier, late_settings, later_groups, on_worker, publish
from ray_nccl_guard.ray_train.errors import GuardRestart, NcclInitRefused
from ray_nccl_guard.ray_train.flight_collect import FlightWatch
from ray_nccl_guard.ray_train.group import TrainingGroup
from ray_nccl_guard.ray_train.placement import Placement
from ray_nccl_guard.ray_train.run_state import RunState
from ray_nccl_guard.ray_train.settings import Mode
from ray_nccl_guard.ray_train.workers import Answer, Workers, values
from ray_nccl_guard.report import Report, ranks_text
from ray_nccl_guard.rung import Decision, Rung, Wanted, has_legacy
from ray_nccl_guard.verdict import Verdict

# Facts come from /proc, NVML and the files of the GPU libraries, which are read through once for what they are built for.
_FACTS_S = 150.0
# V1 workers import torch here for the first time: 7 to 50 s were measured with several at once on two busy cores.
_IMPORT_S = 300.0
_READY_S = 15.0  # some variables, and a few kB to each worker; one that does not answer is found by the training group


class GuardedStart:
    """One call of `on_start`."""

    def __init__(self, worker_group: Any, config: Any, run_state: RunState) -> None:
        self.workers = Workers(worker_group)
        self.world_size = len(worker_group)
        self.config, self.run_state = config, run_state
        self.settings = run_state.settings
        observed = Policy.observe(sources={"name": "environment"})
        self.policy = observed if run_state.mode is Mode.OBSERVE else self.settings.policy
        self.facts: tuple[facts.RankFacts, ...] = ()
        self.group: TrainingGroup | None = None
        self.placement = Placement(self.workers)
        self.started_s = time.monotonic()

    def run(self) -> bool:
        """Prove a backend and form the training group on it; False if Ray is to form it as without the guard.

        Raises:
            NcclInitRefused: nothing may train here.
            GuardRestart: these workers are spent, fresh ones take the next rung.
        """
        self.run_state.starts += 1
        self.placement.look_up()
        self.facts = self._facts()
        preflight = self._preflight()
        report = self._decide(preflight)
        report = self._finish(report)
        if report.decision.action is Action.REFUSE:
            self._refuse(report)
        publish.announce(report)
        watch = FlightWatch(self.workers, self.facts, report, self.run_state.starts)
        ready = self._get_ready(report, None if self.policy.report_only else watch.name)
        watch.armed = tuple(answer.value[0] for answer in ready if answer.ok)
        if self.policy.report_only:
            self.run_state.flight = watch
            watch.attend()
        else:
            self._train_on(report, preflight, watch, ready[0])
        publish.begin()  # where only observed, before Ray forms the group: if that fails, the report is there
        return not self.policy.report_only

    def _get_ready(self, report: Report, recorder_name: str | None) -> list[Answer]:
        """Report and flight recorder in every worker. One that does not answer here goes without."""
        # Once into the object store, not once for each worker: at 4,096 ranks it is 8 MB (benchmarks/publish.py).
        shared = ray.put(report.to_json())
        asked = [(shared, fact.rank, fact.node, recorder_name) for fact in self.facts]
        answers = self.workers.ask(on_worker.get_ready, asked, deadline_s=_READY_S)
        for answer in answers:
            if answer.raised is not None:
                publish.log.warning("nccl_guard: no flight recorder on rank %d: %r", answer.rank, answer.raised)
        return answers

    def _facts(self) -> tuple[facts.RankFacts, ...]:
        if not self.placement.can_restart:
            values(self.workers.ask(on_worker.import_torch, deadline_s=_IMPORT_S))
        answers = self.workers.ask(
            on_worker.describe, [(rank,) for rank in range(self.world_size)], deadline_s=_FACTS_S, patience_s=lambda a: 30.0
        )
        values(answers)
        gone = [a for a in answers if a.died or a.silent]
        if gone:
            self._restart_for_lost(gone, "before the probe began")
        found: list[facts.RankFacts] = [a.value for a in answers]
        seen: dict[str, int] = {}
        for index, fact in enumerate(found):
            local_rank = seen.get(fact.node, 0)
            seen[fact.node] = local_rank + 1
            found[index] = replace(fact, local_rank=local_rank)
        return tuple(found)

    def _preflight(self) -> Preflight:
        state = self.run_state
        identity = (state.backend, tuple(sorted(f.identity for f in self.facts)))
        if state.ladder is None or identity != state.identity:
            if state.identity is not None:
                state.notes.append(
                    "the nodes, GPUs or settings changed since the last check: it starts at the first rung again"
                )
                state.attempts, state.decision, state.failures = [], None, 0
            state.ladder = Ladder(self._wanted(), self.policy)
            state.identity = identity
        asked = self._wanted().asked_gpus
        return Preflight(
            facts=self.facts,
            ladder=state.ladder,
            findings=(
                *facts.findings(self.facts, backend=state.backend, asked_gpus=asked),
                *differences.findings(self.facts, backend=state.backend),
            ),
            rules=self.settings.rules,
            attempts=state.attempts,
            group_attempt=state.starts,
            drill=text_of(self.settings.drill),
        )

    def _wanted(self) -> Wanted:
        group = self.workers.group
        resources = group.get_resources_per_worker() if hasattr(group, "get_resources_per_worker") else {}
        return Wanted(
            backend=self.run_state.backend,
            world_size=self.world_size,
            asked_gpus=float(resources.get("GPU", getattr(group, "num_gpus_per_worker", 0)) or 0),
            user_settings=facts.merged(fact.settings for fact in self.facts),
            settings_from=facts.merged(fact.settings_from for fact in self.facts),
            collectives=self.settings.collectives,
            on_gpu=any(fact.device_index is not None for fact in self.facts),
            has_legacy=has_legacy(self.facts[0].torch_version) if self.facts else False,
        )

    def _decide(self, preflight: Preflight) -> Report:
        state = self.run_state
        settings = self.settings
        if settings.probe is None:
            return preflight.report(preflight.ladder.after_pass())
        if state.decision is not None and state.ended_well and state.decision.backend is not None and not settings.drill:
            return preflight.report(replace(state.decision, because="the check of the same workers' nodes was reused"))
        prover = Prover(self.workers, self.facts, settings.collectives, settings.probe, drill=settings.drill)
        try:
            return preflight.run(prover.prove, partial(Worlds, prover))
        except GroupLost as lost:
            self._after_lost(preflight, lost)
        finally:
            state.accept_s = prover.accept_s
            state.notes += [note for note in prover.notes if note not in state.notes]

    def _after_lost(self, preflight: Preflight, lost: GroupLost) -> NoReturn:
        if any(r.error.startswith("preempted") for r in lost.results):
            self._restart(preflight, "a worker was taken away by the cluster", counts=False)
        self._restart(preflight, "the workers are spent, and the next rung needs fresh ones")

    def _finish(self, report: Report) -> Report:
        report = report.with_changes(
            notes=(*self.run_state.notes, *(note for fact in self.facts for note in fact.notes)),
            drill=text_of(self.settings.drill),
            timings_s={**report.timings_s, "guard": time.monotonic() - self.started_s},
        )
        self.run_state.decision = report.decision
        if report.verdict.failure is not FailureClass.OK and not report.drill:
            report = report.with_changes(notes=(*report.notes, *earlier.since_last_good(report, self.workers)))
        return publish.write(report, self.workers)

    def _train_on(self, report: Report, preflight: Preflight, watch: FlightWatch, first: Answer) -> None:
        """Form the training group. `first` is rank 0's answer when it got ready."""
        decision = report.decision
        assert decision.backend is not None
        spec = self.settings.probe or ProbeSpec()
        self.group = TrainingGroup(
            self.workers, self.facts, self.config, self.settings, spec, accept_s=self.run_state.accept_s
        )
        started_s = time.monotonic()
        results = self.group.join(decision.backend, dict(decision.relief), first)
        if all(r.outcome is Outcome.OK for r in results):
            self.run_state.failures = 0
            self.run_state.ended_well = False
            later_groups.watch_workers(self.workers, self.facts, report)
            if self.settings.eager_init:
                late_settings.watch_workers(self.workers, self.config)
            watch.go_live()
            self.run_state.flight = watch
            return
        rung = Rung(backend=decision.backend, env=decision.relief, why="the training group itself")
        verdict = preflight.judge(rung, results, Origin.TRAINING_GROUP, time.monotonic() - started_s)
        following = preflight.ladder.after_failure(verdict)
        self.run_state.decision = None
        lost = [r for r in results if r.error.startswith("preempted")]
        if isinstance(following, Decision) and not lost:
            self._refuse(self._finish(preflight.report(following)))
        why = "its communicator failed although the probe had passed"
        self._restart(preflight, f"the training group could not be formed: {why}", counts=not lost)

    def _restart_for_lost(self, gone: list[Any], when: str) -> NoReturn:
        state = self.run_state
        state.failures += 0 if all(a.preempted for a in gone) else 1
        refused = state.failures >= self.policy.attempts or not self.placement.can_restart
        ranks = tuple(a.rank for a in gone)
        times = f", {state.failures} times in a row" if state.failures > 1 else ""
        verdict = Verdict(
            failure=FailureClass.PROCESS_CRASHED if any(a.died for a in gone) else FailureClass.MISSING_RANK,
            culprit_ranks=ranks,
            summary=f"the worker of rank {ranks_text(ranks)} was lost {when}{times}",
        )
        action = Action.REFUSE if refused else Action.RETRY
        decision = Decision(action=action, backend=None, because="a rank without a worker can prove nothing")
        report = self._finish(
            Report(
                world_size=self.world_size,
                backend_wanted=state.backend,
                decision=decision,
                verdict=verdict,
                policy=self.policy,
                attempts=tuple(state.attempts),
            )
        )
        if refused:
            self._refuse(report)
        state.decision = None
        publish.announce(report)
        self.placement.release()
        raise GuardRestart(headline.short(report), report.to_json())

    def _restart(self, preflight: Preflight, because: str, *, counts: bool = True) -> NoReturn:
        state = self.run_state
        state.failures += 1 if counts else 0
        ladder = preflight.ladder
        if state.failures >= self.policy.attempts:
            because = f"{state.failures} starts in a row ended before train_func; {because}"
            self._refuse(self._finish(preflight.report(ladder.refuse(because))))
        if not self.placement.can_restart:
            because += (
                "; Ray Train V1 cannot replace them within an attempt (FailureConfig(max_failures=...) makes a new one)"
            )
            self._refuse(self._finish(preflight.report(ladder.refuse(because))))
        decision = Decision(action=Action.RETRY, backend=ladder.rung.backend, because=because, relief=ladder.rung.env)
        report = self._finish(preflight.report(decision))
        state.decision = None
        publish.announce(report)
        self.placement.release()
        raise GuardRestart(headline.short(report), report.to_json())

    def _refuse(self, report: Report) -> NoReturn:
        publish.announce(report)
        self.placement.release()
        raise NcclInitRefused(headline.short(report), report.to_json())

    def abandon(self) -> None:
        """After the guard's own failure: leave the workers as plain TorchConfig expects them."""
        if self.group is not None:
            self.workers.ask(eager.leave, deadline_s=30.0)
