"""Differences between ranks before any collective: who has another library, driver, setting or MTU than the rest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

UNSET = "(unset)"
Facts = Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One fact that is not the same on every rank.

    Attributes:
        name: the fact; parts of a nested one are joined by dots ("env.NCCL_IB_HCA").
        majority: the value most ranks have; on a tie the one the lowest rank has, and `tied` is True.
        others: value -> the ranks that have it, in rank order. A rank that lacks the fact has `UNSET`.
    """

    name: str
    majority: str
    tied: bool
    others: Mapping[str, tuple[int, ...]]

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted(rank for ranks in self.others.values() for rank in ranks))


def differences(facts: Mapping[int, Facts]) -> tuple[Difference, ...]:
    """The facts on which ranks differ, by name. Facts may nest; lists are compared as a whole, in their order."""
    flat = {rank: dict(_flat("", facts[rank])) for rank in sorted(facts)}
    names = sorted({name for values in flat.values() for name in values})
    found = (_difference(name, {rank: values.get(name, UNSET) for rank, values in flat.items()}) for name in names)
    return tuple(difference for difference in found if difference)


def _flat(prefix: str, facts: Facts) -> list[tuple[str, str]]:
    out: list[tuple[str, str]] = []
    for key, value in facts.items():
        name = f"{prefix}.{key}" if prefix else str(key)
        if isinstance(value, Mapping):
            out += _flat(name, value)
        elif value is not None:
            out.append((name, ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)))
    return out


def _difference(name: str, values: Mapping[int, str]) -> Difference | None:
    counts = Counter(values.values())  # insertion order is rank order, so most_common breaks a tie by the lowest rank
    if len(counts) < 2:
        return None
    (majority, most), (_, second), *_ = counts.most_common()
    others: dict[str, tuple[int, ...]] = {}
    for rank, value in values.items():
        if value != majority:
            others[value] = (*others.get(value, ()), rank)
    return Difference(name=name, majority=majority, tied=most == second, others=others)


def table(found: tuple[Difference, ...]) -> str:
    """The differences as aligned text, one deviating value a line; empty if there is none."""
    rows = [
        (d.name, f"ranks {ranges(ranks)}", value, f"{'as many have' if d.tied else 'the others have'} {d.majority}")
        for d in found
        for value, ranks in d.others.items()
    ]
    widths = [max((len(row[column]) for row in rows), default=0) for column in range(3)]
    return "\n".join("  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[3]]) for row in rows)


def ranges(ranks: tuple[int, ...]) -> str:
    """(0, 1, 2, 5) as "0-2, 5"."""
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and rank == parts[-1][-1] + 1:
            parts[-1].append(rank)
        else:
            parts.append([rank])
    return ", ".join(f"{part[0]}-{part[-1]}" if len(part) > 1 else str(part[0]) for part in parts)
