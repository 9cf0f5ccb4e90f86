"""The peers stage of one host, whole: listen, tell the others where, connect to them, and again where the first round asks.

What the hosts tell each other goes through an `exchange` that the caller provides (in a run, the probe's store), so nothing
here knows torch or Ray.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

from ray_nccl_guard.network.addresses import AddressChoice, Library
from ray_nccl_guard.network.cells import Cell, Code, Target, pack, unpack
from ray_nccl_guard.network.diagnose import diagnose
from ray_nccl_guard.network.findings import Host, NetworkFinding
from ray_nccl_guard.network.listener import Listener
from ray_nccl_guard.network.needs import Pair
from ray_nccl_guard.network.peers import DEADLINE_S, probe
from ray_nccl_guard.network.plan import first_round, row, second_round
from ray_nccl_guard.network.steadiness import ROUNDS, wants_more_rounds

Exchange = Callable[[str, bytes, float], Mapping[int, bytes]]
"""`exchange(name, mine, deadline_s)`: gives `mine` to all speaking ranks and returns what each of them gave under that
name, without those that did not come within the deadline. Every speaking rank calls it in the same order. Who did not come
once must not be waited for again, or a frozen host costs every exchange its whole deadline."""

# Beyond a round's own deadline, for all to meet again: a host under load is late by its scheduler, not by many seconds.
MARGIN_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PeersRow:
    """What one host saw.

    Attributes:
        rounds: its cells, round by round; a sparse world's second round is part of the first.
        error: why it could not listen, empty if it could.
        seconds: how long the stage took here.
    """

    rank: int
    choice: AddressChoice
    rounds: tuple[tuple[Cell, ...], ...] = ()
    error: str = ""
    seconds: float = 0.0


def longest_s(deadline_s: float = DEADLINE_S) -> float:
    """Seconds after which the stage has ended whatever happens: two exchanges more than rounds, and a second round."""
    return (ROUNDS + 1) * (deadline_s + MARGIN_S) * 2


def peers_stage(
    *, rank: int, speakers: Sequence[int], choice: AddressChoice, backend: str, run_id: str, exchange: Exchange,
    deadline_s: float = DEADLINE_S,
) -> PeersRow:  # fmt: skip
    """Run the stage on the host of speaking rank `rank`. Ends what it starts; never raises for what the network does.

    Args:
        speakers: one rank of every host, the same list everywhere.
        deadline_s: of one round. A healthy stage takes one round, and no round waits when all answer.
    """
    begin_s = time.monotonic()
    address = choice.of(Library.GLOO if backend == "gloo" else Library.NCCL).address
    port, error, rounds = 0, "", []
    with ExitStack() as stack:
        try:
            if address:
                listener = Listener(address, rank=rank, run_id=run_id, deadline_s=longest_s(deadline_s))
                port = stack.enter_context(listener).port
        except OSError as problem:
            error = f"cannot listen on {address}: {problem.strerror}"
        said = exchange("listen", json.dumps([address, port]).encode(), deadline_s + MARGIN_S)
        targets = {peer: _target(peer, data) for peer, data in said.items()}
        pairs = first_round(speakers)
        rounds.append(_ask(rank, targets, pairs, run_id, deadline_s))
        seen = _shared(exchange, "round 1", rounds[0], pairs, targets, deadline_s)
        more = second_round(seen, speakers) if len(pairs) < len(speakers) * (len(speakers) - 1) else frozenset[Pair]()
        if more:
            rounds[0] += _ask(rank, targets, more, run_id, deadline_s)
        elif wants_more_rounds(seen):
            for number in range(2, ROUNDS + 1):
                rounds.append(_ask(rank, targets, pairs, run_id, deadline_s))
                exchange(f"round {number}", b"", deadline_s + MARGIN_S)
        # Nobody stops listening before all are through.
        exchange("done", b"", deadline_s + MARGIN_S)
    return PeersRow(rank=rank, choice=choice, rounds=tuple(rounds), error=error, seconds=time.monotonic() - begin_s)


def _target(rank: int, data: bytes) -> Target | None:
    address, port = json.loads(data)
    return Target(rank=rank, address=address, port=port) if port else None


def _ask(
    rank: int, targets: Mapping[int, Target | None], pairs: frozenset[Pair], run_id: str, deadline_s: float
) -> tuple[Cell, ...]:
    wanted = [targets[peer] for peer in row(pairs, rank) if peer in targets]
    return probe(rank, [target for target in wanted if target], run_id=run_id, deadline_s=deadline_s)


def _shared(
    exchange: Exchange, name: str, mine: Sequence[Cell], pairs: frozenset[Pair], targets: Mapping[int, Target | None],
    deadline_s: float,
) -> tuple[Cell, ...]:  # fmt: skip
    """All hosts' cells of a round. Only what is not plainly well travels: at 1,024 hosts the rest would be 400 MB."""
    said = exchange(name, pack(cell for cell in mine if not cell.ok or cell.retransmits), deadline_s + MARGIN_S)
    odd = {(cell.src, cell.dst): cell for data in said.values() for cell in unpack(data)}
    return tuple(
        odd.get((src, dst)) or Cell(src=src, dst=dst, code=Code.OK) for src, dst in pairs if src in said and targets.get(dst)
    )


def diagnose_rows(rows: Sequence[PeersRow], hosts: Sequence[Host], backend: str) -> tuple[NetworkFinding, ...]:
    """The findings over all hosts' rows; a host without a row counts as one that did not answer.

    Args:
        hosts: every host with its speaking rank, name and ranks; the addresses are filled in from the rows.
    """
    by_rank = {one.rank: one for one in rows}
    known = [
        replace(host, choice=by_rank[host.rank].choice if host.rank in by_rank else None, answered=host.rank in by_rank)
        for host in hosts
    ]
    count = max((len(one.rounds) for one in rows), default=0)
    rounds = [[cell for one in rows if number < len(one.rounds) for cell in one.rounds[number]] for number in range(count)]
    return diagnose(rounds[0] if rounds else [], known, backend, more_rounds=rounds[1:])
