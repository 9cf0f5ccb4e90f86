"""What the probe's outcomes say by themselves: who failed, died, timed out, froze or never answered."""

from __future__ import annotations

from collections.abc import Sequence

from ray_nccl_guard.classes import FailureClass
from ray_nccl_guard.diagnosis.weigh import FAILURES, Reason, Sighting
from ray_nccl_guard.evidence import Evidence, Origin, RankEvidence
from ray_nccl_guard.probe.spec import Outcome, Step
from ray_nccl_guard.rulebook import RuleRole

_F = FailureClass
# A child's heartbeat beats five times a second (probe/journal.py). A rank silent for this long, and for half of its step, while the
# liveliest one was silent for less than a third of it holds the interpreter's lock or is stopped. Where cores are few a rank that only
# waits was seen silent for more than two seconds, but not for half of a deadline. The numbers only pick suspects, never a class.
SILENT_S, SILENT_SHARE, LIVELY_SHARE = 2.0, 0.5, 3.0
SIGABRT, SIGKILL = 6, 9


def read_outcomes(evidence: Evidence, sightings: Sequence[Sighting]) -> list[Reason]:
    """Reasons from how the ranks ended, whatever they printed; none from logs, which do not tell."""
    if evidence.origin is Origin.LOG:
        return []
    reasons: list[Reason] = []
    # A process that torch aborts because it heard of a lost peer has died of that peer, and one that it aborts for an error of
    # NCCL of that error.
    otherwise = {s.rank for s in sightings if s.rule.role is RuleRole.CASCADE}
    otherwise |= {r.rank for r in _aborted_by_torch(evidence, sightings)}
    died = [r for r in evidence.with_outcome(Outcome.DIED) if r.rank not in otherwise]
    if died:
        reasons += _died(died)
    late = evidence.with_outcome(Outcome.TIMED_OUT)
    if late:
        reasons.append(_timed_out(late, evidence, sightings))
    missing = evidence.with_outcome(Outcome.MISSING)
    if missing and not died:
        reasons.append(_missing(missing, evidence))
    return reasons


def _died(died: Sequence[RankEvidence]) -> list[Reason]:
    signals = sorted({r.signal for r in died if r.signal})
    code = died[0].exit_code
    how = f" by signal {', '.join(map(str, signals))}" if signals else "" if code is None else f" with exit code {code}"
    where = f" during {died[0].step.value}" if died[0].step else ""
    text = f"a process died{how}{where} and left no reason"
    reasons = [Reason(failure=_F.PROCESS_CRASHED, weight=0.62, summary=text, strength=1, culprits=_ranks(died))]
    if signals == [SIGKILL]:
        # Nobody else sends SIGKILL as often as the OOM killer, but without a kernel line it stays a guess.
        text = f"a process was killed from outside{where}, as the OOM killer does"
        reasons.append(Reason(failure=_F.HOST_OOM_KILLED, weight=0.5, summary=text, culprits=_ranks(died)))
    return reasons


def _timed_out(late: Sequence[RankEvidence], evidence: Evidence, sightings: Sequence[Sighting]) -> Reason:
    step = min((r.step for r in late if r.step), key=lambda s: s.position, default=None)
    if step is Step.STORE:
        text = "the store did not answer in time"
        return Reason(failure=_F.STORE_UNREACHABLE, weight=0.61, summary=text, culprits=_few(_ranks(late), evidence))
    still = frozen(late)
    earliest = _ranks([r for r in late if r.step is step])
    suspects = still or _few(earliest, evidence) or _few(least_progress(evidence, sightings), evidence)
    what = step.value if step else "the probe"
    text = f"{what} did not finish in time on {len(late)} of {evidence.world_size} ranks, and nothing says why"
    if still:
        text = f"{what} did not finish in time, and {_names(still)} stands still where the others' Python runs"
    elif suspects:
        text = f"{what} did not finish in time, and {_names(suspects)} got least far"
    return Reason(failure=_F.INIT_TIMEOUT_HANG, weight=0.55, summary=text, culprits=suspects)


