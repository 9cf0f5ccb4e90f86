"""The reader of Flight Recorder dumps: what torch wrote is read in full, and what it did not write is refused, cheaply."""

from __future__ import annotations

import json
import os
import pickle
import struct
import time
import tracemalloc

import pytest

from ray_nccl_guard.flight import Limits, UnreadableDump, load, read_dump
from ray_nccl_guard.flight.dump import GroupKey, State, Vocabulary
from ray_nccl_guard.flight.reader import rank_of_name
from ray_nccl_guard.flight.template import Raw, RecordTemplates
from ray_nccl_guard.flight.unpickle import loads_plain
from tests.unit.flight_builders import DATA, as_torch_writes, dump, record

TORCHS_OWN = DATA / "skips" / "fr_rank_2"
DEFAULT = GroupKey("0", "default_pg")
MIB = 1 << 20


def text(words: str) -> bytes:
    return b"X" + struct.pack("<I", len(words)) + words.encode()


def test_a_dump_that_torch_wrote_is_read_in_full():
    vocabulary = Vocabulary()
    found = read_dump(TORCHS_OWN, vocabulary=vocabulary)
    assert (found.rank, found.version, found.backends, found.records) == (2, "2.10", {"gloo"}, 6)
    line = found.timelines[DEFAULT]
    assert list(line.seqs) == [1, 2, 3, 4, 5, 6]
    calls = [vocabulary.calls[call][0] for call in line.calls]
    assert [call.op for call in calls] == ["all_reduce", "broadcast"] * 3
    assert calls[0].input_sizes == ((16,),) and calls[0].input_dtypes == ("Float",)
    assert "_steps" in [frame.name for frame in vocabulary.stacks[line.stacks[0]]]


def test_gloo_states_are_not_believed():
    assert set(read_dump(TORCHS_OWN).timelines[DEFAULT].states) == {State.UNKNOWN}


@pytest.mark.parametrize("name", ["skips/fr_rank_0", "mesh_skips/fr_rank_3", "nccl_legacy_hangs/fr_rank_1"])
def test_every_way_of_reading_gives_the_same(name):
    data = (DATA / name).read_bytes()
    plain = pickle.loads(data)  # our own file
    ways = [data, pickle.dumps(plain, 2), pickle.dumps(plain, 4), pickle.dumps(plain, 5), json.dumps(plain).encode()]
    vocabulary = Vocabulary()
    first, *others = [read_dump(way, vocabulary=vocabulary, name="fr_3") for way in ways]
    assert all(other == first for other in others)


def test_most_records_of_a_long_dump_are_read_by_template_and_equal_the_slow_way():
    data = (DATA / "skips" / "fr_rank_0").read_bytes()
    shortcut = loads_plain(data, Limits(), RecordTemplates())["entries"]
    assert sum(type(entry) is Raw for entry in shortcut) >= len(shortcut) - 4
    assert loads_plain(data, Limits()) == pickle.loads(data)


def test_the_dumps_that_these_tests_build_are_written_as_torch_writes_them():
    data = TORCHS_OWN.read_bytes()
    assert as_torch_writes(loads_plain(data, Limits())) == data


def test_the_json_that_torch_writes_is_read_too():
    found = read_dump(DATA / "gloo_torch_2.13.json", name="json_2.json")
    assert (found.rank, found.records, found.timelines[DEFAULT].last_requested) == (2, 4, 4)


def test_every_truncation_of_a_dump_is_refused():
    data = TORCHS_OWN.read_bytes()
    for size in range(len(data)):
        with pytest.raises(UnreadableDump):
            read_dump(data[:size])


def test_a_file_of_87_bytes_is_refused_with_a_reason():
    with pytest.raises(UnreadableDump, match="ends in the middle"):
        read_dump(TORCHS_OWN.read_bytes()[:87])


class Calls:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_code_in_a_pickle_is_refused_and_not_run(tmp_path, protocol):
    marker = tmp_path / "made"
    with pytest.raises(UnreadableDump, match="asks to run code"):
        read_dump(pickle.dumps({"entries": [], "version": "2.10", "x": Calls(str(marker))}, protocol))
    assert not marker.exists()


