"""The end of the chains of waits: ranks that others wait for and that wait for nobody."""

from __future__ import annotations

from collections.abc import Iterable

from ray_nccl_guard.flight.align import Alignment, Head
from ray_nccl_guard.flight.dump import Dump, GroupKey
from ray_nccl_guard.flight.finding import Finding, compare_stacks
from ray_nccl_guard.flight.mismatch import Kind
from ray_nccl_guard.flight.waits import Waits, Why, reachable
from ray_nccl_guard.flight.words import place, ranks, verb
from ray_nccl_guard.verdict import Certainty


def end_of_waits(waits: Waits, alignment: Alignment) -> Finding | None:
    """The ranks that others wait for and that wait for nobody: without a dump, idle, or left behind by their device."""
    ends = waits.ends()
    absent = {rank for rank in ends if rank not in alignment.dumps.by_rank}
    idle = {rank for rank in ends - absent if rank not in alignment.heads}
    alone = ends & waits.alone
    culprits = sorted(idle | alone) or sorted(absent)
    if not culprits:
        return None
    waiting = sorted(rank for rank, targets in waits.edges.items() if any(culprit in targets for culprit in culprits))
    head = _first_head(waiting, culprits, waits, alignment) or alignment.heads.get(culprits[0])
    finding = Finding(
        kind=Kind.STALLED if alone else Kind.MISSING_RANK, culprits=tuple(culprits), certainty=Certainty.LIKELY,
        key=head.group if head else None, seq=head.call.seq if head and head.call else None,
        waiting=tuple(waiting) or tuple(culprits), next=compare_stacks(culprits),
    )  # fmt: skip
    if alone:
        _left_behind(finding, sorted(alone), sorted(idle), alignment)
    elif idle:
        finding.summary = f"{ranks(culprits)} never asked for {place(head, alignment)}, where {_wait(waiting)}"
        _who_is_out_of_step(finding, culprits, head, waits, alignment)
        if len(waiting) < len(reachable(waits.edges, alignment.heads)) - len(culprits):
            finding.because.append("all other stuck ranks wait for one of these, directly or through another group")
    else:
        finding.certainty = Certainty.OPEN
        finding.summary = f"{ranks(culprits)} left no dump and may be what {_wait(waiting)} for in {place(head, alignment)}"
        finding.against.append("a rank without a dump may have asked like the others and died later")
        finding.next = f"read the end of the log of {ranks(culprits)}; if it lives, take its python stack (py-spy dump)"
    if absent and not absent.issuperset(culprits):
        finding.against.append(f"{ranks(absent)} left no dump and {verb(absent, 'is', 'are')} waited for as well")
    return finding


def _wait(waiting: list[int]) -> str:
    return f"{ranks(waiting)} {verb(waiting, 'waits', 'wait')}"


def _left_behind(finding: Finding, alone: list[int], idle: list[int], alignment: Alignment) -> None:
    finding.summary = f"{ranks(alone)} did not see calls end that have ended on other ranks of the same groups"
    finding.because += [_alone(rank, alignment) for rank in alone[:4]]
    finding.because.append("such a call ends nowhere before all have entered it, so these took part and then stood still")
    finding.next = f"read the kernel log (Xid, ECC) on the {verb(alone, 'host', 'hosts')} of {ranks(alone)}, and take python stacks there (py-spy dump)"
    finding.against.append("a dump taken earlier than the others, from a run that still moves, looks the same")
    if idle:
        finding.because.append(f"{ranks(idle)} never asked for what others wait for")


def _who_is_out_of_step(finding: Finding, behind: list[int], head: Head | None, waits: Waits, alignment: Alignment) -> None:
    """Turn the finding round where few ranks ran ahead of many, and say how sure it is."""
    if head is None or head.call is None:
        return
    group, seq = alignment.groups[head.group], head.call.seq
    ahead = [rank for rank, cell in group.cells.items() if cell.asked(seq)]
    late = [rank for rank, cell in group.cells.items() if not cell.asked(seq)]
    finding.because.append(f"{ranks(ahead)} asked for call {seq} of group {head.group}, {ranks(late)} did not")
    novel = all(not _made_by(late, rank, head.group, seq, alignment) for rank in ahead)
    if len(ahead) < len(late) == len(set(late) & set(behind)) and (novel or len(ahead) == 1):
        finding.culprits, finding.waiting = tuple(ahead), tuple(late)
        finding.certainty = Certainty.LIKELY if novel else Certainty.OPEN
        finding.summary = f"{ranks(ahead)} asked for one call more than {ranks(late)}: {place(head, alignment)}"
        finding.because.append(
            "the others have never made that call from that line" if novel else "one rank differs from all others"
        )
        finding.against.append(f"{ranks(late)} may all be late instead")
        finding.next = compare_stacks(ahead)
        return
    complete = not alignment.dumps.missing and all(_tells_all(alignment.dumps.by_rank[rank]) for rank in behind)
    missed_in = {alignment.heads[rank].group for rank, why in waits.reasons(behind[0]).items() if why is Why.NOT_ASKED}
    if len(behind) == 1 and len(missed_in) > 1:
        finding.because.append(f"it is missed in {len(missed_in)} groups, by different ranks")
    elif len(ahead) <= len(late) and set(late) <= set(behind):
        finding.against.append(f"no fewer are late than are ahead: {ranks(ahead)} may have made one call too many")
        return
    if complete:
        finding.certainty = Certainty.ESTABLISHED


def _tells_all(dump: Dump) -> bool:
    """Whether a call that the dump lacks was not made: not so if completed or old records were left out of it."""
    return dump.records > 0 or not dump.progress


def _made_by(others: Iterable[int], rank: int, key: GroupKey, seq: int, alignment: Alignment) -> bool:
    """Whether any of `others` has made the call that `rank` makes as number `seq`, from the same line."""
    line = alignment.timeline(rank, key)
    row = line.at(seq) if line else None
    for other in others:
        known = alignment.timeline(other, key)
        if row is None or known is None:
            continue
        if any(call == row.call and stack == row.stack for call, stack in zip(known.calls, known.stacks, strict=True)):
            return True
    return False


def _first_head(waiting: list[int], culprits: list[int], waits: Waits, alignment: Alignment) -> Head | None:
    """The call that most of `waiting` are in, on a collective if there is one."""
    counted: dict[tuple[bool, GroupKey, int], list[int]] = {}
    for rank in waiting:
        head = alignment.heads[rank]
        if any(waits.edges[rank].get(culprit) is not Why.QUEUED for culprit in culprits if culprit in waits.edges[rank]):
            counted.setdefault((head.call is not None, head.group, head.call.seq if head.call else -1), []).append(rank)
    best = max(counted.items(), key=lambda item: (item[0][0], len(item[1])), default=None)
    return alignment.heads[best[1][0]] if best else None


def _alone(rank: int, alignment: Alignment) -> str:
    head = alignment.heads[rank]
    assert head.call is not None
    done = [
        other for other, cell in alignment.groups[head.group].cells.items() if other != rank and cell.ended(head.call.seq)
    ]
    return f"rank {rank} is still in {place(head, alignment)}, which has ended on {ranks(done)}"
