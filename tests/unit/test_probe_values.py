"""The values a probe is made of: deadlines, presets, the journal, what is kept of a log."""

from __future__ import annotations

import os

import pytest

from ray_nccl_guard.probe.child import avoid_random_hang, warm_up_sizes
from ray_nccl_guard.probe.journal import Journal, JournalReader, anonymous_file
from ray_nccl_guard.probe.operations import DEFAULT, OPERATIONS, PRESETS, expand
from ray_nccl_guard.probe.record import LINE_BYTES, TAIL_LINES, Record, tail
from ray_nccl_guard.probe.spec import MIB, Outcome, ProbeSpec, RankTask, Step


def test_the_default_deadlines_keep_eight_ranks_below_a_minute():
    spec = ProbeSpec()
    after_device = [Step.STORE, Step.PEERS, Step.COMM_INIT, Step.COLLECTIVE]
    assert sum(spec.deadline_s(step, 8) for step in after_device) < 60
    assert spec.deadline_s(Step.COMM_INIT, 100) == 40


@pytest.mark.parametrize("bad", [{"store_s": 0}, {"collective_s": -1}, {"sizes_bytes": ()}, {"sizes_bytes": (2,)}])
def test_a_spec_refuses_what_makes_no_sense(bad):
    with pytest.raises(ValueError):
        ProbeSpec(**bad)


def test_only_the_first_compilation_gets_more_time():
    task = RankTask(run_id="a", backend="nccl", rank=0, world_size=2, store_host="h", store_port=1, jit_s=300)
    assert task.deadline_s(Step.COMM_INIT) > 300 and task.deadline_s(Step.COLLECTIVE) == ProbeSpec().collective_s


def test_sizes_above_a_mebibyte_are_for_nccl():
    assert warm_up_sizes((4, MIB, 32 * MIB), "gloo") == (4, MIB)
    assert warm_up_sizes((4, MIB, 32 * MIB), "cpu:gloo,cuda:nccl") == (4, MIB, 32 * MIB)
    assert warm_up_sizes((32 * MIB,), "gloo") == (32 * MIB,), "one size is always proved"


def test_collectives_are_presets_and_names_mixed_in_one_order():
    assert expand(None) == ("all_reduce", "broadcast", "all_gather", "barrier", "object_gather")
    assert expand("pp") == ("all_reduce", "broadcast", "send_recv", "barrier")
    assert expand(["send_recv", "ddp"]) == ("all_reduce", "broadcast", "send_recv", "barrier", "object_gather")
    assert {name for preset in PRESETS.values() for name in preset} <= set(OPERATIONS) and set(DEFAULT) <= set(PRESETS)
    with pytest.raises(ValueError, match="all_redcue"):
        expand(["all_redcue"])


@pytest.mark.parametrize(
    "version, set_to",
    [("2.5.1", None), ("2.6.0", "0"), ("2.6.0+cu124", "0"), ("2.7.0", "0"), ("2.7.1", None), ("2.15.0+cu132", None)],
)
def test_the_random_hang_of_torch_2_6_is_avoided_and_only_that(monkeypatch, version, set_to):
    monkeypatch.delenv("TORCH_NCCL_USE_COMM_NONBLOCKING", raising=False)
    avoid_random_hang(version)
    assert os.environ.get("TORCH_NCCL_USE_COMM_NONBLOCKING") == set_to
    monkeypatch.setenv("TORCH_NCCL_USE_COMM_NONBLOCKING", "1")
    avoid_random_hang("2.6.0")
    assert os.environ["TORCH_NCCL_USE_COMM_NONBLOCKING"] == "1", "what the user set stands"


@pytest.fixture
def fd():
    fd = anonymous_file("test")
    yield fd
    os.close(fd)


def test_a_torn_or_foreign_line_in_the_journal_is_passed_over(fd):
    journal, reader = Journal(fd), JournalReader(fd)
    journal.write("device", "start")
    os.write(fd, b"some library wrote this\n\xff\xfe\n[1, 2]\n")
    journal.write("device", "ok", note=1)
    os.write(fd, b'[12.5, "comm_in')
    assert [(e.step, e.event) for e in reader.new_events()] == [("device", "start"), ("device", "ok")]
    os.write(fd, b'it", "start", "", null]\n')
    assert [e.step for e in reader.new_events()] == ["comm_init"]


def test_the_tail_of_a_log_keeps_true_line_numbers_and_cuts_long_lines(fd):
    os.write(fd, b"".join(b"line %d\n" % number for number in range(1, 30001)))
    os.write(fd, b"x" * (3 * LINE_BYTES) + b"\n\xff last")
    kept = tail(fd, "nccl")
    assert len(kept) <= TAIL_LINES and kept[-1].number == 30002
    assert kept[0].text == f"line {kept[0].number}" and max(len(line.text) for line in kept) <= LINE_BYTES


def test_a_record_tells_the_step_a_rank_ended_in():
    record = Record(RankTask(run_id="a", backend="gloo", rank=3, world_size=4, store_host="h", store_port=1))
    record.begin(Step.STORE)
    record.ok(Step.STORE)
    record.begin(Step.COMM_INIT)
    result = record.end(Outcome.TIMED_OUT, error="no end", seconds=1.0)
    assert (result.rank, result.step, [s.step for s in result.steps]) == (3, Step.COMM_INIT, [Step.STORE, Step.COMM_INIT])
