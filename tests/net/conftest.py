"""Skips the whole folder, with the reason in the summary, where namespaces are not permitted."""

from __future__ import annotations

import pytest

from tests.net.netlab import why_not


@pytest.fixture(scope="session")
def lab_works() -> None:
    reason = why_not()
    if reason:
        pytest.skip(f"no fault lab here: {reason}")
