"""From dumps to the verdict: a mismatch first, then the end of the chain of waits, then what stands still together."""

from __future__ import annotations

from ray_nccl_guard.flight.align import Alignment, align
from ray_nccl_guard.flight.dump import GroupKey, State
from ray_nccl_guard.flight.ends import end_of_waits
from ray_nccl_guard.flight.finding import Finding, compare_stacks
from ray_nccl_guard.flight.load import Dumps
from ray_nccl_guard.flight.mismatch import Kind, Mismatch, asked, find_mismatches
from ray_nccl_guard.flight.tables import stacks_beside, tables, versions
from ray_nccl_guard.flight.verdict import FlightVerdict
from ray_nccl_guard.flight.waits import Waits, find_waits
from ray_nccl_guard.flight.words import describe, place, ranks, verb
from ray_nccl_guard.verdict import Certainty


def diagnose(dumps: Dumps) -> FlightVerdict:
    """Name the kind of hang and its culprits. Pure: the dumps are read, nothing else is."""
    alignment = align(dumps)
    waits = find_waits(alignment)
    mismatches = find_mismatches(alignment)
    finding = (
        _mismatch(mismatches, alignment)
        or end_of_waits(waits, alignment)
        or _circle(waits, alignment)
        or _standstill(waits, alignment)
        or _nothing(alignment)
    )
    return FlightVerdict(
        kind=finding.kind,
        culprit_ranks=finding.culprits,
        certainty=finding.certainty,
        ranks=dumps.world_size,
        missing_dumps=dumps.missing,
        groups=tables(alignment, finding.culprits, finding.key),
        summary=finding.summary,
        because=tuple(finding.because),
        against=tuple(finding.against),
        cannot_say=tuple(_cannot_say(finding, alignment)),
        next=finding.next,
        stacks=stacks_beside(alignment, finding.culprits, finding.key, finding.seq, finding.waiting),
        versions=versions(dumps),
        skipped=dumps.skipped,
    )


def _mismatch(mismatches: list[Mismatch], alignment: Alignment) -> Finding | None:
    if not mismatches:
        return None
    first = mismatches[0]
    odd, rest = describe(first.odd_calls), describe(first.rest_calls)
    if first.decided_by:
        summary = f"{ranks(first.odd)} asked for {odd} as call {first.seq} of group {first.key}, the others for {rest}"
        certainty = (
            Certainty.LIKELY
            if alignment.dumps.missing or 2 * len(first.odd) >= len(first.odd + first.rest)
            else Certainty.ESTABLISHED
        )
        because = [f"{first.decided_by}: {ranks(first.rest)} asked for {rest}"]
    else:
        summary = f"{ranks(first.odd)} disagree on call {first.seq} of group {first.key}: {odd} against {rest}"
        certainty, because = Certainty.OPEN, ["as many ranks asked for the one as for the other"]
    because += _shift(first, alignment)
    because += [f"group {other.key} disagrees too, at call {other.seq}: {ranks(other.odd)}" for other in mismatches[1:4]]
    return Finding(
        kind=first.kind, culprits=first.odd, certainty=certainty, summary=summary, because=because, key=first.key,
        seq=first.seq, waiting=first.rest, next=compare_stacks(first.odd),
    )  # fmt: skip


def _shift(mismatch: Mismatch, alignment: Alignment) -> list[str]:
    """Whether the odd rank left a call out, or made one more: its next calls then fit the others' shifted by one."""
    if not mismatch.rest:
        return []
    odd, rest = (alignment.timeline(ranks[0], mismatch.key) for ranks in (mismatch.odd, mismatch.rest))
    if odd is None or rest is None:
        return []
    odd_next, rest_next = odd.at(mismatch.seq + 1), rest.at(mismatch.seq + 1)
    if rest_next and asked(alignment.calls(rest_next)) == asked(mismatch.odd_calls):
        return [f"the others ask for that as their next call: {ranks(mismatch.odd)} left one call out"]
    if odd_next and asked(alignment.calls(odd_next)) == asked(mismatch.rest_calls):
        return [f"its next call is what the others ask for here: {ranks(mismatch.odd)} made one call more"]
    return []


