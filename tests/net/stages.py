"""The network stages over a lab, put together as a run puts them together: every host's agent, then one diagnosis."""

from __future__ import annotations

import base64
import json
import pickle
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ray_nccl_guard.network.cells import Cell
from ray_nccl_guard.network.findings import Host, NetworkFinding
from ray_nccl_guard.network.peers import DEADLINE_S
from ray_nccl_guard.network.reach import ConnectResult
from ray_nccl_guard.network.stage import MARGIN_S, PeersRow, diagnose_rows
from ray_nccl_guard.network.store import store_findings
from tests.net.netlab import Lab, read_line

_AGENT = str(Path(__file__).with_name("agent.py"))
# An agent's interpreter starts in 0.1 s; the limit only has to be far above that on a loaded machine.
START_LIMIT_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What the stages found, and how long the matrix and its diagnosis took."""

    findings: tuple[NetworkFinding, ...]
    cells: tuple[Cell, ...]
    seconds: float


class Stages:
    """An agent on every host of a lab."""

    def __init__(self, lab: Lab, backend: str) -> None:
        self.lab, self.backend = lab, backend
        self.agents = [lab.start(host, [_AGENT, str(host), backend, lab.ip(host)]) for host in range(lab.count)]

    def _all(self, commands: Sequence[dict[str, Any] | None], limit_s: float) -> list[Any]:
        """One command to each host at once; None for a host that does not answer in time."""
        for agent, command in zip(self.agents, commands, strict=True):
            if command is not None and agent.stdin is not None:
                try:
                    agent.stdin.write(json.dumps(command).encode() + b"\n")
                    agent.stdin.flush()
                except BrokenPipeError:
                    continue  # the host is dead: it will be the one that does not answer
        end_s = time.monotonic() + limit_s
        return [
            None if command is None else _decode(agent, end_s - time.monotonic())
            for agent, command in zip(self.agents, commands, strict=True)
        ]

    def store(self, port: int, deadline_s: float = 3.0, served_by: int | None = 0) -> tuple[NetworkFinding, ...]:
        """Every host connects to a store on h0."""
        if served_by is not None:
            commands = [{"do": "serve", "port": port} if h == served_by else None for h in range(self.lab.count)]
            assert self._all(commands, START_LIMIT_S)[served_by] is True
        command = {"do": "connect", "host": self.lab.ip(0), "port": port, "deadline_s": deadline_s}
        said: list[ConnectResult | None] = self._all([command] * self.lab.count, START_LIMIT_S)
        results = {rank: result for rank, result in enumerate(said) if result is not None}
        hosts = [Host(rank=h, name=f"h{h}", ranks=(h,)) for h in range(self.lab.count)]
        return store_findings(results, hosts, store=f"{self.lab.ip(0)} port {port}")

    def peers(self, between: Callable[[], None] = lambda: None, deadline_s: float = DEADLINE_S) -> Outcome:
        """The peers stage on every host. `between` happens when all listen and before the first connection."""
        command = {"do": "peers", "speakers": list(range(self.lab.count)), "deadline_s": deadline_s}
        said = dict(enumerate(self._all([command] * self.lab.count, START_LIMIT_S)))
        between()
        begin_s = time.monotonic()
        rows: list[PeersRow] = []
        while said := {host: what for host, what in said.items() if what is not None}:
            rows += [what for what in said.values() if isinstance(what, PeersRow)]
            asking = {host: what for host, what in said.items() if not isinstance(what, PeersRow)}
            given = {host: what[1] for host, what in asking.items()}
            said = self._exchange(given, deadline_s + MARGIN_S)
        hosts = [Host(rank=host, name=f"h{host}", ranks=(host,)) for host in range(self.lab.count)]
        found = diagnose_rows(rows, hosts, self.backend)
        cells = tuple(cell for row in rows for cell in row.rounds[0])
        return Outcome(findings=found, cells=cells, seconds=time.monotonic() - begin_s)

    def _exchange(self, given: dict[int, bytes], limit_s: float) -> dict[int, Any]:
        """Give everybody what everybody gave, and wait for what they say next."""
        line = base64.b64encode(pickle.dumps(given)) + b"\n"
        for host in given:
            stdin = self.agents[host].stdin
            assert stdin is not None
            try:
                stdin.write(line)
                stdin.flush()
            except BrokenPipeError:
                continue  # the host is dead: it will be the one that does not answer
        end_s = time.monotonic() + limit_s
        return {host: _decode(self.agents[host], end_s - time.monotonic()) for host in given}


def _decode(agent: subprocess.Popen[bytes], limit_s: float) -> Any:
    line = read_line(agent, max(0.05, limit_s))
    return None if line is None else pickle.loads(base64.b64decode(line))
