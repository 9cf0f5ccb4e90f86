"""Real gloo over the same faults: what the diagnosis calls fatal to gloo is what gloo dies of, and nothing else."""

from __future__ import annotations

import json
import subprocess

import pytest

from tests.net.faults import FAULTS, Fault
from tests.net.netlab import Lab, read_line

pytestmark = pytest.mark.usefixtures("lab_works")

# A mesh fault costs 15 s with gloo's timeout of 3 s, so only those whose verdict is not plain, or that differ by direction.
ASKED = (
    "healthy", "small mtu is harmless", "connections from larger to smaller dropped",
    "connections from smaller to larger dropped", "one host inbound reset", "path mtu black hole",
    "own name is 127.0.1.1 below the others", "own name is 127.0.1.1 above the others", "no route, unreachable",
)  # fmt: skip


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault.name in ASKED], ids=str)
def test_gloo_fails_where_the_diagnosis_says_so_and_only_there(
    fault: Fault, gloo: subprocess.Popen[bytes], record_property: pytest.RecordProperty
) -> None:
    with Lab(4, net=fault.net) as lab:
        fault.make(lab)
        question = {"pids": [lab.first_process(host) for host in range(4)], "store": f"{lab.ip(0)}:29500", "limit_s": 40.0}
        assert gloo.stdin is not None
        gloo.stdin.write(json.dumps(question).encode() + b"\n")
        gloo.stdin.flush()
        line = read_line(gloo, 60.0)
    assert line is not None, "no answer from the gloo world"
    said = json.loads(line)
    record_property("gloo_said", said)
    assert any(said) is fault.decides, said
