"""Timed-out collectives compared across ranks, per process group: diverged, one behind, or all in the same operation."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from ray_nccl_guard.classes import FailureClass
from ray_nccl_guard.diagnosis.weigh import Reason, Sighting
from ray_nccl_guard.rulebook import Blames

# The first collectives of a group also make its connections, so a timeout there speaks of set-up rather than of diverging
# code (in the public reports SeqNum 1 and 2 stand for init and transport faults).
FIRST_SEQUENCES = 2


@dataclass(frozen=True, slots=True)
class Stuck:
    """One rank's timed-out operation, as its watchdog printed it."""

    rank: int
    group: str
    sequence: int
    operation: str
    elements: str


def stuck_operations(sightings: Sequence[Sighting]) -> list[Stuck]:
    """The earliest timed-out operation of every rank and group."""
    found: dict[tuple[int, str], Stuck] = {}
    for s in sightings:
        rank = rank_of(s)
        if "seq" not in s.fields or rank is None:
            continue
        one = Stuck(rank, s.fields.get("pg", ""), int(s.fields["seq"]), s.fields.get("op", ""), s.fields.get("numel", ""))
        key = (rank, one.group)
        if key not in found or one.sequence < found[key].sequence:
            found[key] = one
    return list(found.values())


def rank_of(sighting: Sighting) -> int | None:
    """The rank a line speaks of itself as, else the rank whose record it stands in."""
    own = sighting.fields.get("rank", "")
    return int(own) if own.isdigit() else sighting.rank


def compare(sightings: Sequence[Sighting]) -> list[Reason]:
    """What the timed-out operations say together."""
    groups: dict[str, list[Stuck]] = defaultdict(list)
    for one in stuck_operations(sightings):
        groups[one.group].append(one)
    reasons: list[Reason] = []
    for members in groups.values():
        diverged = _diverged(members)
        if diverged:
            reasons.append(diverged)
    reasons += _generations(sightings)
    sequences = [int(s.fields["seq"]) for s in sightings if "seq" in s.fields]
    if (
        sequences
        and not any(r.failure is FailureClass.COLLECTIVE_TIMEOUT_DESYNC for r in reasons)
        and max(sequences) <= FIRST_SEQUENCES
    ):
        reasons.append(Reason(
            failure=FailureClass.INIT_TIMEOUT_HANG, weight=0.55,
            summary="the very first collective never finished",
        ))  # fmt: skip
    return reasons


def ended_by_itself(sightings: Sequence[Sighting]) -> list[Reason]:
    """Ranks that an error of the program ended while others waited: who timed out is not who failed."""
    waiting = {rank_of(s) for s in sightings if s.failure is FailureClass.COLLECTIVE_TIMEOUT_DESYNC}
    own = {rank_of(s) for s in sightings if s.failure is FailureClass.USER_CODE_NOT_INFRA and s.rule.blames is Blames.SELF}
    culprits = tuple(sorted(rank for rank in own - waiting if rank is not None))
    if not culprits or waiting <= {None} or own & waiting:
        return []
    which = f"rank{'s' * (len(culprits) > 1)} {', '.join(map(str, culprits[:8]))}"
    text = f"{which} raised an error of the program's own while the others waited in a collective"
    return [Reason(failure=FailureClass.USER_CODE_NOT_INFRA, weight=0.66, summary=text, strength=1, culprits=culprits)]


def _generations(sightings: Sequence[Sighting]) -> list[Reason]:
    """A barrier that counts more workers than ranks is not waiting for anybody: it has seen two generations of them."""
    for s in sightings:
        joined, world = s.fields.get("joined", ""), s.fields.get("world", "")
        if joined and world and int(joined) > int(world):
            text = f"more workers than ranks met in the store ({joined} for {world}): a restart, or a stale store"
            return [Reason(failure=FailureClass.MISSING_RANK, weight=0.86, summary=text, strength=1)]
    return []


def _diverged(members: Sequence[Stuck]) -> Reason | None:
    kinds = Counter((m.sequence, m.operation, m.elements) for m in members)
    if len(kinds) < 2:
        return None
    sequences = {m.sequence for m in members}
    rare = min(kinds.values())
    odd = sorted(m.rank for m in members if kinds[(m.sequence, m.operation, m.elements)] == rare)
    culprits = tuple(odd) if rare < max(kinds.values()) else ()
    if len(sequences) > 1:
        text = f"ranks wait in different collectives (sequence numbers {min(sequences)} to {max(sequences)})"
    else:
        text = f"ranks wait in sequence number {sequences.pop()} with different operations or sizes"
    return Reason(
        failure=FailureClass.COLLECTIVE_TIMEOUT_DESYNC, weight=0.85, summary=text, strength=1, culprits=culprits,
    )  # fmt: skip
