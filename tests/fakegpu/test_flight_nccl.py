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
from tests.fakegpu.ranks import Ranks

BODIES = "tests.fakegpu.flight_bodies"
WORLD, CULPRIT = 3, 1


@pytest.fixture(params=["nccl", pytest.param("nccl-legacy", marks=pytest.mark.slow)])
def backend(request):
    return request.param


def had(value: dict) -> Pulled:
    return Pulled(
        dumps={name: base64.b64decode(data) for name, data in value["dumps"].items()},
        place=tuple(Frame(*frame) for frame in value.get("place", ())),
        groups={name: tuple(ranks) for name, ranks in value.get("groups", {}).items()},
        notes=tuple(value.get("notes", ())),
    )


def pull(ranks, tmp_path, odd, backend, world=WORLD, env=None):
    ended = ranks.run(f"{BODIES}:pulled", world, deadline_s=90, odd=odd, backend=backend, folder=str(tmp_path), env=env)
    died = {rank.rank: "SIGKILL" for rank in ended if rank.signal == signal.SIGKILL and not rank.hung}
    assert all(r.exit_code == 0 or r.rank in died for r in ended), "\n".join(rank.output[-2000:] for rank in ended)
    gathered = Gathered(answered={rank.rank: had(rank.value) for rank in ended if rank.rank not in died}, died=died)
    return judge(gathered, ends(world, gathered, {}), world)


@pytest.mark.parametrize(
    ("odd", "kind"),
    [
        ("skips", "missing_rank"),
        ("other_operation", "op_mismatch"),
        ("other_size", "size_mismatch"),
        ("other_dtype", "dtype_mismatch"),
        ("one_more", "missing_rank"),
    ],
)
def test_the_rank_out_of_step_is_named_from_what_was_pulled(ranks, tmp_path, backend, odd, kind):
    collected = pull(ranks, tmp_path, odd, backend)
    assert (collected.verdict.kind.value, collected.verdict.culprit_ranks) == (kind, (CULPRIT,)), collected.text()
    assert collected.verdict.certainty.value != "open"
    assert "flight_bodies.py" in collected.text()
    if odd == "skips":
        assert "flight_bodies.py" in collected.ends[CULPRIT].place, "where the rank sleeps"


def test_a_rank_that_died_is_named_from_what_the_others_have(ranks, tmp_path, backend):
    collected = pull(ranks, tmp_path, "dies", backend)
    assert (collected.verdict.kind.value, collected.verdict.culprit_ranks) == ("missing_rank", (CULPRIT,)), collected.text()
    assert collected.verdict.missing_dumps == (CULPRIT,) and "has died: SIGKILL" in " ".join(collected.verdict.because)


def test_a_collective_that_hangs_in_nccl_is_told_from_a_rank_out_of_step_and_blames_nobody(ranks, tmp_path, backend):
    collected = pull(ranks, tmp_path, "hangs_in_nccl", backend, env={"FAKE_FAULT": "allreduce:hang@rank1#4"})
    assert (collected.verdict.kind.value, collected.verdict.culprit_ranks) == ("stalled", ()), collected.text()
    assert "hangs_in_nccl" in collected.text() and "flight_bodies.py" in collected.text()


@pytest.mark.slow
def test_a_wait_is_followed_over_the_groups_of_a_mesh(ranks, tmp_path, backend):
    """Ranks 0, 2 and 3 stand in collectives of three different groups; only one of them is with the culprit."""
    collected = pull(ranks, tmp_path, "mesh_skips", backend, world=4)
    assert (collected.verdict.kind.value, collected.verdict.culprit_ranks) == ("missing_rank", (CULPRIT,)), collected.text()
    assert "mesh_skips" in collected.text()


@pytest.mark.slow
def test_another_operation_in_one_group_of_a_mesh_is_told_from_the_waits_in_the_others(ranks, tmp_path, backend):
    collected = pull(ranks, tmp_path, "mesh_other_operation", backend, world=4)
    # Of two ranks that ask for different things no majority says which is right.
    assert collected.verdict.kind.value == "op_mismatch" and CULPRIT in collected.verdict.culprit_ranks, collected.text()
    assert set(collected.verdict.culprit_ranks) <= {0, CULPRIT}, collected.text()


@pytest.fixture(scope="module")
def computing_ranks(double, tmp_path_factory):
    """Ranks whose kernels have an effect: DDP computes before it reduces."""
    with Ranks(double.env(devices=4, ops=True, state=tmp_path_factory.mktemp("ledger"))) as server:
        yield server


@pytest.mark.slow
def test_a_branch_of_a_ddp_model_that_one_rank_does_not_take_is_named(computing_ranks, tmp_path, backend):
    collected = pull(computing_ranks, tmp_path, "ddp_unused_branch", backend)
    assert (collected.verdict.kind.value, collected.verdict.culprit_ranks) == ("missing_rank", (CULPRIT,)), collected.text()


def test_ranks_in_step_are_told_to_be(ranks, tmp_path, backend):
    collected = pull(ranks, tmp_path, "nothing_odd", backend)
    assert collected.verdict.kind.value == "none" and collected.recorded.keys() == {0, 1, 2}


@pytest.mark.slow
@pytest.mark.torch_versions  # in the gate on both
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
