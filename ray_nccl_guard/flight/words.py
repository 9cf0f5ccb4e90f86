"""Calls, places and ranks in words, the same in every sentence of a verdict."""

from __future__ import annotations

from collections.abc import Iterable

from ray_nccl_guard.flight.align import Alignment, Head
from ray_nccl_guard.flight.dump import Calls, Signature

_SHOWN_RANKS = 12  # of a list in a sentence; the tables and the JSON have all


def place(head: Head | None, alignment: Alignment) -> str:
    if head is None:
        return "a call"
    if head.transfer is not None:
        name = alignment.dumps.vocabulary.calls[head.transfer.call][0].op
        return f"`{name}` of group {head.group}"
    assert head.call is not None
    return f"{describe(alignment.calls(head.call))}, call {head.call.seq} of group {head.group}"


def describe(calls: Calls) -> str:
    """A call in words: `all_reduce [1024] Float`."""
    first = _describe(calls[0])
    return first if len(calls) == 1 else f"{first} and {len(calls) - 1} more in one block"


def _describe(signature: Signature) -> str:
    shapes = signature.input_sizes or signature.output_sizes
    types = signature.input_dtypes or signature.output_dtypes
    words = [signature.op, *(str(list(shape)) for shape in shapes[:2]), *dict.fromkeys(types[:2])]
    return " ".join(words) + (f" (+{len(shapes) - 2} tensors)" if len(shapes) > 2 else "")


def ranks(numbers: Iterable[int]) -> str:
    """`rank 3`, `ranks 0-2, 5`: runs are joined, long lists are cut."""
    ordered = sorted(numbers)
    runs: list[list[int]] = []
    for rank in ordered:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    words = [str(a) if a == b else f"{a}-{b}" for a, b in runs]
    text = ", ".join(words[:_SHOWN_RANKS]) + (f" and {len(words) - _SHOWN_RANKS} more" if len(words) > _SHOWN_RANKS else "")
    return f"rank {text}" if len(ordered) == 1 else f"ranks {text}" if ordered else "no rank"


def verb(numbers: Iterable[int], one: str, many: str) -> str:
    """`one` for a single rank, `many` for more."""
    return one if len(tuple(numbers)) == 1 else many
