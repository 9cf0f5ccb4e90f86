"""One rung that was tried, as a value and as JSON."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ray_nccl_guard.evidence import Evidence
from ray_nccl_guard.locate.result import Located
from ray_nccl_guard.network.grid import Matrix
from ray_nccl_guard.probe.spec import ProbeResult
from ray_nccl_guard.rung import Rung
from ray_nccl_guard.verdict import Verdict

# What an exception says stands in its first lines; 4,096 ranks' tracebacks would make a report of 30 MB.
_ERROR = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One rung that was tried: on which evidence, with which verdict, in how many seconds.

    Attributes:
        drill: the faults of a drill that were acted out in it; empty if it was a real probe.
        located: where smaller worlds of the same rung found the fault; None if none were run.
        matrix: which host reached which before it, None if one host was all there was.
        group_attempt: the worker group it was tried on, from 1.
    """

    rung: Rung
    evidence: Evidence
    verdict: Verdict
    results: tuple[ProbeResult, ...] = ()
    seconds: float = 0.0
    group_attempt: int = 1
    drill: str = ""
    matrix: Matrix | None = None
    located: Located | None = None

    @property
    def all_reduce_s(self) -> dict[int, float]:
        """Median over the ranks of the probe's all_reduce in seconds, by size in bytes."""
        sizes = sorted({size for r in self.results for size in r.all_reduce_s})
        return {
            size: statistics.median(r.all_reduce_s[size] for r in self.results if size in r.all_reduce_s) for size in sizes
        }

    def to_json(self) -> dict[str, Any]:
        return {
            "origin": self.evidence.origin.value,
            "backend": self.rung.backend,
            "env": dict(self.rung.env),
            "why": self.rung.why,
            "failure": self.verdict.failure.value,
            "summary": self.verdict.summary,
            "culprit_ranks": list(self.verdict.culprit_ranks),
            "step": self.verdict.step.value if self.verdict.step else None,
            "seconds": round(self.seconds, 3),
            "group_attempt": self.group_attempt,
            "drill": self.drill,
            "all_reduce_s": sized(self.all_reduce_s),
            "network": self.matrix.to_json() if self.matrix else None,
            "located": self.located.to_json() if self.located else None,
            "outcomes": [_outcome(r) for r in self.results],
        }


def _outcome(result: ProbeResult) -> dict[str, Any]:
    return {
        "rank": result.rank,
        "outcome": result.outcome.value,
        "step": result.step.value if result.step else None,
        "detail": result.detail,
        "error": result.error[:_ERROR],
        "start": result.start.value,
        "signal": None if result.killed_by_guard else result.signal,
        "process_state": result.process_state,
        "proved": list(result.proved),
        "seconds": round(result.seconds, 3),
        "steps": {
            s.step.value: [s.outcome.value, round(s.seconds, 4), *([s.detail] if s.detail else [])] for s in result.steps
        },
        **({"nccl_s": dict(result.nccl_s)} if result.nccl_s else {}),
    }


def sized(seconds: Mapping[int, float]) -> dict[str, float]:
    """Seconds by size in bytes as JSON has them: its keys are text."""
    return {str(size): round(value, 6) for size, value in sorted(seconds.items())}