@pytest.mark.parametrize(
    "body",
    [
        b"cos\nsystem\n.", b"Pid\n.", b"K\x01Q.", b"\x82\x01.", b"\x83\x01\x00.", b"\x84\x01\x00\x00\x00.",
        b"(ios\nsystem\n.",
        b"(cos\nsystem\no.", b"}}b.", b"})\x81.", b")R.", text("os") + text("system") + b"\x93.",
    ],
)  # fmt: skip
def test_every_opcode_that_could_build_an_object_is_refused(body):
    with pytest.raises(UnreadableDump, match=r"run code|not part of"):
        read_dump(b"\x80\x02" + body)


BOMBS = {
    "a huge index of a stored value": b"\x80\x02}" + b"r" + struct.pack("<I", 2**31 - 1) + b".",
    "a huge string": b"\x80\x02X" + struct.pack("<I", 2**32 - 1) + b"x.",
    "a huge string of protocol 4": b"\x80\x04\x8d" + struct.pack("<Q", 2**62) + b"x.",
    "huge bytes": b"\x80\x04\x8e" + struct.pack("<Q", 2**62) + b"x.",
    "a huge bytearray": b"\x80\x05\x96" + struct.pack("<Q", 2**62) + b"x.",
    "a huge number": b"\x80\x02\x8b" + struct.pack("<i", 2**31 - 1) + b"x.",
    "a long number": b"\x80\x02\x8a\xff" + b"\x01" * 255 + b".",
    "a number as text": b"\x80\x02I" + b"9" * 100_000 + b"\n.",
    "deep lists": b"\x80\x02" + b"](" * 100_000,
    "deep lists by appending": b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b".",
    "deep pairs": b"\x80\x02K\x01" + b"K\x01\x86" * 100_000 + b".",
    "a pair as a key": b"\x80\x02}(K\x01K\x01\x86Nu.",
    "colliding numbers as keys": b"\x80\x02}("
    + b"".join(b"J" + struct.pack("<i", i << 20) + b"N" for i in range(1000))
    + b"u.",
    "containers without end": b"\x80\x02" + b"]" * 3_000_000,
    "sets": b"\x80\x04" + b"\x8f" * 1000 + b".",
    "duplicates": b"\x80\x02]" + b"2" * 1000 + b".",
    "deep JSON": b"[" * 100_000,
    "a long number in JSON": b'{"entries": [' + b"9" * 100_000 + b"]}",
    "lists in JSON": b"[" + b"[]," * 3_000_000 + b"[]]",
}


@pytest.mark.parametrize("bomb", BOMBS.values(), ids=BOMBS.keys())
def test_a_bomb_is_refused_with_little_memory_and_time(bomb):
    tracemalloc.start()
    start_s = time.process_time()
    with pytest.raises(UnreadableDump):
        read_dump(bomb)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 64 * MIB
    assert time.process_time() - start_s < 20


def test_one_list_put_into_a_million_places_is_converted_once():
    # `sizes` refers to one list of 32 numbers 4,000 times, and 200,000 records refer to `sizes`.
    inner = b"](" + b"K\x02" * 32 + b"eq\x01"
    sizes = b"](" + inner + b"h\x01" * 4000 + b"eq\x02"
    fields = text("profiling_name") + text("nccl:all_gather") + text("collective_seq_id") + b"K\x01"
    one = b"}(" + fields + text("input_sizes") + sizes + b"uq\x03"
    data = b"\x80\x02}(" + text("entries") + b"](" + one + b"h\x03" * 200_000 + b"eu."
    start_s = time.process_time()
    assert read_dump(data, name="fr_0").records == 200_001
    assert time.process_time() - start_s < 20


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "is empty"),
        (b"hello", "neither a pickle"),
        (b"{}", "no list of records"),
        (b'{"entries": 3}', "no list of records"),
        (b'{"entries": [3]}', "not a dict"),
        (b'{"entries": [{}]}', "which operation"),
        (b'{"entries": [{"profiling_name": "gloo:barrier"}]}', "collective_seq_id"),
        (b'{"entries": [], "version": "3.0"}', "not known"),
        (b"\xff\xfe{", "neither a pickle"),
        (pickle.dumps([1, 2]), "no list of records"),
        (pickle.dumps({"entries": [], "x": {1: 2}}), "keys are not strings"),
        (pickle.dumps({"entries": [], "x": b"bytes"}, 4), "not part of"),
    ],
)
def test_what_is_no_dump_is_refused_with_its_reason(data, reason):
    with pytest.raises(UnreadableDump, match=reason):
        read_dump(data)


