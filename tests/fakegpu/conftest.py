"""Fixtures: `double`, the built fake NVIDIA libraries, and `ranks`, a process that forks ranks under it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.register_assert_rewrite("tests.fakegpu.fits")  # or its assertions would fail without a word

from tests.fakegpu.double import CannotBuild, Double, build  # noqa: E402
from tests.fakegpu.fits import Fits  # noqa: E402
from tests.fakegpu.ranks import Ranks  # noqa: E402


@pytest.fixture(scope="session")
def double() -> Double:
    try:
        return build()
    except CannotBuild as reason:
        pytest.skip(f"the double cannot be built: {reason}")


@pytest.fixture(scope="module")
def fits(double: Double, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fits]:
    """One Ray for the tests of a file, which sees four of six GPUs, in an order that is not the cards'."""
    pytest.importorskip("ray", reason="ray is not installed")
    folder = tmp_path_factory.mktemp("fits")
    env = double.env(devices=6, ops=True, state=folder / "cluster")
    (folder / "cluster").mkdir()
    with Fits({**env, "CUDA_VISIBLE_DEVICES": "5,2,0,3"}, folder) as fits:
        yield fits


@pytest.fixture(scope="session")
def shm_folder() -> Iterator[Path]:
    """A folder of our own in shared memory, so that nobody else's files are taken for ours."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="fakegpu-") as name:
        yield Path(name)


@pytest.fixture(scope="session")
def ranks(double: Double, shm_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Ranks that see 8 GPUs of 8 GiB, with a ledger and shared memory of their own."""
    with Ranks(double.env(devices=8, state=tmp_path_factory.mktemp("ledger"), shm=shm_folder)) as server:
        yield server


@pytest.fixture
def shared_memory(shm_folder: Path) -> Iterator[Path]:
    """The folder of the ranks' shared memory: empty at the start, and it must be empty at the end."""
    for path in shm_folder.iterdir():
        path.unlink()
    yield shm_folder
    left = sorted(path.name for path in shm_folder.iterdir())
    assert not left, f"left behind in shared memory: {left}"
