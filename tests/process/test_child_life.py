"""A probe's child beside its launcher: it ends with it, leaves nothing behind, and what is said of its end is kept."""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ray_nccl_guard.classes import FailureClass
from ray_nccl_guard.evidence import align
from ray_nccl_guard.probe.process import state_of
from ray_nccl_guard.probe.spec import Outcome, ProbeSpec
from ray_nccl_guard.verdict import classify
from tests.process.ranks import children_of, in_child, run_ranks

pytest.importorskip("torch", reason="torch is not installed")
pytestmark = pytest.mark.torch_versions


def test_a_childs_output_is_evidence_and_reaches_nobodys_terminal(capfd):
    def shout() -> None:
        os.write(2, b"a line of the dying child\n")
        os.abort()

    results = run_ranks(2, before=lambda rank: in_child(rank, 1, "all_reduce", shout))
    assert any("a line of the dying child" in line.text for line in results[1].lines)
    assert "dying child" not in "".join(capfd.readouterr())


@contextlib.contextmanager
def launcher_of_a_child_that(call: str, hangs: Callable[[], None]) -> Iterator[int]:
    """The launcher's PID, in a world of one whose child hangs in `call`, made by a process that ends with the block."""
    pid = os.fork()
    if pid == 0:
        spec = ProbeSpec(comm_init_s=60, collective_s=60)
        try:
            run_ranks(1, before=lambda rank: in_child(rank, 0, call, hangs), spec=spec)
        finally:
            os._exit(0)
    try:
        yield _wait_for(lambda: children_of(pid))
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_the_child_dies_with_its_launcher():
    with launcher_of_a_child_that("all_reduce", lambda: time.sleep(3600)) as launcher:
        child = _wait_for(lambda: children_of(launcher))
        time.sleep(0.5)
        os.kill(launcher, signal.SIGKILL)
        end_s = time.monotonic() + 5
        while os.path.exists(f"/proc/{child}") and state_of(child) != "Z":
            assert time.monotonic() < end_s, "the child outlived its launcher"
            time.sleep(0.02)


def test_shared_memory_of_a_hung_communicator_goes_with_its_launcher():
    path = Path(f"/dev/shm/nccl-test{os.getpid()}")

    def hang() -> None:
        with open(path, "w+b") as file:
            file.truncate(4096)
            held = mmap.mmap(file.fileno(), 4096)
        time.sleep(3600)
        held.close()

    try:
        with launcher_of_a_child_that("init_process_group", hang) as launcher:
            _wait_for(lambda: children_of(launcher) if path.exists() else set())
            time.sleep(4)  # past the launcher's first look
            os.kill(launcher, signal.SIGKILL)
            end_s = time.monotonic() + 5
            while path.exists():
                assert time.monotonic() < end_s, "its file is left"
                time.sleep(0.02)
    finally:
        path.unlink(missing_ok=True)


def test_a_probe_leaves_no_descriptor_and_no_process_behind():
    run_ranks(1)
    before = set(os.listdir("/proc/self/fd"))
    run_ranks(2)
    assert len(set(os.listdir("/proc/self/fd"))) <= len(before)
    assert children_of(os.getpid()) == set()


def _wait_for(find) -> int:
    end_s = time.monotonic() + 20
    while time.monotonic() < end_s:
        found = find()
        if found:
            return min(found)
        time.sleep(0.02)
    raise AssertionError("it did not appear within 20 s")


def test_what_the_kernel_says_of_a_death_is_evidence():
    message = "NVRM: Xid (PCI:0000:17:00): 79, pid=1, GPU has fallen off the bus (a test of ray_nccl_guard)"

    def report_and_die() -> None:
        with open("/dev/kmsg", "w") as log:
            log.write(message + "\n")  # without it the record stays open for more, and no reader sees it
        os.abort()

    if not os.access("/dev/kmsg", os.W_OK | os.R_OK):
        pytest.skip("/dev/kmsg cannot be written here")
    results = run_ranks(2, before=lambda rank: in_child(rank, 1, "all_reduce", report_and_die))
    assert any("Xid" in line for line in results[1].kernel_lines), results[1].kernel_lines
    verdict = classify(align(results, world_size=2, backend="gloo"))
    assert verdict.failure is FailureClass.HARDWARE_XID_ECC


def test_a_launcher_survives_a_handler_that_reaps_its_child():
    def reap_everything(rank: int) -> None:
        def handler(*_: object) -> None:
            try:
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            except ChildProcessError:
                pass

        signal.signal(signal.SIGCHLD, handler)

    results = run_ranks(2, before=reap_everything)
    assert all(r.outcome is not Outcome.TIMED_OUT for r in results), "it must notice that the child is gone"
