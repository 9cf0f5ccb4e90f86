"""How dumps and the ends of ranks become one verdict; no Ray and no torch."""

from __future__ import annotations

import zlib
from types import SimpleNamespace

import pytest

from ray_nccl_guard.facts import Gpu, RankFacts
from ray_nccl_guard.flight.dump import Frame
from ray_nccl_guard.policy import Action
from ray_nccl_guard.ray_train import flight_pull, flight_v1
from ray_nccl_guard.ray_train.flight_about import about
from ray_nccl_guard.ray_train.flight_ends import End, How, ended_badly, ends, of_a_collective
from ray_nccl_guard.ray_train.flight_judge import judge, moved
from ray_nccl_guard.ray_train.flight_publish import brief
from ray_nccl_guard.ray_train.flight_pull import Gathered, Pulled
from ray_nccl_guard.report import Report
from ray_nccl_guard.rung import Decision
from tests.unit.flight_builders import dump, record

TIMED_OUT = RuntimeError("[unbound_buffer.cc:78] Timed out waiting 10000ms for recv operation to complete")
GROUP = {("0", "default_pg"): range(3)}


@pytest.mark.parametrize(
    "text",
    [
        'Thread 7 (idle): "MonitoringThread(f)"\n    _monitor_target (/x/ray/thread_runner.py:61)\n'
        'Thread 8 (idle): "TrainingThread(f)"\n    fetch (/app/load.py:31)\n    train (/app/train.py:9)\n'
        "    ThreadRunner.run.<locals>._run_target (/x/ray/thread_runner.py:37)\n",
        'Thread 0x1 (most recent call first):\n  File "/app/load.py", line 31 in fetch\n  File "/app/train.py", line 9 in train\n'
        '  File "/x/ray/thread_runner.py", line 37 in _run_target\n\nThread 0x2 (most recent call first):\n  File "/q.py", line 1 in get\n',
        'Thread 8 (idle): "Thread-9"\n    fetch (/app/load.py:31)\n    train (/app/train.py:9)\n'
        "    RunnerThread.run (/x/ray/air/_internal/util.py:98)\n",
    ],
    ids=["py-spy", "faulthandler", "Train V1"],
)
def test_the_thread_of_train_func_is_found_in_printed_stacks(text):
    frames = flight_pull.place_in(text)
    assert frames[:2] == (Frame("/app/load.py", 31, "fetch"), Frame("/app/train.py", 9, "train"))


def test_an_error_of_a_collective_is_told_from_the_programs_own():
    assert of_a_collective(TIMED_OUT)
    assert of_a_collective(RuntimeError("[pair.cc:534] Connection closed by peer [127.0.0.1]:4"))
    assert not of_a_collective(ValueError("a label out of range"))


def calls_made(count: int, waits: bool, op: str = "all_reduce") -> bytes:
    states = ["completed"] * (count - waits) + ["started"] * waits
    return zlib.compress(dump([record(op, number, state) for number, state in enumerate(states, 1)], GROUP))


def gathered(calls: dict[int, int], **changes) -> Gathered:
    """Ranks with as many all_reduce calls on record; those with the most wait in the last one."""
    most = max(calls.values())
    answered = {rank: Pulled(dumps={"nccl": calls_made(count, count == most)}) for rank, count in calls.items()}
    return Gathered(answered=answered, **changes)


def statuses(**errors):
    return {int(name[1:]): SimpleNamespace(error=error) for name, error in errors.items()}


def test_the_place_of_a_rank_that_stays_away_stands_in_the_message():
    had = gathered({0: 5, 1: 4, 2: 5})
    place = (Frame("/x/lib/python3.11/queue.py", 7, "get"), Frame("/app/load.py", 31, "fetch"))
    had.answered[1] = Pulled(dumps=had.answered[1].dumps, place=place)
    collected = judge(had, ends(3, had, statuses(r0=TIMED_OUT, r2=TIMED_OUT)), 3)
    assert collected.verdict.culprit_ranks == (1,)
    assert "still in train_func at /app/load.py:31 in fetch" in collected.text()
    assert collected.to_json()["ranks_ended"][1]["place"] == "/app/load.py:31 in fetch"


def test_a_rank_that_raised_by_itself_is_the_programs_fault():
    had = gathered({0: 5, 1: 4, 2: 5})
    collected = judge(had, ends(3, had, statuses(r0=TIMED_OUT, r1=ValueError("bad"))), 3)
    assert collected.failure.value == "user_code_not_infra" and collected.verdict.summary.startswith(
        "rank 1 raised ValueError: bad"
    )


def test_an_own_error_elsewhere_speaks_against_the_verdict():
    had = gathered({0: 5, 1: 4, 2: 5})
    collected = judge(had, ends(3, had, statuses(r2=ValueError("bad"))), 3)
    assert collected.verdict.culprit_ranks == (1,) and any("rank 2 raised" in line for line in collected.verdict.against)


def test_the_file_of_a_dead_rank_counts_with_the_dumps_of_the_living():
    had = gathered({0: 5, 1: 5})
    left = {2: Pulled(dumps={"file": calls_made(4, waits=False)})}
    had = Gathered(answered=had.answered, left=left, died={2: "the process was killed"})
    collected = judge(had, ends(3, had, {}), 3)
    assert collected.verdict.culprit_ranks == (2,) and collected.verdict.missing_dumps == ()
    assert collected.ends[2].how is How.DIED and "has died: the process was killed" in " ".join(collected.verdict.because)


