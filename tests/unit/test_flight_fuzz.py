"""The reader and the diagnosis under damaged and forged dumps: a dump or `UnreadableDump`, and a verdict from any dump."""

from __future__ import annotations

import json
import pickle

import pytest

from ray_nccl_guard.flight import UnreadableDump, diagnose, load, read_dump, render, sheet
from tests.unit.flight_builders import DATA

hypothesis = pytest.importorskip("hypothesis", reason="hypothesis is not installed")
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

GOOD = [(DATA / name).read_bytes() for name in ("skips/fr_rank_2", "nccl_legacy_hangs/fr_rank_0", "mesh_skips/fr_rank_1")]
SETTINGS = settings(max_examples=500, deadline=None)

words = st.sampled_from(
    ["0", "default_pg", "scheduled", "completed", "nccl:all_reduce", "gloo:barrier", "nccl:send 0->1", ""]
)
leaves = st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats() | words | st.text(max_size=6)
values = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(words, inner, max_size=4), max_leaves=12
)
ranks = st.just("[0, 1, 2]") | values
records = st.fixed_dictionaries(
    {"profiling_name": words | values, "collective_seq_id": st.integers(-2, 6) | values},
    optional={
        "process_group": st.tuples(words, words) | values,
        "state": words | values,
        "retired": st.booleans() | values,
        "is_p2p": st.booleans() | values,
        "frames": values,
        "input_sizes": st.lists(st.lists(st.integers(0, 9), max_size=3), max_size=3) | values,
        "input_dtypes": st.lists(words, max_size=2) | values,
        "output_sizes": values,
        "record_id": st.integers(0, 9) | values,
        "pg_id": values,
    },
)
groups = st.dictionaries(words, st.fixed_dictionaries({"name": words, "desc": words, "ranks": ranks}) | values, max_size=3)
files = st.fixed_dictionaries(
    {"entries": st.lists(records, max_size=8), "version": st.sampled_from(["2.2", "2.10", 2, None])},
    optional={"pg_config": groups | values, "pg_status": values, "rank": values, "nccl_version": values},
)


def outcome(data: bytes) -> object:
    try:
        return read_dump(data, name="fr_1")
    except UnreadableDump as error:
        assert str(error)
        return error


def verdict_over(*sources: bytes) -> None:
    verdict = diagnose(load({f"fr_{rank}": data for rank, data in enumerate(sources)}))
    json.dumps(verdict.to_json())
    assert render.text(verdict, all_groups=True).isascii()
    assert sheet.sheet(verdict)


@SETTINGS
@given(
    st.binary(max_size=200),
    st.sampled_from([b"", b"\x80\x02", b"\x80\x04", b"{", b"[", b"\x80\x02}(X\x07\x00\x00\x00entries]("]),
)
def test_any_bytes_are_read_or_refused(data, start):
    outcome(start + data)


@SETTINGS
@given(
    st.sampled_from(GOOD), st.lists(st.tuples(st.integers(0, 10**6), st.binary(max_size=4), st.integers(0, 4)), max_size=6)
)
def test_a_damaged_dump_is_read_or_refused_and_never_breaks_the_verdict(data, edits):
    damaged = bytearray(data)
    for position, new, cut in edits:
        at = position % len(damaged)
        damaged[at : at + cut] = new
    outcome(bytes(damaged))
    verdict_over(bytes(damaged), data)


@settings(max_examples=100, deadline=None)  # such values take long to make; 2,500 were run once
@given(st.lists(files, min_size=1, max_size=3), st.sampled_from([2, 4]))
def test_a_verdict_comes_from_whatever_plain_values_a_dump_holds(contents, protocol):
    verdict_over(*(pickle.dumps(content, protocol) for content in contents))


@SETTINGS
@given(st.lists(values, max_size=3))
def test_any_json_is_read_or_refused(contents):
    outcome(json.dumps(contents).encode())
    outcome(json.dumps({"entries": contents}).encode())
