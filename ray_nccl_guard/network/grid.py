"""The matrix of hosts as text, for those who look at it."""

from __future__ import annotations

from collections.abc import Sequence

from ray_nccl_guard.network.cells import Cell, Code
from ray_nccl_guard.network.findings import Host

_SHORT = {
    Code.OK: "ok", Code.SYN_TIMEOUT: "SYN", Code.NO_ECHO: "ECHO", Code.BULK_STALL: "BULK", Code.WRONG_PEER: "WRONG",
    Code.CLOSED: "CLOSE", Code.ECONNREFUSED: "REFUS", Code.ECONNRESET: "RESET", Code.EHOSTUNREACH: "UNREA",
    Code.ENETUNREACH: "NETUN", Code.EINVAL: "EINVA", Code.EACCES: "EACCE", Code.EPERM: "EPERM", Code.EADDRNOTAVAIL: "NOADR",
    Code.ETIMEDOUT: "TIMED", Code.NO_ADDRESS: "NAME", Code.NOT_TRIED: "?", Code.OTHER: "OTHER",
}  # fmt: skip
# 100 columns hold the names and this many hosts; of more, those with a failed cell are shown.
MOST = 14


def grid(cells: Sequence[Cell], hosts: Sequence[Host]) -> str:
    """Rows connect to columns; `.` was not asked. Wide worlds show the hosts with a failed cell only, and say so."""
    shown = list(hosts)
    failed = {rank for cell in cells if cell.code.failed for rank in (cell.src, cell.dst)}
    if len(shown) > MOST:
        shown = [host for host in hosts if host.rank in failed][:MOST]
    code = {(cell.src, cell.dst): cell.code for cell in cells}
    width = max([len("from/to"), *(len(host.name) for host in shown)])
    lines = [f"{'from/to':{width}} " + " ".join(f"{host.name[-5:]:>5}" for host in shown)]
    for one in shown:
        words = [_word(code.get((one.rank, other.rank)), one is other) for other in shown]
        lines.append(f"{one.name:{width}} " + " ".join(f"{word:>5}" for word in words))
    if len(shown) < len(hosts):
        lines.append(f"({len(shown)} of {len(hosts)} hosts; {len(failed)} have a failed connection)")
    return "\n".join(lines)


def _word(code: Code | None, same: bool) -> str:
    if same:
        return "-"
    return "." if code is None else _SHORT[code]
