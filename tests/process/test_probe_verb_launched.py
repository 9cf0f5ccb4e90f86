"""`probe --from-env`: one process per rank as torchrun, a pod or mpirun starts it; every rank exits with the verdict's code."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time

import pytest

from ray_nccl_guard.errors import UsageError
from ray_nccl_guard.probe import from_env
from tests.fakegpu.ranks import free_port
from tests.process.test_probe_verb import LIMIT_S, environment, nothing_is_left, run

pytest.importorskip("torch", reason="torch is not installed")
__all__ = ["nothing_is_left"]


def variables(rank: int, world_size: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank),
        "MASTER_ADDR": "localhost", "MASTER_PORT": str(port),
    }  # fmt: skip


def launch(ranks: list[int], world_size: int, *words: str, port: int | None = None) -> list[tuple[int, str, str]]:
    """Start these ranks of a world as pods would, and give back exit code, stdout and stderr of each."""
    port = port or free_port()
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "ray_nccl_guard", "probe", "--from-env", "--backend", "gloo", *words],
            env=environment(**variables(rank, world_size, port)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in ranks
    ]  # fmt: skip
    try:
        said = [process.communicate(timeout=LIMIT_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [(process.returncode, *texts) for process, texts in zip(processes, said, strict=True)]


def test_pods_prove_gloo_and_only_rank_0_prints():
    first, second = launch([0, 1], 2)
    assert (first[0], second[0]) == (0, 0), (first, second)
    assert first[1].startswith("ok: gloo passed pre-flight on 2 of 2 ranks")
    assert second[1] == ""


def test_a_rank_that_never_comes_is_named_and_the_others_exit_with_the_verdict():
    first, second = launch([0, 1], 3, "--wait", "15", "--json")
    report = json.loads(first[1])
    assert (first[0], second[0]) == (20, 20), (first, second)
    assert report["verdict"]["failure"] == "missing_rank" and report["verdict"]["culprit_ranks"] == [2]
    assert "rank 2 never came to the store" in report["verdict"]["summary"]


def test_a_rank_without_rank_0_says_so_within_its_wait():
    started_s = time.monotonic()
    ((code, out, err),) = launch([1], 2, "--wait", "3")
    assert code == 20 and out == "" and "rank 1 does not reach the store within 3 s" in err
    assert time.monotonic() - started_s < LIMIT_S / 2


def test_two_processes_that_call_themselves_one_rank_are_told():
    said = launch([0, 1, 1], 2, "--wait", "20")
    assert 20 in {code for code, _, _ in said}
    assert any("call themselves rank 1 of 2" in out + err for _, out, err in said), said


def test_a_world_of_one_needs_nobody_else():
    ((code, out, _),) = launch([0], 1)
    assert code == 0 and "1 of 1 ranks" in out


@pytest.mark.parametrize("how, code", [(signal.SIGINT, 130), pytest.param(signal.SIGKILL, -9, marks=pytest.mark.slow)])
def test_ranks_whose_rank_0_is_ended_end_by_themselves(how, code):
    port = free_port()
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.process.faulty_probe", "hang@1", "probe", "--from-env", "--backend", "gloo",
             "--timeout", "8"],
            env=environment(**variables(rank, 3, port)), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(3)
    ]  # fmt: skip
    try:
        assert ranks[0].stderr is not None
        for line in ranks[0].stderr:
            if "the communicator" in line:
                break
        time.sleep(1.0)  # into the hang
        ranks[0].send_signal(how)
        assert ranks[0].wait(timeout=30) == code
        for rank in ranks[1:]:
            _, said = rank.communicate(timeout=LIMIT_S)
            assert rank.returncode == 20 and "the store of the probe" in said and "has gone" in said, said
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


@pytest.mark.parametrize("backend, wanted", [("gloo", 0), pytest.param("nccl", 20, marks=pytest.mark.slow)])
def test_under_torchrun_every_rank_exits_with_the_verdict(backend, wanted):
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3", "-m", "ray_nccl_guard",
         "probe", "--from-env", "--backend", backend],
        env=environment(CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1"), capture_output=True, text=True, timeout=2 * LIMIT_S,
        check=False,
    )  # fmt: skip
    assert (done.returncode == 0) is (wanted == 0), done.stderr
    if wanted:
        assert "error[no_gpu_visible]" in done.stdout
        assert f"exitcode  : {wanted}" in done.stderr
    else:
        assert done.stdout.count("ok: gloo passed pre-flight on 3 of 3 ranks") == 1


def test_a_port_that_is_taken_is_named():
    import socket

    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        ((code, out, _),) = launch([0], 2, "--wait", "3", "--json", port=taken.getsockname()[1])
    report = json.loads(out)
    assert code == 20 and report["verdict"]["failure"] == "port_in_use", report["verdict"]


@pytest.mark.parametrize(
    "given, says",
    [
        ({}, "RANK is not set|WORLD_SIZE is not set"),
        ({"RANK": "0"}, "WORLD_SIZE is not set"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "a world of 0 ranks proves nothing"),
        ({"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "a"}, "rank 2 does not exist in a world of 2"),
        ({"RANK": "one", "WORLD_SIZE": "2"}, "RANK is a whole number, not 'one'"),
        ({"RANK": "1", "WORLD_SIZE": "2"}, "MASTER_ADDR is not set"),
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "x"}, "MASTER_PORT is a whole number"),
    ],
)
def test_an_environment_that_names_no_rank_is_wrong_usage(given, says):
    with pytest.raises(UsageError, match=says):
        from_env.read(given)


def test_a_missing_variable_exits_2():
    code, out, err = run("probe", "--from-env")
    assert code == 2 and out == "" and "WORLD_SIZE is not set" in err


def test_mpirun_and_slurm_and_an_operator_without_local_rank_are_understood():
    mpi = from_env.read({
        "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1", "MASTER_ADDR": "a",
    })  # fmt: skip
    assert (mpi.rank, mpi.world_size, mpi.local_rank, mpi.port, mpi.serves_store) == (3, 4, 1, 29500, False)
    slurm = from_env.read({"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0", "MASTER_ADDR": "a"})
    assert (slurm.rank, slurm.world_size, slurm.serves_store) == (0, 2, True)
    pod = from_env.read({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"})
    assert pod.local_rank == 0


def test_torchruns_own_store_is_joined_and_its_restarts_do_not_meet():
    given = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    first = from_env.read({**given, "TORCHELASTIC_RESTART_COUNT": "0"})
    again = from_env.read({**given, "TORCHELASTIC_RESTART_COUNT": "1"})
    assert not first.serves_store and first.room != again.room
