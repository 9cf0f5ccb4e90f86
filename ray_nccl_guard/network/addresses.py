"""Which address NCCL, gloo and Ray would take on one host, and what is wrong with it, before anything is connected."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from ray_nccl_guard import nccl_conf
from ray_nccl_guard.network.interfaces import Interface, interfaces, names, own_name_address


class Library(Enum):
    """Who takes an address."""

    NCCL = "nccl"
    GLOO = "gloo"


class Trouble(Enum):
    """What can be wrong with an address that a library would take."""

    NO_INTERFACE = "no_interface"
    """The variable names an interface that this host does not have: the library fails at once."""
    NO_ADDRESS = "no_address"
    LOOPBACK = "loopback"
    LINK_LOCAL = "link_local"
    BRIDGE = "bridge"
    """A bridge of the container runtime or of virtual machines, private to the host."""
    DOWN = "down"
    """Its interface has no carrier."""
    DUPLICATE = "duplicate"
    """Two hosts take the same address."""
    FAMILY = "family"
    """Some hosts take IPv4, others IPv6."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AddressProblem:
    """One thing wrong with a library's address. `text` is a sentence without the host's name."""

    library: Library
    trouble: Trouble
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """An address that a library would take: empty if it finds none. `why` says how it came to it."""

    address: str
    interface: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AddressChoice:
    """What each library takes on this host.

    Attributes:
        node_ip: the address at which Ray (or the launcher) reaches this host; empty if not known.
        interfaces: what there was to choose from.
        env: the variables that the choice depends on, those that were set.
    """

    nccl: Chosen
    gloo: Chosen
    node_ip: str = ""
    problems: tuple[AddressProblem, ...] = ()
    interfaces: tuple[Interface, ...] = ()
    own_name: str = ""
    env: Mapping[str, str] | None = None

    def of(self, library: Library) -> Chosen:
        return self.nccl if library is Library.NCCL else self.gloo

    @property
    def node_interface(self) -> str:
        """The interface that has `node_ip`, empty if none has it."""
        return next((i.name for i in self.interfaces if i.address == self.node_ip), "")


_VARIABLES = ("NCCL_SOCKET_IFNAME", "NCCL_SOCKET_FAMILY", "GLOO_SOCKET_IFNAME")


def gather(env: Mapping[str, str], *, node_ip: str = "", deadline_s: float = 5.0) -> AddressChoice:
    """`choose` for the host this runs on."""
    in_files = {name: value for name, (value, _) in nccl_conf.settings(env).items()}
    return choose({**in_files, **env}, interfaces(), own_name=own_name_address(deadline_s), node_ip=node_ip)


def choose(
    env: Mapping[str, str], available: Sequence[Interface], *, own_name: str | None = "", node_ip: str = ""
) -> AddressChoice:
    """The addresses that NCCL and gloo would take here.

    Args:
        env: the environment that the training process will have.
        available: this host's interfaces in the kernel's order.
        own_name: the first bindable address that the host's own name resolves to, empty if there is none, None if that is
            not known; then `node_ip` is taken for it, since nothing may be held against a host that was only busy.
        node_ip: the address at which Ray reaches this host.
    """
    why = "the host's own name resolves to it" if own_name is not None else "assumed: its own name did not resolve in time"
    own_name = node_ip if own_name is None else own_name
    chosen = {Library.NCCL: _nccl(env, available), Library.GLOO: _gloo(env, available, own_name, why)}
    problems = [problem for library, taken in chosen.items() for problem in _problems(library, taken, env, available)]
    return AddressChoice(
        nccl=chosen[Library.NCCL], gloo=chosen[Library.GLOO], node_ip=node_ip, problems=tuple(problems),
        interfaces=tuple(available), own_name=own_name, env={k: env[k] for k in _VARIABLES if env.get(k)},
    )  # fmt: skip


