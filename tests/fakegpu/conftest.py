"""Fixtures: `double`, the built fake NVIDIA libraries, and `ranks`, a process that forks ranks under it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakegpu.double import CannotBuild, Double, build
from tests.fakegpu.ranks import Ranks


@pytest.fixture(scope="session")
def double() -> Double:
    try:
        return build()
    except CannotBuild as reason:
        pytest.skip(f"the double cannot be built: {reason}")


@pytest.fixture(scope="session")
def ranks(double: Double, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Ranks that see 8 GPUs of 8 GiB, with a ledger of their own."""
    with Ranks(double.env(devices=8, state=tmp_path_factory.mktemp("ledger"))) as server:
        yield server


@pytest.fixture
def shared_memory() -> Iterator[Path]:
    """The folder of NCCL's shared memory. What a test leaves there must be accounted for by the test, so it is checked."""
    folder = Path("/dev/shm")
    before = set(folder.glob("nccl-*"))
    yield folder
    left = set(folder.glob("nccl-*")) - before
    for path in left:
        path.unlink()
    assert not left, f"left behind in shared memory: {sorted(path.name for path in left)}"
