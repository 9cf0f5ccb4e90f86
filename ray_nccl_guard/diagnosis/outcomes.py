"""What the probe's outcomes say by themselves: who failed, died, timed out, froze or never answered."""

from __future__ import annotations

from collections.abc import Sequence

from ray_nccl_guard.classes import FailureClass
from ray_nccl_guard.diagnosis.weigh import Reason
from ray_nccl_guard.evidence import Evidence, RankEvidence
from ray_nccl_guard.probe.spec import Outcome, Step

_F = FailureClass
# A child's heartbeat beats every second or less; a rank silent this long while another beat within a third of it holds
# the interpreter's lock or is stopped. Both numbers only rank suspects, no class depends on them alone.
SILENT_S = 5.0


def read_outcomes(evidence: Evidence) -> list[Reason]:
    """Reasons from the outcomes alone, whatever the lines say."""
    reasons: list[Reason] = []
    died = [r for r in evidence.with_outcome(Outcome.DIED) if r.signal != 9 or not r.kernel_lines]
    if died:
        reasons.append(_died(died))
    late = evidence.with_outcome(Outcome.TIMED_OUT)
    if late:
        reasons.append(_timed_out(late, evidence))
    missing = evidence.with_outcome(Outcome.MISSING)
    if missing and evidence.world_size and not died:
        reasons.append(_missing(missing, evidence))
    return reasons


def _died(died: Sequence[RankEvidence]) -> Reason:
    signals = sorted({r.signal for r in died if r.signal})
    how = f"by signal {', '.join(map(str, signals))}" if signals else f"with exit code {died[0].exit_code}"
    where = f" during {died[0].step.value}" if died[0].step else ""
    return Reason(
        failure=_F.PROCESS_CRASHED, weight=0.62, summary=f"a process died {how}{where}", strength=1, culprits=_ranks(died),
    )  # fmt: skip


def _timed_out(late: Sequence[RankEvidence], evidence: Evidence) -> Reason:
    step = min((r.step for r in late if r.step), key=lambda s: s.position, default=None)
    culprits = frozen(late)
    earliest = [r for r in late if r.step is step]
    if not culprits and len(earliest) < len(late):
        culprits = _ranks(earliest)
    what = step.value if step else "the probe"
    if step is Step.STORE:
        return Reason(failure=_F.STORE_UNREACHABLE, weight=0.61, summary="the store did not answer in time", culprits=culprits)
    summary = f"{what} did not finish in time on {len(late)} of {evidence.world_size} ranks and nothing says why"
    if culprits:
        summary = f"{what} did not finish in time; rank {', '.join(map(str, culprits[:8]))} stands still where others move"
    return Reason(failure=_F.INIT_TIMEOUT_HANG, weight=0.5, summary=summary, culprits=culprits)


def frozen(late: Sequence[RankEvidence]) -> tuple[int, ...]:
    """Ranks that are stopped, or whose Python stands still while another rank's still beats."""
    stopped = _ranks([r for r in late if r.process_state in ("T", "t") or r.stuck])
    if stopped:
        return stopped
    beating = min((r.silent_s for r in late), default=0.0)
    silent = [r for r in late if r.silent_s > SILENT_S and r.silent_s > 3 * beating]
    return _ranks(silent) if silent and len(silent) < len(late) else ()


def _missing(missing: Sequence[RankEvidence], evidence: Evidence) -> Reason:
    ranks = _ranks(missing)
    names = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return Reason(
        failure=_F.MISSING_RANK, weight=0.61, culprits=ranks, strength=1,
        summary=f"{len(ranks)} of {evidence.world_size} ranks gave no answer ({names})",
    )  # fmt: skip


def _ranks(records: Sequence[RankEvidence]) -> tuple[int, ...]:
    return tuple(sorted(r.rank for r in records if r.rank is not None))
