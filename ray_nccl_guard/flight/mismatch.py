"""Finds the first call of a group for which ranks did not ask the same, and who is the odd one."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from math import prod

from ray_nccl_guard.flight.align import Alignment, Group
from ray_nccl_guard.flight.dump import Calls, GroupKey, Signature, State, Timeline


class Kind(Enum):
    """What a set of dumps shows (the contract of `flight --json`)."""

    MISSING_RANK = "missing_rank"
    OP_MISMATCH = "op_mismatch"
    SIZE_MISMATCH = "size_mismatch"
    DTYPE_MISMATCH = "dtype_mismatch"
    STALLED = "stalled"
    NONE = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """Ranks of one group that asked for different things under one sequence number.

    Attributes:
        odd: the ranks that differ from the rest; all of them if nothing tells which side is odd.
        rest: the ranks that agree with each other.
        decided_by: what told the sides apart, in words; empty if nothing did.
        odd_calls, rest_calls: what each side asked for.
        order: how early the odd ranks made this call, in their own count of calls.
    """

    key: GroupKey
    seq: int
    kind: Kind
    odd: tuple[int, ...]
    rest: tuple[int, ...]
    decided_by: str
    odd_calls: Calls
    rest_calls: Calls
    order: int


Asked = tuple[object, ...]  # what has to be equal on all ranks

# Sizes that may differ from rank to rank in a correct program: unequal splits, and buffers that only the root passes.
_UNEVEN = frozenset(
    {"all_to_all", "all_to_all_single", "all_to_all_v_single", "alltoall_base", "all_gather_v", "reduce_scatter_v"}
)
_OUTPUT_ONLY = frozenset({"scatter", "all_gather"})
_INPUT_ONLY = frozenset({"gather", "reduce_scatter"})
_NO_PAYLOAD = frozenset({"barrier", "all_reduce_barrier"})


def asked(calls: Calls) -> tuple[tuple[object, object, object], ...]:
    """Operations, element counts and types that the members of a group must agree on.

    Counts, not shapes: [2, 8] and [16] are the same bytes on the wire, and programs do mix them.
    """
    return tuple(_asked(signature) for signature in calls)


def _asked(signature: Signature) -> tuple[object, object, object]:
    op = signature.op
    if op in _NO_PAYLOAD:
        return op, (), ()
    inputs, outputs = _counts(signature.input_sizes), _counts(signature.output_sizes)
    if op in _UNEVEN:
        inputs = outputs = ()
    elif op in _OUTPUT_ONLY:
        inputs = ()
    elif op in _INPUT_ONLY:
        outputs = ()
    return op, (inputs, outputs), frozenset(signature.input_dtypes) or frozenset(signature.output_dtypes)


def _counts(shapes: tuple[tuple[int, ...], ...]) -> tuple[int, ...]:
    return tuple(prod(shape) for shape in shapes)


def find_mismatches(alignment: Alignment) -> list[Mismatch]:
    """The first mismatch of each group that did not complete everywhere, earliest call first."""
    calls = alignment.dumps.vocabulary.calls
    numbers: dict[object, int] = {}
    same = [numbers.setdefault(asked(each), len(numbers)) for each in calls]  # call -> number of what it asks for
    found = (_first(group, alignment, same) for group in alignment.groups.values())
    return sorted((mismatch for mismatch in found if mismatch), key=lambda mismatch: mismatch.order)


def _first(group: Group, alignment: Alignment, same: list[int]) -> Mismatch | None:
    timelines = {rank: line for rank in group.cells if (line := alignment.timeline(rank, group.key))}
    for seq in _differing(timelines, same):
        sides: dict[int, list[int]] = {}
        completed = True
        for rank, line in timelines.items():
            row = line.at(seq)
            if row is not None:
                sides.setdefault(same[row.call], []).append(rank)
                completed = completed and row.state is State.COMPLETED
        if len(sides) > 1 and not completed:
            return _judge(group, seq, sides, alignment, same, timelines)
    return None


def _differing(timelines: Mapping[int, Timeline], same: list[int]) -> Iterator[int]:
    """Sequence numbers for which two ranks differ, ascending. Most groups have none, which costs one comparison a rank."""
    if len(timelines) < 2:
        return
    lines = list(timelines.values())
    start = max(line.seqs[0] for line in lines)
    common = min(line.seqs[-1] for line in lines)
    behind = start
    if all(line.seqs[-1] - line.seqs[0] + 1 == len(line) for line in lines) and common >= start:
        columns = {
            array("i", (same[call] for call in line.calls[start - line.seqs[0] : common - line.seqs[0] + 1])).tobytes()
            for line in lines
        }
        if len(columns) > 1:
            width = array("i").itemsize
            reference = columns.pop()
            for index in range(0, len(reference), width):
                if any(column[index : index + width] != reference[index : index + width] for column in columns):
                    yield start + index // width
        behind = common + 1
    # Past the slowest rank, or with holes (a dump of active calls): number by number.
    seen: dict[int, int] = {}
    differing = set()
    for line in lines:
        for row in line.after(behind - 1):
            if seen.setdefault(row.seq, same[row.call]) != same[row.call]:
                differing.add(row.seq)
    yield from sorted(differing)


def _judge(
    group: Group,
    seq: int,
    sides: dict[int, list[int]],
    alignment: Alignment,
    same: list[int],
    timelines: Mapping[int, Timeline],
) -> Mismatch:
    size = max(len(ranks) for ranks in sides.values())
    largest = [number for number, ranks in sides.items() if len(ranks) == size]
    rest, decided_by = largest[0], f"{size} of {sum(map(len, sides.values()))} ranks agree"
    if len(largest) > 1:
        rest, decided_by = _break_tie(group, seq, largest, sides, alignment, same, timelines)
    odd = sorted(rank for number, ranks in sides.items() if number != rest or not decided_by for rank in ranks)
    first_odd = next(rank for rank in odd if same[_at(timelines, rank, seq)] != rest)
    odd_call, rest_call = _at(timelines, first_odd, seq), _at(timelines, sides[rest][0], seq)
    calls = alignment.dumps.vocabulary.calls
    return Mismatch(
        key=group.key,
        seq=seq,
        kind=_kind(asked(calls[odd_call]), asked(calls[rest_call])),
        odd=tuple(odd),
        rest=tuple(sides[rest]) if decided_by else (),
        decided_by=decided_by,
        odd_calls=calls[odd_call],
        rest_calls=calls[rest_call],
        order=min(row.order for rank in odd if (row := timelines[rank].at(seq))),
    )


def _at(timelines: Mapping[int, Timeline], rank: int, seq: int) -> int:
    row = timelines[rank].at(seq)
    assert row is not None
    return row.call


def _kind(odd: Iterable[tuple[object, object, object]], rest: Iterable[tuple[object, object, object]]) -> Kind:
    odd, rest = tuple(odd), tuple(rest)
    if [part[0] for part in odd] != [part[0] for part in rest]:
        return Kind.OP_MISMATCH
    return Kind.SIZE_MISMATCH if [part[1] for part in odd] != [part[1] for part in rest] else Kind.DTYPE_MISMATCH


def _break_tie(
    group: Group,
    seq: int,
    largest: list[int],
    sides: Mapping[int, list[int]],
    alignment: Alignment,
    same: list[int],
    timelines: Mapping[int, Timeline],
) -> tuple[int, str]:
    """Which of equally large sides is right, and what says so; an empty reason if nothing does."""
    # Groups of one mesh dimension do the same in a data-parallel program, so a sibling has a vote.
    votes: Counter[int] = Counter()
    for other in alignment.groups.values():
        if other.key != group.key and other.key.desc == group.key.desc and len(other.members) == len(group.members):
            for rank in other.cells:
                line = alignment.timeline(rank, other.key)
                row = line.at(seq) if line else None
                if row is not None and same[row.call] in largest:
                    votes[same[row.call]] += 1
    ranked = votes.most_common(2)
    if ranked and (len(ranked) == 1 or ranked[0][1] > ranked[1][1]):
        return ranked[0][0], f"{ranked[0][1]} ranks of groups like this one ask for the same"
    # A call that the group has made before, from the same line, is what the program does; a new one is the odd one.
    seen = {number: _made_before(seq, number, sides[number], same, timelines) for number in largest}
    usual = [number for number, before in seen.items() if before]
    if len(usual) == 1:
        return usual[0], "the group has made this call before, and never the other"
    return largest[0], ""


def _made_before(seq: int, number: int, ranks: Iterable[int], same: list[int], timelines: Mapping[int, Timeline]) -> bool:
    stacks = {row.stack for rank in ranks if (row := timelines[rank].at(seq))}
    for line in timelines.values():
        for index in range(len(line)):
            if line.seqs[index] >= seq:
                break
            if same[line.calls[index]] == number and line.stacks[index] in stacks:
                return True
    return False
