"""`ray-nccl-guard probe`: the pre-flight by itself: on this host, over a Ray cluster, or as a launcher starts the ranks."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any

from ray_nccl_guard import facts
from ray_nccl_guard.classes import FailureClass
from ray_nccl_guard.cli.probe_arguments import WAIT_S, Asked, add_arguments, resolve
from ray_nccl_guard.errors import GuardError, UsageError
from ray_nccl_guard.guard import GroupLost, Preflight
from ray_nccl_guard.ladder import Ladder
from ray_nccl_guard.policy import Action
from ray_nccl_guard.probe.drill import Fault, text_of
from ray_nccl_guard.report import Report
from ray_nccl_guard.rung import Decision, Wanted, has_legacy
from ray_nccl_guard.verdict import Certainty, Verdict

if TYPE_CHECKING:
    from ray_nccl_guard.guard import Explorer
    from ray_nccl_guard.prove.prover import Prover
    from ray_nccl_guard.prove.session import CannotProbe, Session
    from ray_nccl_guard.prove.worlds import SweepLine

__all__ = ["add_arguments", "run"]

_EXIT = {Action.PROCEED: 0, Action.RETRY: 20, Action.FALL_BACK: 10, Action.REFUSE: 20}


def run(args: argparse.Namespace, drill: tuple[Fault, ...] = ()) -> int:
    """Probe, print, and return the exit code; with `drill` act its faults out (`ray-nccl-guard drill`)."""
    asked = replace(resolve(args), drill=drill)
    signal.signal(signal.SIGTERM, _leave)
    try:
        return _run(args, asked)
    except KeyboardInterrupt:
        print("ray-nccl-guard probe: interrupted; everything that it started has been ended", file=sys.stderr)
        return 130


def _run(args: argparse.Namespace, asked: Asked) -> int:
    from ray_nccl_guard.cli import probe_session
    from ray_nccl_guard.cli.probe_view import Progress
    from ray_nccl_guard.prove.session import CannotProbe

    with Progress().shown() as progress:
        ranks: AbstractContextManager[Session]
        if args.from_env:
            me, wait_s = probe_session.from_env.read(os.environ), args.wait or WAIT_S
            if me.rank:
                return _follow(me, wait_s)
            ranks = probe_session.as_launched(me, wait_s, progress.say)
        elif args.address:
            ranks = _over_ray(args, progress.say)
        else:
            ranks = probe_session.on_this_host(args.ranks, asked.backends, progress.say)
        try:
            reports, lines = _examine(ranks, asked, progress.say)
        except CannotProbe as error:
            reports, lines = [_not_probed(error, asked)], ()
    code = _code(reports)
    print(_json(reports, lines, code) if args.json else _text(reports, lines))
    if not asked.drill:
        return code
    # One whose faults made nothing fail has ended well too; a real failure before them has kept them from striking.
    real = any(r.verdict.failure is not FailureClass.OK and not any(a.drill for a in r.attempts) for r in reports)
    print(f"drill: {'the failure is real' if real else f'`probe` would have ended with exit code {code}'}", file=sys.stderr)
    return _EXIT[Action.REFUSE] if real else 0


def _over_ray(args: argparse.Namespace, say: Callable[[str], None]) -> AbstractContextManager[Session]:
    try:
        from ray_nccl_guard.ray_train import probe_cluster
    except ImportError as error:
        raise UsageError(f"--address needs Ray, which cannot be imported here: {error}") from error
    gpus = 1.0 if args.gpus_per_worker is None else args.gpus_per_worker
    return probe_cluster.over_cluster(args.address, args.num_workers, gpus, say)


def _follow(me: Any, wait_s: float) -> int:
    from ray_nccl_guard.cli import probe_session

    try:
        return probe_session.follow(me, wait_s)
    except UsageError:
        raise
    except GuardError as error:
        print(f"ray-nccl-guard probe: {error}", file=sys.stderr)
        return _EXIT[Action.REFUSE]


def _examine(
    ranks: AbstractContextManager[Session], asked: Asked, say: Callable[[str], None]
) -> tuple[list[Report], tuple[SweepLine, ...]]:
    """Every backend's report, and the worlds of a sweep."""
    from ray_nccl_guard.prove.worlds import sweep

    with ranks as session:
        reports = [_preflight(session, asked, backend, say) for backend in asked.backends]
        lines: tuple[SweepLine, ...] = ()
        if asked.sweep:
            prover, _ = _prover(session, asked, say)
            lines = sweep(prover, reports[0].attempts[0].rung) if reports[0].attempts else ()
        session.exit_code = _code(reports)
    return reports, lines