def test_a_dump_without_records_is_a_dump():
    assert read_dump(dump([]), name="fr_7").rank == 7


def test_a_file_above_the_limit_is_not_read_in_full(tmp_path):
    path = tmp_path / "fr_0"
    with path.open("wb") as file:
        file.truncate(10 * 1024 * MIB)
    tracemalloc.start()
    with pytest.raises(UnreadableDump, match="has more than"):
        read_dump(path, Limits(max_bytes=MIB))
    assert tracemalloc.get_traced_memory()[1] < 8 * MIB
    tracemalloc.stop()


def test_a_named_pipe_does_not_block(tmp_path):
    os.mkfifo(tmp_path / "fr_0")
    with pytest.raises(UnreadableDump, match="regular file"):
        read_dump(tmp_path / "fr_0")


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("nccl_trace_rank_3", 3), ("comm_lib_trace_rank_12", 12), ("fr_0", 0), ("_dump_15", 15), ("json_2.json", 2),
        ("gpu-07.cluster_rank4.pickle", 4), ("rank3_host12", 3), ("gpu-07", 7), ("trace", None), ("Rank-5.pkl", 5),
    ],
)  # fmt: skip
def test_a_rank_is_found_in_a_file_name(name, rank):
    assert rank_of_name(f"/dumps/9/{name}") == rank


def test_the_content_of_a_dump_knows_its_rank_better_than_its_name():
    groups = {("0", "default_pg"): (0, 1, 2, 3), ("1", "tp"): (2, 3), ("3", "dp"): (1, 3)}
    found = read_dump(dump([], groups), name="gpu-07")
    assert found.rank == 3
    assert "rank 7" in found.notes[0]


def test_a_group_made_again_under_its_name_starts_anew():
    found = read_dump(dump([record("all_reduce", seq) for seq in (1, 2, 3, 1, 2)]), name="fr_0")
    assert list(found.timelines[DEFAULT].seqs) == [1, 2]


def test_the_parts_of_a_coalesced_block_are_one_call_with_the_state_of_its_end():
    parts = [record("_all_gather_base", 1, "scheduled"), record("_all_gather_base", 1, "scheduled"), record("coalesced", 1)]
    vocabulary = Vocabulary()
    line = read_dump(dump([*parts, record("barrier", 2)]), vocabulary=vocabulary, name="fr_0").timelines[DEFAULT]
    assert list(line.seqs) == [1, 2]
    assert [signature.op for signature in vocabulary.calls[line.calls[0]]] == [
        "_all_gather_base",
        "_all_gather_base",
        "coalesced",
    ]
    assert line.states[0] == State.COMPLETED


def test_transfers_of_a_block_that_completed_are_not_left_hanging():
    sends = [record("send 0->1", 1, "scheduled", p2p=True), record("recv 0<-1", 1, "scheduled", p2p=True)]
    assert not read_dump(dump([*sends, record("coalesced", 1, p2p=True)]), name="fr_0").transfers
    assert len(read_dump(dump([*sends, record("coalesced", 1, "scheduled", p2p=True)]), name="fr_0").transfers) == 2


def test_load_says_what_it_left_out_and_why(tmp_path):
    for name, data in {
        "fr_rank_0": dump([record("all_reduce", 1)]),
        "copy_rank_0.json": json.dumps({"version": "2.10", "entries": []}).encode(),
        "notes.txt": b"hello",
        "fr_rank_9": dump([]),
        "trace": dump([], {}),
    }.items():
        (tmp_path / name).write_bytes(data)
    dumps = load([tmp_path], world_size=4)
    assert list(dumps.by_rank) == [0]
    assert dumps.missing == (1, 2, 3)
    reasons = {os.path.basename(skipped.source): skipped.reason for skipped in dumps.skipped}
    assert "already read" in reasons["copy_rank_0.json"]
    assert "neither a pickle" in reasons["notes.txt"]
    assert "the job has 4 ranks" in reasons["fr_rank_9"]
    assert "tells the rank" in reasons["trace"]
