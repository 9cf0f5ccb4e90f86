"""The reader under damaged and forged files: its own errors only, whatever the bytes."""

from __future__ import annotations

import struct

import pytest

from ray_nccl_guard.compat.errors import CompatError
from ray_nccl_guard.compat.fatbin import Images, scan
from tests.unit.compat_files import container, elf, entry, version_string

hypothesis = pytest.importorskip("hypothesis", reason="hypothesis is not installed")
from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

GOOD = elf(
    {
        ".rodata": version_string("2.30.7", "13.3"),
        ".nv_fatbin": container("sm_80 sm_90 sm_100f") + container("sm_80 sm_90"),
        "__nv_relfatbin": container("sm_80 sm_90 compute_90"),
    },
    needed=["libc.so.6"],
    runpath="/a:/b",
    soname="libnccl.so.2",
)
(SHOFF,) = struct.unpack_from("<Q", GOOD, 0x28)
# Where damage hurts: the headers of the file, of its segments and sections, and of every container.
HEADERS = [
    *range(176),
    *range(SHOFF, len(GOOD)),
    *(i + j for i in range(len(GOOD)) if GOOD[i : i + 2] == b"\x50\xed" for j in range(80)),
]
SETTINGS = settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def outcome(tmp_path, data: bytes) -> Images | CompatError:
    path = tmp_path / "lib.so"
    path.write_bytes(data)
    try:
        return scan(str(path))
    except CompatError as error:
        return error


@SETTINGS
@given(
    changes=st.lists(st.tuples(st.sampled_from(HEADERS), st.integers(0, 255)), min_size=1, max_size=6),
    cut=st.integers(0, 40),
)
def test_flipped_header_bytes_give_an_answer_or_our_own_error(tmp_path, changes, cut):
    data = bytearray(GOOD)
    for at, byte in changes:
        data[at] = byte
    outcome(tmp_path, bytes(data[: len(data) - cut]))


@SETTINGS
@given(
    at=st.integers(0, len(GOOD) - 8),
    value=st.one_of(st.integers(0, 2**64 - 1), st.sampled_from([2**63, 2**64 - 1, 2**32, 0])),
)
def test_forged_sizes_and_offsets_give_an_answer_or_our_own_error(tmp_path, at, value):
    data = bytearray(GOOD)
    struct.pack_into("<Q", data, at, value)
    outcome(tmp_path, bytes(data))


@SETTINGS
@given(tail=st.binary(max_size=300))
def test_rubbish_behind_a_good_start_gives_an_answer_or_our_own_error(tmp_path, tail):
    outcome(tmp_path, GOOD[:64] + tail)
    outcome(tmp_path, elf({".nv_fatbin": container("sm_90") + tail}))
    outcome(tmp_path, elf({".nv_fatbin": container([entry("sm_90"), tail])}))


@SETTINGS
@given(data=st.data())
def test_damage_to_a_container_never_adds_an_architecture_silently_while_another_is_lost(tmp_path, data):
    """A magic that is hit makes the file unreadable: a container lost must not turn into a smaller, better answer."""
    starts = [i for i in range(len(GOOD) - 4) if GOOD[i : i + 4] == struct.pack("<I", 0xBA55ED50)]
    at = data.draw(st.sampled_from(starts)) + data.draw(st.integers(0, 3))
    byte = data.draw(st.integers(0, 255).filter(lambda b: b != GOOD[at]))
    damaged = GOOD[:at] + bytes([byte]) + GOOD[at + 1 :]
    assert isinstance(outcome(tmp_path, damaged), CompatError)
