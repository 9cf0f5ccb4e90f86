"""Hangs of real torch on a fake NCCL, both its backends: what is pulled from the ranks, or left by dead ones, names the culprit."""

from __future__ import annotations

import base64
import signal
from pathlib import Path

import pytest

from ray_nccl_guard.flight.dump import Frame
from ray_nccl_guard.ray_train.flight_ends import ends
from ray_nccl_guard.ray_train.flight_judge import judge
from ray_nccl_guard.ray_train.flight_pull import Gathered, Pulled, left_on_node
from ray_nccl_guard.ray_train.recorder import Armed

BODIES = "tests.fakegpu.flight_bodies"
WORLD, CULPRIT = 3, 1


@pytest.fixture(params=["nccl", "nccl-legacy"])
def backend(request):
    return request.param


def had(value: dict) -> Pulled:
    return Pulled(
        dumps={name: base64.b64decode(data) for name, data in value["dumps"].items()},
        place=tuple(Frame(*frame) for frame in value.get("place", ())),
        groups={name: tuple(ranks) for name, ranks in value.get("groups", {}).items()},
        notes=tuple(value.get("notes", ())),
    )


def pull(ranks, tmp_path, odd, backend):
    ended = ranks.run(f"{BODIES}:pulled", WORLD, deadline_s=90, odd=odd, backend=backend, folder=str(tmp_path))
    assert all(rank.exit_code == 0 for rank in ended), "\n".join(rank.output[-2000:] for rank in ended)
    gathered = Gathered(answered={rank.rank: had(rank.value) for rank in ended})
    return judge(gathered, ends(WORLD, gathered, {}), WORLD)


@pytest.mark.parametrize(
    ("odd", "kind"),
    [
        ("skips", "missing_rank"),
        ("other_operation", "op_mismatch"),
        ("other_size", "size_mismatch"),
        ("one_more", "missing_rank"),
    ],
)
def test_the_rank_out_of_step_is_named_from_what_was_pulled(ranks, tmp_path, backend, odd, kind):
    collected = pull(ranks, tmp_path, odd, backend)
    assert (collected.verdict.kind.value, collected.verdict.culprit_ranks) == (kind, (CULPRIT,)), collected.text()
    assert collected.verdict.certainty.value != "open"
    assert "flight_bodies.py" in collected.text()


def test_the_place_where_a_rank_sleeps_is_told(ranks, tmp_path, backend):
    assert "flight_bodies.py" in pull(ranks, tmp_path, "skips", backend).ends[CULPRIT].place


def test_ranks_in_step_are_told_to_be(ranks, tmp_path, backend):
    collected = pull(ranks, tmp_path, "nothing_odd", backend)
    assert collected.verdict.kind.value == "none" and collected.recorded.keys() == {0, 1, 2}


def test_files_of_ranks_that_the_watchdog_ended_and_the_pull_of_the_culprit_make_one_verdict(ranks, tmp_path, backend):
    ended = ranks.run(
        f"{BODIES}:killed_by_its_watchdog", WORLD, deadline_s=90, backend=backend, folder=str(tmp_path), timeout_s=4.0
    )
    victims = [rank for rank in ended if rank.rank != CULPRIT]
    assert all(rank.signal == signal.SIGABRT for rank in victims), [
        (r.signal, r.exit_code, r.hung, r.seconds, r.output[-900:]) for r in ended
    ]
    armed = [Armed(rank=rank.rank, pid=rank.pid, node="n", host="h", prefix=f"{tmp_path}/rank_") for rank in victims]
    left = left_on_node(armed, [])
    assert all(pulled.dumps and pulled.state == "gone" for pulled in left.values()), sorted(Path(tmp_path).iterdir())
    gathered = Gathered(answered={CULPRIT: had(ended[CULPRIT].value)}, left=left, died={r.rank: "SIGABRT" for r in victims})
    collected = judge(gathered, ends(WORLD, gathered, {}), WORLD)
    assert (collected.verdict.kind.value, collected.verdict.culprit_ranks) == ("missing_rank", (CULPRIT,)), collected.text()
    assert collected.verdict.missing_dumps == ()
