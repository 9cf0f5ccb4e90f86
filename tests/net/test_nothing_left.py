"""Nothing outlives a lab or a round: processes, namespaces, interfaces, TIME_WAIT sockets, also after SIGKILL."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.net.netlab import REPOSITORY, Lab, read_line
from tests.net.stages import Stages

pytestmark = pytest.mark.usefixtures("lab_works")


def namespaces() -> set[str]:
    found = set()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            found.add(os.readlink(f"/proc/{pid}/ns/net"))
        except OSError:
            continue  # ended meanwhile
    return found


def test_a_round_leaves_no_connection_in_time_wait() -> None:
    with Lab(4) as lab:
        stages = Stages(lab, "gloo")
        stages.store(29500)
        stages.peers()
        left = [lab.output(host, ["cat", "/proc/net/tcp"]).splitlines()[1:] for host in range(4)]
    states = [line.split()[3] for lines in left for line in lines]
    assert states == ["0A"]  # include/net/tcp_states.h: the store listens, and nothing is in TIME_WAIT (06)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_runner_that_is_killed_takes_its_lab_with_it(how: signal.Signals) -> None:
    program = (
        "import os, time\nfrom tests.net.netlab import Lab\nfrom tests.net.stages import Stages\n"
        "with Lab(3) as lab:\n    s = Stages(lab, 'gloo')\n    s.peers()\n    lab.freeze(1)\n    lab.delay(2, 0.1)\n"
        "    own = [os.readlink(f'/proc/{lab.first_process(host)}/ns/net') for host in range(-1, 3)]\n"  # the switch is -1
        "    print(lab._folder, *own, flush=True)\n    time.sleep(60)"
    )
    runner = subprocess.Popen(
        [sys.executable, "-c", program], cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    try:
        said = read_line(runner, 60.0)
        assert said, "the lab did not come up"
        folder, *own = said.split()
        assert len(set(own)) == 4 and set(own) <= namespaces(), "other labs may be up on this machine"
    finally:
        runner.send_signal(how)
        runner.wait(timeout=20)
        if runner.stdout:
            runner.stdout.close()
    end_s = time.monotonic() + 20
    while namespaces() & set(own) and time.monotonic() < end_s:
        time.sleep(0.05)
    assert namespaces() & set(own) == set()
    if how is signal.SIGKILL:
        Lab(1).end()  # the next lab sweeps
    assert not Path(folder).exists()
