"""The probe with real children and real gloo: what fails is named on the rank and in the step where it failed."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from dataclasses import replace
from functools import partial

import pytest

from ray_nccl_guard.classes import FailureClass
from ray_nccl_guard.evidence import align
from ray_nccl_guard.probe import store
from ray_nccl_guard.probe.spec import Outcome, ProbeResult, ProbeSpec, Start, Step
from ray_nccl_guard.verdict import Certainty, classify
from tests.process.ranks import QUICK, in_child, run_ranks

torch = pytest.importorskip("torch", reason="torch is not installed")
pytestmark = pytest.mark.torch_versions


def verdict_of(results: list[ProbeResult]):
    return classify(align(results, world_size=len(results), backend="gloo"))


def hang_with_the_gil() -> None:
    ctypes.PyDLL(None).pause()


def stop_myself() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_a_healthy_world_proves_every_declared_collective(world_size):
    results = run_ranks(world_size, collectives=("broadcast", "all_gather", "barrier", "object_gather"))
    assert [r.outcome for r in results] == [Outcome.OK] * world_size
    assert all(r.proved == ("all_reduce", "broadcast", "all_gather", "barrier", "object_gather") for r in results)
    assert all(set(r.all_reduce_s) == {4, 1 << 20} for r in results), "gloo is not asked for sizes above 1 MiB"
    assert verdict_of(results).failure is FailureClass.OK


def test_every_operation_a_job_may_declare_passes_on_gloo():
    from ray_nccl_guard.probe.operations import OPERATIONS

    results = run_ranks(2, collectives=OPERATIONS)
    assert [r.outcome for r in results] == [Outcome.OK] * 2, [r.error for r in results]
    assert set(results[0].proved) == set(OPERATIONS)


def test_a_raised_error_is_quoted_and_cuts_the_others_wait_short():
    def fail() -> None:
        raise RuntimeError("NCCL WARN Cuda failure 700 'an illegal memory access was encountered'")

    started_s = time.monotonic()
    results = run_ranks(3, before=lambda rank: in_child(rank, 1, "all_reduce", fail))
    assert time.monotonic() - started_s < QUICK.collective_s, "the others were not cut short"
    # Within their grace the others may meet the closed connection themselves: an echo, not a cause.
    assert all(r.outcome in (Outcome.WAITING, Outcome.FAILED) for r in results) and results[1].outcome is Outcome.FAILED
    assert results[1].step is Step.COLLECTIVE and "illegal memory access" in results[1].error
    verdict = verdict_of(results)
    assert verdict.culprit_ranks == (1,) and verdict.failure is FailureClass.ILLEGAL_MEMORY_ACCESS


@pytest.mark.parametrize("number", [signal.SIGABRT, signal.SIGSEGV, signal.SIGKILL])
@pytest.mark.parametrize("step, call", [(Step.COMM_INIT, "init_process_group"), (Step.COLLECTIVE, "all_reduce")])
def test_the_journal_tells_the_step_in_which_a_signal_struck(number, step, call):
    results = run_ranks(2, before=lambda rank: in_child(rank, 1, call, lambda: os.kill(os.getpid(), number)))
    assert results[1].outcome is Outcome.DIED and results[1].step is step
    assert results[1].signal == number and not results[1].killed_by_guard
    assert verdict_of(results).culprit_ranks == (1,)


@pytest.mark.parametrize("fault, state", [(hang_with_the_gil, "S"), (stop_myself, "T")])
def test_a_child_that_runs_no_python_any_more_is_told_from_those_that_wait_for_it(fault, state):
    results = run_ranks(3, before=lambda rank: in_child(rank, 2, "all_reduce", fault))
    silent = [r.silent_s for r in results]
    assert silent[2] > 2 and max(silent[:2]) < 2, silent
    assert results[2].process_state == state
    assert verdict_of(results).culprit_ranks == (2,)


def test_a_hang_that_nothing_explains_is_never_called_established():
    def hang() -> None:
        time.sleep(3600)

    results = run_ranks(2, before=lambda rank: in_child(rank, 0, "init_process_group", hang))
    verdict = verdict_of(results)
    assert verdict.failure is FailureClass.INIT_TIMEOUT_HANG and verdict.certainty is not Certainty.ESTABLISHED
    assert verdict.step is Step.COMM_INIT


def test_what_the_budget_has_left_ends_a_rank_long_before_its_steps_deadline():
    def hang() -> None:
        time.sleep(3600)

    spec = ProbeSpec(comm_init_s=50, collective_s=50, import_s=50)
    # Both hang: one that waits for the other in gloo would hear its connection close, and fail for that.
    results = run_ranks(2, before=lambda rank: in_child(rank, rank, "all_reduce", hang), spec=spec, within_s=4.0)
    assert [r.outcome for r in results] == [Outcome.TIMED_OUT] * 2
    assert all(r.step is Step.COLLECTIVE and "that Policy.budget_s had left" in r.error for r in results), results
    assert all(4 < r.seconds < 12 for r in results)


def test_wrong_numbers_without_an_error_are_found():
    def spoil(rank: int) -> None:
        if rank != 1:
            return
        import torch.distributed as dist

        original = dist.all_reduce

        def wrong(tensor, *args, **kwargs):
            work = original(tensor, *args, **kwargs)
            tensor[-1] += 1
            return work

        dist.all_reduce = wrong

    results = run_ranks(2, before=spoil)
    assert results[1].outcome is Outcome.FAILED and "wrong result" in results[1].error
    assert verdict_of(results).failure is FailureClass.WRONG_RESULT_CORRUPTION


def test_a_rank_that_never_comes_is_named_by_the_others():
    results = run_ranks(3, spec=ProbeSpec(store_s=1.5), absent=(1,))
    assert all("missing rank: 1 of 3" in r.error for r in results)
    verdict = classify(align(results, world_size=3, backend="gloo"))
    assert verdict.failure is FailureClass.MISSING_RANK and verdict.culprit_ranks == (1,)


def test_a_slow_step_on_one_rank_is_no_missing_rank_on_another():
    # Rank 1 needs longer for its device step than rank 0 has for its communicator: rank 0's clock must not run yet.
    spec = ProbeSpec(comm_init_s=1.5, comm_init_per_rank_s=0, device_s=20)

    def slow(rank: int) -> None:
        if rank == 1:
            from ray_nccl_guard.probe import child  # the child's own module: the pause is put into torch's call below

            del child
            original = torch.set_num_threads
            torch.set_num_threads = lambda n: (time.sleep(4), original(n))[1]

    results = run_ranks(2, spec=spec, before=slow)
    assert [r.outcome for r in results] == [Outcome.OK, Outcome.OK], [r.error for r in results]


def test_a_rank_that_has_lost_the_store_waits_no_longer_than_its_own_step_may_take():
    """Rank 1 is ready for the collectives and hangs there; that rank 0 never is, the store can no longer tell it."""

    def before(rank: int) -> None:
        if rank == 0:
            form = partial(torch.distributed.init_process_group)
            torch.distributed.init_process_group = lambda *a, **k: (form(*a, **k), time.sleep(3600))
            threading.Timer(4.0, store.close_store).start()
        else:
            in_child(rank, 1, "all_reduce", lambda: time.sleep(3600))

    started_s = time.monotonic()
    results = run_ranks(2, before=before, spec=replace(QUICK, collective_s=8))
    assert [r.outcome for r in results] == [Outcome.TIMED_OUT] * 2
    assert results[1].step is Step.COLLECTIVE and "store was lost" in results[1].error, results[1].error
    assert time.monotonic() - started_s < 30


def test_a_spawned_child_proves_the_same():
    results = run_ranks(2, spec=ProbeSpec(start=Start.SPAWN), collectives=("broadcast",))
    assert [(r.outcome, r.start) for r in results] == [(Outcome.OK, Start.SPAWN)] * 2, [r.error for r in results]


def test_what_a_fork_meets_before_nccl_is_repeated_by_spawn():
    # A fault in the forked child's import step only: a fresh process does not have it, and that is the verdict.
    def only_in_forks(rank: int) -> None:
        if rank == 0:
            torch.set_num_threads = lambda n: os.abort()

    results = run_ranks(2, before=only_in_forks)
    assert [r.outcome for r in results] == [Outcome.OK, Outcome.OK], [r.error for r in results]
    assert [r.start for r in results] == [Start.SPAWN, Start.FORK]


def test_what_a_fork_met_stands_where_a_fresh_process_comes_too_late_to_confirm_it(tmp_path, monkeypatch):
    # No GPU on either rank; rank 1's fresh process is slow to start, and rank 0's ends its wait.
    (tmp_path / "sitecustomize.py").write_text("import time; time.sleep(20)")

    def slow_fresh_process(rank: int) -> None:
        if rank == 1:
            monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    results = run_ranks(2, backend="nccl", before=slow_fresh_process, device_index=0)
    assert [(r.outcome, r.step) for r in results] == [(Outcome.FAILED, Step.DEVICE)] * 2, [r.error for r in results]
    assert [r.start for r in results] == [Start.SPAWN, Start.FORK]
    assert "a fresh one had not come that far" in results[1].detail


def test_settings_reach_the_child_before_its_first_call():
    seen = {}

    def look(rank: int) -> None:
        def check() -> None:
            if os.environ.get("NCCL_P2P_DISABLE") != "1" or "NCCL_ALGO" in os.environ:
                raise RuntimeError("settings are not there")

        os.environ["NCCL_ALGO"] = "Ring"
        in_child(rank, rank, "init_process_group", check)

    results = run_ranks(2, before=look, env={"NCCL_P2P_DISABLE": "1"}, unset_env=("NCCL_ALGO",))
    assert [r.outcome for r in results] == [Outcome.OK] * 2, [r.error for r in results]
    assert seen == {} and "NCCL_P2P_DISABLE" not in os.environ


def test_a_slow_start_that_still_logs_gets_its_deadline_doubled_once_and_says_so():
    # Longer than comm_init's deadline and shorter than twice that, with a line every half second.
    def chatty() -> None:
        for number in range(8):
            os.write(2, b"still connecting, try %d\n" % number)
            time.sleep(0.5)

    spec = ProbeSpec(comm_init_s=2.5, comm_init_per_rank_s=0)
    results = run_ranks(2, spec=spec, before=lambda rank: in_child(rank, rank, "init_process_group", chatty))
    assert [r.outcome for r in results] == [Outcome.OK] * 2, [r.error for r in results]
    slow = next(s for s in results[0].steps if s.step is Step.COMM_INIT)
    assert slow.seconds > spec.comm_init_s and "doubled" in slow.detail
