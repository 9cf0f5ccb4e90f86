"""What the network stages say: a sentence with a name in it, the ranks it points at, and whether gloo has the same fault."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from ray_nccl_guard.classes import FailureClass
from ray_nccl_guard.facts import Finding
from ray_nccl_guard.network.addresses import AddressChoice, Library


class Kind(Enum):
    """The shape of a fault in the matrix of hosts."""

    ADDRESS = "address"
    STORE = "store"
    PORT = "port"
    SILENT = "silent"
    ALL_PAIRS = "all_pairs"
    HOST_BOTH = "host_both"
    HOST_INBOUND = "host_inbound"
    HOST_OUTBOUND = "host_outbound"
    PAIR = "pair"
    DIRECTION = "direction"
    BULK = "bulk"
    WRONG_PEER = "wrong_peer"
    LOSSY = "lossy"
    SLOW = "slow"


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """One host of the run.

    Attributes:
        rank: the rank that speaks for it in the cells.
        name: the host's name for sentences.
        ranks: every rank on it, `rank` included.
        choice: the addresses it would take; None if it gave none.
        answered: False if its probe gave no row of cells although it was asked.
    """

    rank: int
    name: str
    ranks: tuple[int, ...]
    choice: AddressChoice | None = None
    answered: bool = True

    def address(self, library: Library) -> str:
        """The address that `library` would take here, empty if not known."""
        return self.choice.of(library).address if self.choice else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkFinding:
    """One fault of the network, as a sentence.

    Attributes:
        failure: the class it speaks for.
        text: the sentence; stands alone and names the host, pair or direction.
        hosts: names of the hosts to look at first.
        ranks: their ranks.
        decides: True if the backend cannot start over such a network; False if it may, and the finding only explains
            what happens later.
        gloo_too: whether gloo meets the same fault; None if only gloo's own probe can tell.
        relief: the settings that sidestep it, the same for all ranks.
    """

    kind: Kind
    failure: FailureClass
    text: str
    hosts: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    decides: bool = False
    gloo_too: bool | None = None
    relief: Mapping[str, str] = field(default_factory=dict)

    def finding(self) -> Finding:
        """The same for the verdict, in the form that all stages share."""
        gloo = {True: "; gloo has the same problem", False: "; gloo does not have it", None: ""}[self.gloo_too]
        return Finding(
            failure=self.failure.value, text=self.text + gloo, decides=self.decides,
            culprit_ranks=self.ranks, relief=dict(self.relief),
        )  # fmt: skip


def ranks_of(hosts: Iterable[Host]) -> tuple[int, ...]:
    """All ranks of these hosts, ascending."""
    return tuple(sorted(rank for host in hosts for rank in host.ranks))


def listed(words: Sequence[str], most: int = 6) -> str:
    """`a, b and c`; of a long list the first ones and how many more."""
    if len(words) > most + 1:
        return f"{', '.join(words[:most])} and {len(words) - most} more"
    return " and ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))


def gloo_initiates(source: str, target: str) -> bool | None:
    """True if gloo connects from address `source` to `target`: from the numerically larger to the smaller IPv4 only.

    Measured in tests/net (a SYN dropped the other way does no harm). None for IPv6, where it was not measured.
    """
    try:
        return ipaddress.IPv4Address(source) > ipaddress.IPv4Address(target)
    except ipaddress.AddressValueError:
        return None