def frozen(late: Sequence[RankEvidence]) -> tuple[int, ...]:
    """Ranks that are stopped or stuck in the driver, or whose Python stands still while another rank's beats."""
    stopped = _ranks([r for r in late if r.process_state in ("T", "t") or r.stuck])
    if stopped and len(stopped) < len(late):
        return stopped
    liveliest = min((r.silent_s for r in late), default=0.0)
    silent = _ranks([r for r in late if r.silent_s > max(SILENT_S, SILENT_SHARE * r.step_s, LIVELY_SHARE * liveliest)])
    return silent if len(silent) < len(late) else ()


def least_progress(evidence: Evidence, sightings: Sequence[Sighting]) -> tuple[int, ...]:
    """Ranks whose NCCL log got less far than the furthest one's; empty if all got as far or nobody logged."""
    reached: dict[int, int] = {}
    for s in sightings:
        if s.rule.progress and s.rank is not None:
            reached[s.rank] = max(reached.get(s.rank, 0), s.rule.progress)
    if len(reached) < 2 or min(reached.values()) == max(reached.values()):
        return ()
    return tuple(sorted(rank for rank, progress in reached.items() if progress == min(reached.values())))


def _missing(missing: Sequence[RankEvidence], evidence: Evidence) -> Reason:
    ranks = _ranks(missing)
    text = f"{len(ranks)} of {evidence.world_size} ranks gave no answer: {_names(ranks)}"
    return Reason(failure=_F.MISSING_RANK, weight=0.61, summary=text, strength=1, culprits=ranks)


def failed_unexplained(evidence: Evidence, sightings: Sequence[Sighting]) -> tuple[RankEvidence, ...]:
    """Ranks that ended with an error for which no rule has a class. Where others only complain of closed connections, they echo it."""
    explained = {s.rank for s in sightings if s.rule.role in FAILURES and s.failure is not _F.UNKNOWN}
    ended = (*evidence.with_outcome(Outcome.FAILED), *_aborted_by_torch(evidence, sightings))
    return tuple(r for r in ended if r.rank not in explained)


def _aborted_by_torch(evidence: Evidence, sightings: Sequence[Sighting]) -> list[RankEvidence]:
    """Ranks that SIGABRT ended after an error of NCCL: torch's watchdog ends a process whose communicator reports one."""
    told = {s.rank for s in sightings if s.rule.alarms}
    return [r for r in evidence.with_outcome(Outcome.DIED) if r.signal == SIGABRT and r.rank in told]


def failed_step(evidence: Evidence, culprits: Sequence[int] = ()) -> Step | None:
    """The earliest step in which a culprit ended that was not merely cut short; without such a one, in which any rank did.

    A rank behind the culprit fails in an earlier step, of the connections that the culprit's end has closed.
    """
    ended = [r for r in evidence.ranks if r.step and r.outcome not in (Outcome.OK, Outcome.WAITING, Outcome.NOT_RUN)]
    own = [r for r in ended if r.rank in culprits]
    return min((r.step for r in own or ended if r.step), key=lambda step: step.position, default=None)


def ruled_out(evidence: Evidence) -> tuple[str, ...]:
    """Steps that every rank has behind it; nothing if a rank gave no answer."""
    step = failed_step(evidence)
    if step is None or evidence.with_outcome(Outcome.MISSING, Outcome.NOT_RUN):
        return ()
    behind = min((r.step.position for r in evidence.ranks if r.step), default=0)
    skipped = Step.PEERS if len({r.host for r in evidence.ranks}) < 2 else None  # one host asks no other
    done = [s.value for s in Step if s.position < min(behind, step.position) and s is not skipped]
    return (f"{', '.join(done)} ok on all {evidence.world_size} ranks",) if done else ()


def _few(ranks: Sequence[int], evidence: Evidence) -> tuple[int, ...]:
    """The ranks if they are fewer than all: what is true of everybody accuses nobody."""
    return tuple(ranks) if len(ranks) < evidence.world_size else ()


def _names(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


def _ranks(records: Sequence[RankEvidence]) -> tuple[int, ...]:
    return tuple(sorted(r.rank for r in records if r.rank is not None))
