"""Clusters started beforehand with `ray start`, in an environment of their own, with or without the package."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
import venv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_UP_S = 120.0


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """`address` is for RAY_ADDRESS, `dashboard` for `ray job`; `python` is the interpreter that it runs on."""

    address: str
    dashboard: str
    python: str


def bare_python(folder: Path) -> str:
    """An interpreter that has everything but the package: a path file does not follow the editable install's own one."""
    venv.create(folder, with_pip=False, symlinks=True)
    site = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    (site / "base.pth").write_text(packages_here())
    return str(folder / "bin" / "python")


def packages_here() -> str:
    """The lines of a path file that leads to this environment's packages, whichever folders they lie in."""
    return "".join(f"{path}\n" for path in sys.path if path.endswith("site-packages"))


def environment(**more: str) -> dict[str, str]:
    """This environment without what tests or users have set for Ray and NCCL."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "NCCL", "PYTHONPATH", "TORCH"))}
    return {**kept, "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", **more}


@contextlib.contextmanager
def started(folder: Path, *, python: str, with_package: bool, cpus: int = 4) -> Iterator[Cluster]:
    """`ray start --head` in the foreground with a dashboard, in a session of its own that the end kills."""
    # Without its agent a cluster takes no `ray job`, and the agent's usual port is one number for all clusters of a machine.
    port, dashboard, agent = _free_port(), _free_port(), _free_port()
    log = open(folder / "head.log", "w")  # noqa: SIM115 - closed below
    sockets = tempfile.mkdtemp(prefix="r")  # pytest's folders are longer than the 107 bytes of a socket's path
    head = subprocess.Popen(
        [python, "-m", "ray.scripts.scripts", "start", "--head", "--block", f"--port={port}", f"--num-cpus={cpus}",
         f"--dashboard-port={dashboard}", f"--dashboard-agent-listen-port={agent}", f"--temp-dir={sockets}"],
        env=environment(**({"PYTHONPATH": str(ROOT)} if with_package else {})),
        stdout=log, stderr=log, start_new_session=True, cwd="/",
    )  # fmt: skip
    try:
        _wait_for(f"http://127.0.0.1:{dashboard}/api/version", head, folder / "head.log")
        yield Cluster(address=f"127.0.0.1:{port}", dashboard=f"http://127.0.0.1:{dashboard}", python=python)
    finally:
        if head.poll() is None:
            os.killpg(head.pid, signal.SIGTERM)
        try:
            head.wait(8)
        except subprocess.TimeoutExpired:
            os.killpg(head.pid, signal.SIGKILL)
            head.wait(10)
        log.close()
        shutil.rmtree(sockets, ignore_errors=True)  # its last processes may still be writing


def _wait_for(url: str, head: subprocess.Popen[bytes], log: Path) -> None:
    end_s = time.monotonic() + _UP_S
    while True:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            assert head.poll() is None and time.monotonic() < end_s, log.read_text()[-3000:]
            time.sleep(0.3)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
