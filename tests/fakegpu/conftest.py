"""The `double` fixture: the built fake NVIDIA libraries, or a skip that says why they cannot be built here."""

from __future__ import annotations

import pytest

from tests.fakegpu.double import CannotBuild, Double, build


@pytest.fixture(scope="session")
def double() -> Double:
    try:
        return build()
    except CannotBuild as reason:
        pytest.skip(f"the double cannot be built: {reason}")
