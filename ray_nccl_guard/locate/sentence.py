"""The sentence of a located fault."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ray_nccl_guard.locate.result import Group, Kind, Located


def sentence(found: Located, nodes: Mapping[str, Group], rounds: int, probes: int) -> Located:
    """`found` with its sentence and its cost."""
    return replace(found, sentence=_words(found, nodes, rounds), rounds=rounds, probes=probes)


def _words(found: Located, nodes: Mapping[str, Group], rounds: int) -> str:
    of = {rank: node for node, ranks in nodes.items() for rank in ranks}
    count = len(of)
    ranks = _ranks(found.ranks)
    where = _listed(sorted({of[rank] for rank in found.ranks if rank in of}))
    if found.kind is Kind.RANK:
        others = f"the other {count - len(found.ranks)} work together" if count > len(found.ranks) else "no rank works"
        return f"{ranks} ({where}): every world with {'it' if len(found.ranks) == 1 else 'one of them'} fails; {others}"
    if found.kind is Kind.NODE:
        return f"{_listed(found.nodes)} ({ranks}): worlds with its ranks fail, those without work"
    if found.kind is Kind.LINK and count == 2:
        return f"{ranks} work alone and fail together; with two ranks, rank and link cannot be told apart"
    if found.kind is Kind.LINK and found.nodes:
        return f"the link {_listed(found.nodes)} ({ranks}): each side works with itself, and they fail with each other"
    if found.kind is Kind.LINK:
        return f"the link between {ranks} ({where}): they fail with each other and work with everybody else that was tried"
    if found.kind is Kind.THRESHOLD:
        return f"worlds of {found.largest_ok} work and fail from {found.smallest} on, with any {found.smallest} ranks tried"
    if found.kind is Kind.INTERMITTENT:
        return f"the fault comes and goes; {ranks} ({where}) failed most often in {_rounds(rounds)}"
    if found.kind is Kind.NONE:
        return f"the fault did not come back in {_rounds(rounds)}"
    suspects = f"; the smallest world that failed was {ranks}" if found.ranks else "; no world that was run failed"
    return f"not located in {_rounds(rounds)}{suspects}"


def _rounds(rounds: int) -> str:
    return f"{rounds} round{'' if rounds == 1 else 's'}"


def _ranks(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 0-7 and 12`."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    words = [f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {_listed(words)}"


def _listed(words: Sequence[str]) -> str:
    if len(words) > 7:
        return f"{', '.join(words[:6])} and {len(words) - 6} more"
    return " and ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))
