"""Four hosts in one machine: network, host name, mount and process namespaces on one bridge, with real network faults.

Nothing is named and nothing is stored: a host is a process tree, and its namespaces, interfaces and firewall rules end
with it. The trees are tied to the process that made the lab (PDEATHSIG), so they end with it however it ends.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import final

TOOLS = ("ip", "nft", "unshare", "nsenter", "setpriv", "mount")
REPOSITORY = Path(__file__).resolve().parents[2]
_RELAY = Path(__file__).with_name("relay.py")


def why_not() -> str | None:
    """None if a lab works here, else the reason: missing tools, missing rights, a kernel without the features."""
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        return f"{', '.join(missing)} not installed (Debian: apt-get install nftables iproute2 util-linux)"
    try:
        with Lab(2) as lab:
            lab.drop_syn(0, 1)
            return None if lab.output(0, ["hostname"]).strip() == "h0" else "a new host name is not its own"
    except LabError as error:
        return str(error)


class LabError(Exception):
    """The lab could not be built; says which command failed and what it said."""


# Each step of the lab takes milliseconds; a machine that is busy with other tests was seen to hold one up for 10 s.
STEP_LIMIT_S = 60.0


def run(command: Sequence[str], text: str = "", limit_s: float = STEP_LIMIT_S) -> str:
    """Run to the end and return what it printed.

    Raises:
        LabError: it failed or took longer than `limit_s`.
    """
    try:
        done = subprocess.run(
            command, check=False, input=text, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=limit_s
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LabError(f"{command[0]}: {error}") from error
    if done.returncode:
        raise LabError(f"{' '.join(command)}: {done.stdout.strip()}")
    return done.stdout


@final
class Lab:
    """`with Lab(4) as lab:` hosts h0..h3 at `net`.1 .. `net`.4, each with its own /etc/hosts and /tmp/ray.

    Every fault is a method; a lab is used for one set of faults and thrown away.
    """

    def __init__(self, count: int, net: str = "10.77.0") -> None:
        self.count, self.net = count, net
        self._trees: list[subprocess.Popen[bytes]] = []  # the switch first, then the hosts
        self._others: list[subprocess.Popen[bytes]] = []
        _sweep()
        self._folder = Path(tempfile.mkdtemp(prefix=f"netlab-{os.getpid()}-"))

    def __enter__(self) -> Lab:
        try:
            self._build()
        except BaseException:
            self.end()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.end()

    def end(self) -> None:
        """Kill everything that was started; the namespaces go with their last process."""
        for process in self._others + self._trees:
            process.kill()
        for process in self._others + self._trees:
            process.wait(timeout=10)
            if process.stdout:
                process.stdout.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def ip(self, host: int) -> str:
        return f"{self.net}{':' if ':' in self.net else '.'}{host + 1}"

    def _build(self) -> None:
        self._trees.append(self._tree("switch", "--net"))
        self._ip(0, "link add br0 type bridge", "link set br0 up", f"addr add {self.net}.254/24 dev br0")
        for host in range(self.count):
            folder = self._folder / f"h{host}"
            (folder / "ray").mkdir(parents=True)
            (folder / "resolv.conf").touch()
            self.own_name(host, self.ip(host))
            self._trees.append(self._tree(folder, "--net", "--uts", "--mount"))
        for host in range(self.count):
            # A bridge takes interface index 2 and goes again, so that a later one can come before eth0 as docker0 does.
            self._ip(host + 1, "link add x type bridge")
            pid = self._inside(host + 1)
            self._ip(0, f"link add p{host} type veth peer name eth0 netns {pid}", f"link set p{host} master br0 up")
            self._ip(
                host + 1, f"addr add {self.ip(host)}/24 dev eth0", "link set lo up", "link set eth0 up", "link del x",
                f"route add default via {self.net}.254",
            )  # fmt: skip

        for host in range(self.count):
            self._wait_for_cable(host, "UP")

    def _wait_for_cable(self, host: int, state: str, limit_s: float = STEP_LIMIT_S) -> None:
        """The kernel sets IFF_RUNNING a moment after the cable is in, and NCCL takes no interface before that."""
        end_s = time.monotonic() + limit_s
        command = ["nsenter", "-t", str(self._inside(host + 1)), "-n", "ip", "link", "show", "eth0"]
        while f"state {state}" not in run(command):
            if time.monotonic() > end_s:
                raise LabError(f"eth0 of h{host} did not go {state}")
            time.sleep(0.02)

    def _tree(self, folder: Path | str, *namespaces: str) -> subprocess.Popen[bytes]:
        """Start a process tree of its own whose first process waits for ever."""
        script = "mount --make-rprivate / && mount -t proc proc /proc && echo up && exec sleep infinity"
        if isinstance(folder, Path):
            binds = " && ".join(
                f"mount --bind {folder}/{name} {where}"
                for name, where in (("ray", "/tmp/ray"), ("hosts", "/etc/hosts"), ("resolv.conf", "/etc/resolv.conf"))
            )
            script = script.replace("&& echo", f"&& hostname {folder.name} && mkdir -p /tmp/ray && {binds} && echo")
        command = ["setpriv", "--pdeathsig", "KILL", "unshare", "--mount", *namespaces]
        command += ["--pid", "--fork", "--kill-child=KILL", "sh", "-c", script]
        tree = subprocess.Popen(
            command, start_new_session=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        if (said := read_line(tree, STEP_LIMIT_S)) != "up":
            tree.kill()
            tree.wait(timeout=10)
            raise LabError(f"namespaces are not permitted here: {said}")
        return tree

    def _inside(self, tree: int) -> int:
        """The pid of the first process of a tree, seen from outside."""
        pid = self._trees[tree].pid
        try:
            return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])
        except (OSError, IndexError) as error:
            raise LabError(f"host h{tree - 1} is dead") from error

    def _ip(self, tree: int, *commands: str) -> None:
        run(["nsenter", "-t", str(self._inside(tree)), "-n", "ip", "-batch", "-"], "\n".join(commands) + "\n")

    def _nft(self, host: int, chain: str, *rules: str) -> None:
        lines = ["add table inet fault", f"add chain inet fault {chain} {{ type filter hook {chain} priority 0; }}"]
        lines += [f"add rule inet fault {chain} {rule}" for rule in rules]
        run(["nsenter", "-t", str(self._inside(host + 1)), "-n", "nft", "-f", "-"], "\n".join(lines) + "\n")

    # Programs on hosts

    def command(self, host: int, program: Sequence[str]) -> list[str]:
        """`program` as a command line that runs on the host."""
        return ["nsenter", "-t", str(self._inside(host + 1)), "-n", "-u", "-m", "-p", "--", *program]

    def first_process(self, host: int) -> int:
        """The pid of the host's first process, for setns."""
        return self._inside(host + 1)

    def start(self, host: int, program: Sequence[str]) -> subprocess.Popen[bytes]:
        """Start a Python program of the repository on a host, with pipes; it ends with the lab."""
        # nsenter stops itself when its child is stopped, and would stay behind so when we are killed.
        command = ["setpriv", "--pdeathsig", "KILL", *self.command(host, [sys.executable, *program])]
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
        self._others.append(process)
        return process

    def output(self, host: int, program: Sequence[str]) -> str:
        return run(self.command(host, program))

    # Faults

    def drop_direction(self, source: int, target: int) -> None:
        """Every packet from one host to another is lost."""
        self._nft(target, "input", f"ip saddr {self.ip(source)} drop")

    def drop_pair(self, one: int, other: int) -> None:
        self.drop_direction(one, other)
        self.drop_direction(other, one)

    def drop_syn(self, source: int, target: int) -> None:
        """Connections from one host to another are lost; those the other way work."""
        self._nft(target, "input", f"ip saddr {self.ip(source)} tcp flags & (syn|ack) == syn drop")

    def close_ports(self, *hosts: int, how: str = "drop", keep_open: str = "") -> None:
        """A stateful firewall: no new TCP connections in, but to `keep_open`. `how`: drop, reset or icmp."""
        verdict = {"drop": "drop", "reset": "reject with tcp reset", "icmp": "reject with icmpx type admin-prohibited"}[how]
        opened = [f"tcp dport {{ {keep_open} }} accept"] if keep_open else []
        for host in hosts:
            rules = ["iif lo accept", "ct state established,related accept", *opened, f"tcp dport 1-65535 {verdict}"]
            self._nft(host, "input", *rules)

    def block_outbound(self, host: int) -> None:
        """The host's own firewall lets no new connection out."""
        self._nft(host, "output", "oif lo accept", "tcp flags & (syn|ack) == syn drop")

    def no_route(self, host: int, target: int, kind: str) -> None:
        """`kind`: unreachable, blackhole or prohibit."""
        self._ip(host + 1, f"route add {kind} {self.ip(target)}/32")

    def no_route_at_all(self, host: int) -> None:
        """Its address stays, every way off the host goes: a container whose network was never attached."""
        self._ip(host + 1, "route flush table main")

    def only_ipv6(self) -> None:
        """Every host changes to an IPv6 address and has no IPv4 one but loopback's; `ip` says the new ones."""
        self._ip(0, "addr add fd77::ff/64 dev br0 nodad")
        self.net = "fd77:"
        for host in range(self.count):
            self._ip(host + 1, "addr flush dev eth0 scope global", f"addr add {self.ip(host)}/64 dev eth0 nodad")
            self.own_name(host, self.ip(host))

    def unplug(self, host: int) -> None:
        self._ip(0, f"link set p{host} down")
        self._wait_for_cable(host, "DOWN")

    def lose(self, host: int, percent: int) -> None:
        """Packets that arrive at the host are lost by chance."""
        self._nft(host, "input", f"numgen random mod 100 < {percent} drop")

    def set_mtu(self, host: int, size: int) -> None:
        self._ip(host + 1, f"link set eth0 mtu {size}")

    def drop_big_packets(self, host: int, size: int) -> None:
        """All believe in jumbo frames, one cable drops what is larger than `size` without a word."""
        for other in range(self.count):
            self._ip(0, f"link set p{other} mtu 9000")
            # One segment a packet: what nft sees is what would be on the wire.
            self._ip(other + 1, "link set eth0 mtu 9000 gso_max_segs 1")
        for chain in ("input", "output"):
            self._nft(host, chain, f"meta length > {size} drop")

    def own_name(self, host: int, address: str) -> None:
        """What the host's own name resolves to on it; empty: nothing."""
        lines = ["127.0.0.1 localhost"]
        lines += [f"{self.ip(other)} h{other}" for other in range(self.count) if other != host]
        lines += [f"{address} h{host}"] if address else []
        (self._folder / f"h{host}" / "hosts").write_text("\n".join(lines) + "\n")  # in place: it is a bind mount

    def add_interface(self, host: int, name: str, address: str) -> None:
        """An interface that comes before eth0, as docker0 or cni0 do."""
        self._ip(
            host + 1, f"link add name {name} index 2 type bridge", f"link add d{name[:8]} type veth peer name e{name[:8]}",
            f"link set e{name[:8]} master {name} up", f"link set d{name[:8]} up", f"addr add {address} dev {name}",
            f"link set {name} up",
        )  # fmt: skip

    def freeze(self, host: int) -> None:
        """Stop every process of the host; its kernel goes on taking connections."""
        first = self._inside(host + 1)
        here = os.readlink(f"/proc/{first}/ns/pid")
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                if int(pid) != first and os.readlink(f"/proc/{pid}/ns/pid") == here:
                    os.kill(int(pid), signal.SIGSTOP)
            except OSError:
                continue  # ended meanwhile

    def kill(self, host: int) -> None:
        """The host is gone, its cable with it."""
        first = self._inside(host + 1)
        self._trees[host + 1].kill()
        self._trees[host + 1].wait(timeout=STEP_LIMIT_S)
        end_s = time.monotonic() + STEP_LIMIT_S
        # Its first process ends last (pid_namespaces(7)); until then an agent there may still answer.
        while _lives(first):
            if time.monotonic() > end_s:
                raise LabError(f"h{host} does not die")
            time.sleep(0.01)

    def delay(self, host: int, each_way_s: float) -> None:
        """Every packet on the host's cable takes longer."""
        command = ["nsenter", "-t", str(self._inside(0)), "-n", sys.executable, str(_RELAY), str(host), str(each_way_s)]
        relay = subprocess.Popen(["setpriv", "--pdeathsig", "KILL", *command], stdout=subprocess.PIPE)
        self._others.append(relay)
        if (said := read_line(relay, STEP_LIMIT_S)) != "ready":
            raise LabError(f"the delaying relay did not start: {said}")


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (OSError, IndexError):
        return False


def _sweep() -> None:
    """Remove the folders of labs whose process was killed; nothing else of theirs is left."""
    for folder in Path(tempfile.gettempdir()).glob("netlab-*-*"):
        if not Path("/proc", folder.name.split("-")[1]).exists():
            shutil.rmtree(folder, ignore_errors=True)


def read_line(process: subprocess.Popen[bytes], limit_s: float) -> str | None:
    """The next line that a process prints, None if it ends or `limit_s` passes first."""
    assert process.stdout is not None
    end_s, line = time.monotonic() + limit_s, b""
    while (left_s := end_s - time.monotonic()) > 0:
        if select.select([process.stdout], [], [], left_s)[0]:
            # Unbuffered, so that select keeps telling the truth.
            byte = os.read(process.stdout.fileno(), 1)
            if byte in (b"", b"\n"):
                return line.decode() if byte or line else None
            line += byte
    return None
