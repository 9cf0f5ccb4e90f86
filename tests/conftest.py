"""What every test needs."""

from __future__ import annotations

import os
import signal
import time

import pytest

# torch's store asks a name server for whoever connects. One that drops a query holds it for glibc's 5 s (resolv.conf(5)), past
# the short deadlines of these tests; one second is not. Read by glibc once per process, so before anything is resolved.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:3")

# Whoever starts the tests in the background of a script has SIGINT ignored by the shell, and so has every process under test,
# some of which are sent it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What is `long` is `slow` too."""
    for item in items:
        if item.get_closest_marker("long"):
            item.add_marker(pytest.mark.slow)


@pytest.hookimpl(tryfirst=True)  # before fixtures that start a Ray
def pytest_runtest_setup(item: pytest.Item) -> None:
    """A gate that is cut in the middle says nothing: where a machine is too slow for all of it, the rest is skipped by name."""
    if item.get_closest_marker("slow") and time.time() > float(os.environ.get("SLOW_TESTS_END_AT", "inf")):
        pytest.skip("no time was left: SLOW_TESTS_END_AT")