def test_of_two_recorders_the_one_with_a_finding_speaks():
    had = gathered({0: 5})
    for rank, count in {0: 3, 1: 2, 2: 3}.items():
        dumps = {"nccl": calls_made(5, waits=False), "gloo": calls_made(count, count == 3, "barrier")}
        had.answered[rank] = Pulled(dumps=dumps)
    collected = judge(had, ends(3, had, {}), 3)
    assert (collected.recorder, collected.verdict.culprit_ranks) == ("gloo", (1,))


def test_without_any_dump_nothing_is_claimed():
    had = Gathered(answered={}, silent=(0, 1, 2))
    collected = judge(had, ends(3, had, {}), 3)
    assert collected.verdict.culprit_ranks == () and collected.verdict.missing_dumps == (0, 1, 2)


def test_what_an_error_ends_in_is_short_enough_for_ray_to_show_and_the_same_on_every_rank():
    had = gathered({0: 5, 1: 4, 2: 5})
    place = (Frame(f"/home/somebody/{'projects/' * 20}load.py", 31, "fetch"),)
    had.answered[1] = Pulled(dumps=had.answered[1].dumps, place=place)
    collected = judge(had, ends(3, had, statuses(r0=TIMED_OUT)), 3)
    words = brief(collected, with_path(f"/mnt/{'storage/' * 40}exp7/nccl_guard/report.json"))
    assert len(words) <= 340 and words.startswith("nccl_guard: missing_rank: rank 1 never asked for all_reduce")
    assert "load.py:31 in fetch\n" in words and words.endswith("exp7/nccl_guard/report.json")


def test_where_no_rank_is_out_of_step_errors_stay_as_they_are():
    had = gathered({0: 5, 1: 5, 2: 5})
    for rank in range(3):
        had.answered[rank] = Pulled(dumps={"nccl": calls_made(5, waits=False)})
    assert brief(judge(had, ends(3, had, {}), 3), with_path("/r.json")) == ""


def with_path(path: str) -> Report:
    return Report(world_size=3, backend_wanted="gloo", decision=Decision(action=Action.PROCEED, backend="gloo"), path=path)


def test_a_run_moves_if_any_rank_makes_a_call():
    before, after = (judge(gathered(calls), {}, 3) for calls in ({0: 5, 1: 5, 2: 5}, {0: 5, 1: 7, 2: 6}))
    assert moved(before, after) == {1: 2, 2: 1} and moved(before, before) == {}


@pytest.mark.parametrize(
    ("errors", "badly"),
    [
        ({}, False),
        ({"r0": TIMED_OUT}, True),
        ({"r1": ValueError("bad")}, True),  # the others may wait for it
        ({f"r{rank}": ValueError("bad") for rank in range(3)}, False),
        ({f"r{rank}": TIMED_OUT for rank in range(3)}, True),
    ],
)
def test_a_group_ended_badly_if_somebody_may_have_been_left_waiting(errors, badly):
    of = {rank: SimpleNamespace(error=None) for rank in range(3)} | statuses(**errors)
    status = SimpleNamespace(worker_statuses=of, errors={rank: each.error for rank, each in of.items() if each.error})
    assert ended_badly(status, SimpleNamespace()) is badly


class OfARank(Exception):
    """As Ray's StartTracebackWithWorkerRank."""

    worker_rank = 1


class TaskError(Exception):
    """As Ray's RayTaskError: its text is the worker's traceback, `cause` the exception there."""

    cause = TIMED_OUT


def test_train_v1_tells_the_error_that_it_handles_when_it_ends_a_group():
    assert flight_v1.status_now(3) is None, "it handles none: the run has ended well"
    try:
        raise OfARank from TaskError('  File "/app/train.py", line 9, in train_func')
    except OfARank:
        status = flight_v1.status_now(3)
    assert ended_badly(status, SimpleNamespace())
    found = ends(3, Gathered(answered={0: Pulled(), 1: Pulled()}, silent=(2,)), status.worker_statuses)
    assert (found[1].how, found[1].own, found[1].place) == (How.RAISED, False, "/app/train.py:9 in train_func")
    assert (found[0].how, found[2].how) == (How.ENDED, How.SILENT)


def test_a_worker_of_train_v1_that_died_is_no_error_of_a_rank_and_is_looked_into():
    try:
        raise OSError("The actor died unexpectedly before finishing this task")
    except OSError:
        assert ended_badly(flight_v1.status_now(2), SimpleNamespace())


def test_the_look_before_train_v1_ends_a_group_never_keeps_it_from_ending():
    class Watch:
        def end(self, status):
            raise RuntimeError("a bug of the guard")

    class Group:
        def __len__(self):
            return 2

        def shutdown(self, patience_s=5):
            self.ended = patience_s

    group = Group()
    flight_v1.attach(group, Watch())
    group.shutdown(patience_s=0)
    assert group.ended == 0


def test_the_record_of_a_run_names_its_devices_versions_and_earlier_errors():
    gpu = Gpu(uuid="GPU-7", name="NVIDIA H100")
    facts = (
        RankFacts(rank=0, host="a", pid=11, torch_version="2.15.0", gpu=gpu, device_index=0, gpu_ids=("0",)),
        RankFacts(rank=1, host="b", pid=12, torch_version="2.15.0"),
    )
    report = with_path("/s/nccl_guard/report.json").with_changes(facts=facts, run_name="exp7")
    ended = {0: End(how=How.RAISED, what="ValueError: bad", place="t.py:3 in f"), 1: End(how=How.RUNNING)}
    known = about(report, 2, ended)
    assert known.devices == ("rank 0: NVIDIA H100 GPU-7, pid 11 on a", "rank 1: no GPU, pid 12 on b")
    assert (
        known.identifiers[0] == "run exp7, worker group 2, trains on gloo" and "torch 2.15.0 (ranks 0-1)" in known.versions
    )
    assert known.earlier == ("rank 0 raised ValueError: bad, at t.py:3 in f",)
