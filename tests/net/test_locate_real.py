"""`locate` with real gloo worlds on the lab's hosts: each world is real processes that connect or do not."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Sequence

import pytest

from ray_nccl_guard.locate.locate import locate
from ray_nccl_guard.locate.result import Group, Kind, Located, Trial
from tests.net.netlab import Lab, read_line

pytestmark = pytest.mark.usefixtures("lab_works")

# A healthy world of four forked ranks takes under 1 s here; a rank that has not answered by then is a failure.
WORLD_LIMIT_S = 8.0


def worlds(lab: Lab, gloo: subprocess.Popen[bytes]) -> Callable[[Sequence[Group]], Sequence[Trial]]:
    """A round's worlds one after another: the machine has two cores, and `locate` does not care."""
    port = iter(range(29600, 29900))

    def run_round(groups: Sequence[Group]) -> Sequence[Trial]:
        return [run_world(group) for group in groups]

    def run_world(group: Group) -> Trial:
        pids = [lab.first_process(rank) for rank in group]
        question = {"pids": pids, "store": f"{lab.ip(group[0])}:{next(port)}", "limit_s": WORLD_LIMIT_S}
        assert gloo.stdin is not None
        gloo.stdin.write(json.dumps(question).encode() + b"\n")
        gloo.stdin.flush()
        line = read_line(gloo, WORLD_LIMIT_S + 20.0)
        if line is None:
            return Trial.NOT_RUN
        return Trial.FAILED if any(json.loads(line)) else Trial.PASSED

    return run_round


def find(lab: Lab, gloo: subprocess.Popen[bytes]) -> Located:
    return locate({f"h{host}": [host] for host in range(4)}, worlds(lab, gloo), budget_s=300.0)


def test_a_host_that_is_cut_off_is_named_as_its_rank(gloo: subprocess.Popen[bytes]) -> None:
    with Lab(4) as lab:
        lab.unplug(2)
        found = find(lab, gloo)
    assert (found.kind, found.ranks) == (Kind.RANK, (2,)), found


def test_two_hosts_that_cannot_meet_are_named_as_a_link(gloo: subprocess.Popen[bytes]) -> None:
    with Lab(4) as lab:
        lab.drop_pair(1, 3)
        found = find(lab, gloo)
    assert (found.kind, found.ranks) == (Kind.LINK, (1, 3)), found