def _nccl(env: Mapping[str, str], available: Sequence[Interface]) -> Chosen:
    """NCCL's rule (src/misc/socket.cc of 2.27 and later; earlier versions differ only in not passing over virbr).

    NCCL_SOCKET_IFNAME: prefixes, `^` excludes, `=` is exact. Else ib*, else whatever is not docker*, lo*, virbr*, else
    docker*, lo*, virbr*. NCCL_COMM_ID, which would come after ib*, is not modelled: torch never sets it.
    """
    family = env.get("NCCL_SOCKET_FAMILY", "")
    usable = [
        i
        for i in available
        if i.running
        and i.address != "::1"
        and (family not in ("AF_INET", "AF_INET6") or i.is_ipv6 == (family == "AF_INET6"))
    ]
    wanted = env.get("NCCL_SOCKET_IFNAME", "")
    if len(wanted) > 1:
        taken = next((i for i in usable if _matches(i.name, wanted)), None)
        if taken is None:
            return Chosen(address="", interface="", why=f"NCCL_SOCKET_IFNAME={wanted}")
        return Chosen(address=taken.address, interface=taken.name, why=f"NCCL_SOCKET_IFNAME={wanted}")
    for pattern in ("ib", "^docker,lo,virbr", "docker", "lo", "virbr"):
        for i in usable:
            if _matches(i.name, pattern):
                why = "the first InfiniBand interface" if pattern == "ib" else "the first interface"
                return Chosen(address=i.address, interface=i.name, why=why + _down(available))
    return Chosen(address="", interface="", why="no running interface has an address")


def _down(available: Sequence[Interface]) -> str:
    """The interfaces that have an address and no carrier, for a sentence."""
    down = [i for i in available if not i.running]
    return f"; {names(down)} {'is' if len({i.name for i in down}) == 1 else 'are'} down" if down else ""


def _matches(name: str, pattern: str) -> bool:
    exclude, exact = pattern.startswith("^"), pattern.lstrip("^").startswith("=")
    listed = [part.partition(":")[0] for part in pattern.removeprefix("^").removeprefix("=").split(",") if part]
    hit = any(name == part if exact else name.startswith(part) for part in listed)
    return hit is not exclude


def _gloo(env: Mapping[str, str], available: Sequence[Interface], own_name: str, why: str) -> Chosen:
    """torch's rule (ProcessGroupGloo.cpp): GLOO_SOCKET_IFNAME exactly, else the own host name, else loopback."""
    wanted = env.get("GLOO_SOCKET_IFNAME", "")
    if wanted:
        # With several names torch opens a device on each and fails if one is missing.
        parts = [next((i for i in available if i.name == name), None) for name in wanted.split(",")]
        first = parts[0]
        if first is None or None in parts:
            return Chosen(address="", interface="", why=f"GLOO_SOCKET_IFNAME={wanted}")
        return Chosen(address=first.address, interface=first.name, why=f"GLOO_SOCKET_IFNAME={wanted}")
    if own_name:
        holder = next((i.name for i in available if i.address == own_name), "")
        return Chosen(address=own_name, interface=holder, why=why)
    return Chosen(address="127.0.0.1", interface="lo", why="the host's own name resolves to no address of this host")


def _problems(
    library: Library, taken: Chosen, env: Mapping[str, str], available: Sequence[Interface]
) -> list[AddressProblem]:
    variable = f"{library.name}_SOCKET_IFNAME"
    who = library.value

    def problem(trouble: Trouble, text: str) -> list[AddressProblem]:
        return [AddressProblem(library=library, trouble=trouble, text=text)]

    if not taken.address:
        if env.get(variable):
            text = f"{variable}={env[variable]} names no usable interface (there are: {names(available)})"
            return problem(Trouble.NO_INTERFACE, text)
        return problem(Trouble.NO_ADDRESS, f"{who} finds no address: {taken.why} (there are: {names(available)})")
    trouble = trouble_of(taken)
    if trouble is None:
        if any(i.address == taken.address and not i.running for i in available):
            return problem(Trouble.DOWN, f"{who} would take {taken.address}{_on(taken)} ({taken.why}), which is down")
        return []
    what = {
        Trouble.LOOPBACK: "a loopback address, which no other host can reach",
        Trouble.LINK_LOCAL: "a link-local address, which holds on one cable only",
        Trouble.BRIDGE: "a bridge of this host's containers or virtual machines, which no other host can reach",
    }[trouble]
    return problem(trouble, f"{who} would take {taken.address}{_on(taken)} ({taken.why}): {what}")


def _on(taken: Chosen) -> str:
    return f" on {taken.interface}" if taken.interface else ""


def trouble_of(taken: Chosen) -> Trouble | None:
    """What is wrong with an address as such, None if nothing is."""
    ip = ipaddress.ip_address(taken.address.partition("%")[0])
    if ip.is_loopback:
        return Trouble.LOOPBACK
    if ip.is_link_local:
        return Trouble.LINK_LOCAL
    # The bridges that container runtimes and libvirt create by default; flannel.1, cilium_host and tun interfaces are
    # not among them, since a pod network may route through those.
    if taken.interface.startswith(("docker", "cni", "virbr", "br-", "podman", "lxcbr", "lxdbr", "cbr")):
        return Trouble.BRIDGE
    return None
