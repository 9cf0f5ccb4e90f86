"""What ranks send each other comes back as it was, and bytes that ask for more than values are refused."""

from __future__ import annotations

import os
import pickle
from typing import Any

import pytest

from ray_nccl_guard.facts import Gpu, RankFacts
from ray_nccl_guard.network.addresses import choose
from ray_nccl_guard.probe import parcel
from ray_nccl_guard.probe.spec import LogLine, Outcome, ProbeResult, ProbeSpec, RankTask, Start, Step, StepRecord

TASK = RankTask(
    run_id="a", backend="gloo", rank=1, world_size=2, store_host="h", store_port=1, env={"A": "1"}, spec=ProbeSpec()
)
RESULT = ProbeResult(
    rank=1,
    outcome=Outcome.TIMED_OUT,
    step=Step.COMM_INIT,
    steps=(StepRecord(step=Step.STORE, outcome=Outcome.OK, seconds=0.5),),
    lines=(LogLine(source="output", number=3, text="text"),),
    all_reduce_s={4: 0.1},
    start=Start.SPAWN,
)
FACTS = RankFacts(
    rank=0, gpu=Gpu(uuid="GPU-1", capability=(9, 0)), addresses=choose({}, ()), settings={"NCCL_DEBUG": "INFO"}
)


@pytest.mark.parametrize("value", [TASK, RESULT, FACTS, ("ok", [RESULT, None, b"\0", {"a": 1.5}]), ("end", (20,))])
def test_a_value_comes_back_as_it_was(value: Any):
    assert parcel.unpack(parcel.pack(value)) == value


class Runs:
    def __init__(self, function: Any, *arguments: Any) -> None:
        self.function, self.arguments = function, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self.function, self.arguments


@pytest.mark.parametrize(
    "function, arguments",
    [(os.system, ("true",)), (eval, ("1",)), (getattr, ("a", "upper")), (pickle.loads, (b"",)), (parcel.unpack, (b"",))],
)
def test_bytes_that_call_something_are_refused(function: Any, arguments: tuple[Any, ...]):
    with pytest.raises(pickle.UnpicklingError):
        parcel.unpack(pickle.dumps(Runs(function, *arguments), protocol=4))


@pytest.mark.parametrize(
    "name",
    ["ray_nccl_guard.probe.local\nLocalRanks", "ray_nccl_guard.probe.process\nos.system", "ray_nccl_guard.cli.probe\nrun"],
)
def test_a_class_of_this_package_that_is_no_value_is_refused(name: str):
    with pytest.raises(pickle.UnpicklingError):
        parcel.unpack(b"c" + name.encode() + b"\n.")