def _prover(session: Session, asked: Asked, say: Callable[[str], None]) -> tuple[Prover, Explorer]:
    from ray_nccl_guard.prove.prover import Prover
    from ray_nccl_guard.prove.worlds import Worlds

    prover = Prover(
        session.workers, session.facts, asked.collectives, asked.spec, drill=asked.drill, store=session.store, say=say
    )
    return prover, partial(Worlds, prover)


def _preflight(session: Session, asked: Asked, backend: str, say: Callable[[str], None]) -> Report:
    begin_s = time.monotonic()
    prover, explore = _prover(session, asked, say)
    wanted = Wanted(
        backend=backend,
        world_size=len(session.facts),
        asked_gpus=session.asked_gpus,
        user_settings=facts.merged(fact.settings for fact in session.facts),
        settings_from=facts.merged(fact.settings_from for fact in session.facts),
        collectives=asked.collectives,
        on_gpu=any(fact.device_index is not None for fact in session.facts),
        has_legacy=has_legacy(session.facts[0].torch_version),
    )
    # Backends that are compared each stand for themselves.
    policy = asked.policy if len(asked.backends) == 1 else replace(asked.policy, gloo=False, relief=False)
    preflight = Preflight(
        facts=session.facts,
        ladder=Ladder(wanted, policy),
        findings=facts.findings(session.facts, backend=backend, asked_gpus=session.asked_gpus),
        locate_always=asked.locate,
        drill=text_of(asked.drill),
    )
    if asked.drill and not prover.struck(preflight.ladder.first):
        raise UsageError(
            f"{preflight.drill} strikes none of the {len(session.facts)} ranks on {backend}",
            help=("error=N, cudaN, preset=NAME and oom are NCCL's words: they strike no gloo",),
        )
    try:
        report = preflight.run(prover.prove, explore)
    except GroupLost:
        report = preflight.report(preflight.ladder.refuse("a rank was lost during the probe, which cannot go on without it"))
    notes = (*session.notes, *prover.notes, *(note for fact in session.facts for note in fact.notes))
    return report.with_changes(notes=notes, timings_s={**report.timings_s, "guard": time.monotonic() - begin_s})


def _not_probed(error: CannotProbe, asked: Asked) -> Report:
    verdict = Verdict(
        failure=error.failure, summary=str(error), certainty=Certainty.ESTABLISHED, culprit_ranks=error.ranks,
        gloo_can_help=False,
    )  # fmt: skip
    because = "no backend was tried: the ranks did not come together"
    return Report(
        world_size=error.world_size,
        backend_wanted=asked.backends[0],
        decision=Decision(action=Action.REFUSE, backend=None, because=because),
        verdict=verdict,
        policy=asked.policy,
        drill=text_of(asked.drill),
    )


def _code(reports: list[Report]) -> int:
    codes = [_EXIT[report.decision.action] for report in reports]
    if len(codes) == 1:
        # Under observe nothing is refused; what was seen still is no pass.
        seen_bad = reports[0].verdict.failure is not FailureClass.OK and codes[0] == 0
        return 10 if seen_bad and reports[0].policy.report_only else codes[0]
    return 0 if codes[0] == 0 else 10 if 0 in codes else 20


def _json(reports: list[Report], lines: tuple[SweepLine, ...], code: int) -> str:
    result = {**reports[0].to_json(), "exit": code, "sweep": [line.to_json() for line in lines]}
    if len(reports) > 1:
        result["compared"] = [report.to_json() for report in reports]
        result["backend_chosen"] = next((r.decision.backend for r in reports if r.decision.backend), None)
        result["action"] = {0: Action.PROCEED, 10: Action.FALL_BACK, 20: Action.REFUSE}[code].value
    return json.dumps(result, indent=1)


def _text(reports: list[Report], lines: tuple[SweepLine, ...]) -> str:
    from ray_nccl_guard import render
    from ray_nccl_guard.cli import probe_view

    parts = []
    for report in reports:
        parts += [render.render(report), probe_view.rank_table(report), probe_view.matrix_text(report)]
    if len(reports) > 1:
        parts.append(probe_view.compared_table(reports))
    if lines:
        parts.append(probe_view.sweep_table(lines))
    return "\n\n".join(part for part in parts if part)


def _leave(number: int, _frame: FrameType | None) -> None:
    # Through every `finally`, so that ranks and placement groups are given back.
    raise SystemExit(128 + number)