def _circle(waits: Waits, alignment: Alignment) -> Finding | None:
    """Ranks that wait for each other in different groups: each entered another group first."""
    circle = sorted(waits.circle())
    if not circle:
        return None
    places = [f"rank {rank} is in {place(alignment.heads[rank], alignment)}" for rank in circle[:4]]
    head = alignment.heads[circle[0]]
    return Finding(
        kind=Kind.OP_MISMATCH, culprits=tuple(circle), certainty=Certainty.OPEN, because=places, key=head.group,
        summary=f"{ranks(circle)} wait for each other: they entered their groups in a different order",
        seq=head.call.seq if head.call else None, next=compare_stacks(circle),
    )  # fmt: skip


def _standstill(waits: Waits, alignment: Alignment) -> Finding | None:
    """Everyone has asked and nobody is done: the program agrees, so it is the device, a stream or the transport."""
    by_group: dict[GroupKey, list[int]] = {}
    for rank in sorted(waits.together):
        by_group.setdefault(alignment.heads[rank].group, []).append(rank)
    if not by_group:
        return None
    key, stuck = max(by_group.items(), key=lambda item: len(item[1]))
    head = alignment.heads[stuck[0]]
    finding = Finding(
        kind=Kind.STALLED, culprits=(), certainty=Certainty.OPEN, key=key, seq=head.call.seq if head.call else None,
        waiting=tuple(stuck),
        summary=f"{ranks(stuck)} {verb(stuck, 'is', 'are')} in {place(head, alignment)}, asked for by all and ended on none",
        because=["every member asked for the same, so the program agrees and the device or the transport stands still"],
        next="run `ray-nccl-guard probe --locate`, and read the kernel log (Xid, ECC, link down) of these hosts",
    )  # fmt: skip
    if len(by_group) > 1:
        finding.because.append(f"{len(by_group) - 1} more groups stand still in the same way")
    calls = {rank: call for rank in stuck if (call := alignment.heads[rank].call) is not None}
    unstarted = [rank for rank, call in calls.items() if call.state is State.SCHEDULED]
    if unstarted and len(unstarted) * 2 < len(calls):
        finding.culprits, finding.certainty = tuple(unstarted), Certainty.LIKELY
        finding.because.append(f"it has started on the others, not on {ranks(unstarted)}: work before it holds the stream")
    return finding


def _nothing(alignment: Alignment) -> Finding:
    dumps = alignment.dumps
    told = [cell.tells for group in alignment.groups.values() for cell in group.cells.values()]
    if dumps.missing and dumps.by_rank and not all(told):
        finding = Finding(
            kind=Kind.MISSING_RANK, culprits=dumps.missing, certainty=Certainty.OPEN,
            summary=f"{ranks(dumps.missing)} left no dump, and nothing else is out of step",
            because=["all ranks with a dump have asked for the same"],
            against=["a rank that answers no question may be a victim too"],
            next=f"read the end of the log of {ranks(dumps.missing)}",
        )  # fmt: skip
        return finding
    certain = bool(told) and all(told) and not dumps.missing
    return Finding(
        kind=Kind.NONE, culprits=(), certainty=Certainty.ESTABLISHED if certain else Certainty.OPEN,
        summary="no rank is out of step" if dumps.by_rank else "there is no dump to read",
    )  # fmt: skip


def _cannot_say(finding: Finding, alignment: Alignment) -> list[str]:
    dumps = alignment.dumps
    said = []
    if dumps.missing:
        said.append(f"what {ranks(dumps.missing)} did: no dump, and no record of an action is not the absence of one")
    blind = sorted({key for key, group in alignment.groups.items() if any(not cell.tells for cell in group.cells.values())})
    if blind:
        said.append(
            "whether a call ended: gloo's recorder marks none as completed, so a stall in the transport after everyone "
            "asked looks like a run without fault, and it does not record send and recv (torch 2.15)"
        )
    unknown = sorted(group.key for group in alignment.groups.values() if not group.members_known)
    if unknown:
        names = ", ".join(str(key) for key in unknown[:4])
        said.append(f"who else belongs to group {names}: gloo's dump does not tell the members")
    if any(dump.only_active for dump in dumps.by_rank.values()):
        said.append("what completed: the dumps hold unfinished calls only")
    if finding.kind is Kind.MISSING_RANK:
        said.append("when they were taken: in a run that still moves, a rank that is one call behind looks the same")
    if not any(len(stack) for stack in dumps.vocabulary.stacks):
        said.append("from which line the calls came: the dumps have no stacks")
    return said
