"""The matrix of hosts as words and as text, for those who look at it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ray_nccl_guard.network.cells import Cell, Code
from ray_nccl_guard.network.findings import Host

_SHORT = {
    Code.OK: "ok", Code.SYN_TIMEOUT: "SYN", Code.NO_ECHO: "ECHO", Code.BULK_STALL: "BULK", Code.WRONG_PEER: "WRONG",
    Code.CLOSED: "CLOSE", Code.ECONNREFUSED: "REFUS", Code.ECONNRESET: "RESET", Code.EHOSTUNREACH: "UNREA",
    Code.ENETUNREACH: "NETUN", Code.EINVAL: "EINVA", Code.EACCES: "EACCE", Code.EPERM: "EPERM", Code.EADDRNOTAVAIL: "NOADR",
    Code.ETIMEDOUT: "TIMED", Code.NO_ADDRESS: "NAME", Code.NOT_TRIED: "?", Code.OTHER: "OTHER",
}  # fmt: skip
# For the readers of the matrix; the kernel's own errors are known by their names.
MEANINGS = {
    "ok": "connected, and 64 KiB went through", "SYN": "no answer to a connection: dropped, or the host is gone",
    "ECHO": "the kernel accepted, the process did not answer", "BULK": "16 bytes pass, 64 KiB do not",
    "WRONG": "somebody else answers there", "CLOSE": "the peer closed first", "REFUS": "refused: nobody listens there",
    "RESET": "reset by the peer or a firewall", "UNREA": "host unreachable", "NETUN": "network unreachable",
    "NAME": "no usable address", "?": "not tried in time", ".": "not asked",
}  # fmt: skip
# 100 columns hold the names and this many hosts; of more, those with a failed cell are shown.
MOST = 14


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """The cells as words, rows connect to columns: `ok`, a short code, `.` for not asked, `-` for the host itself.

    Attributes:
        of: how many hosts there are; `hosts` are those that are shown.
        failed: how many of them have a failed connection.
    """

    hosts: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    of: int
    failed: int

    def to_json(self) -> dict[str, Any]:
        return {"hosts": list(self.hosts), "rows": [list(row) for row in self.rows], "of": self.of, "failed": self.failed}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Matrix:
        return cls(hosts=tuple(data["hosts"]), rows=tuple(map(tuple, data["rows"])), of=data["of"], failed=data["failed"])


def matrix(cells: Sequence[Cell], hosts: Sequence[Host]) -> Matrix:
    """The matrix to show: of a wide world the hosts with a failed cell only."""
    shown = list(hosts)
    failed = {rank for cell in cells if cell.code.failed for rank in (cell.src, cell.dst)}
    if len(shown) > MOST:
        shown = [host for host in hosts if host.rank in failed][:MOST]
    code = {(cell.src, cell.dst): cell.code for cell in cells}
    rows = tuple(tuple(_word(code.get((one.rank, other.rank)), one is other) for other in shown) for one in shown)
    return Matrix(hosts=tuple(host.name for host in shown), rows=rows, of=len(hosts), failed=len(failed))


def grid(cells: Sequence[Cell], hosts: Sequence[Host]) -> str:
    """The matrix as text. Wide worlds show the hosts with a failed cell only, and say so."""
    return text(matrix(cells, hosts))


def text(shown: Matrix) -> str:
    """A matrix as lines, one a host."""
    width = max([len("from/to"), *(len(name) for name in shown.hosts)])
    lines = [f"{'from/to':{width}} " + " ".join(f"{name[-5:]:>5}" for name in shown.hosts)]
    for name, words in zip(shown.hosts, shown.rows, strict=True):
        lines.append(f"{name:{width}} " + " ".join(f"{word:>5}" for word in words))
    if len(shown.hosts) < shown.of:
        lines.append(f"({len(shown.hosts)} of {shown.of} hosts; {shown.failed} have a failed connection)")
    return "\n".join(lines)


def _word(code: Code | None, same: bool) -> str:
    if same:
        return "-"
    return "." if code is None else _SHORT[code]
