"""`probe --address` on a real Ray cluster: what it says at once where Ray would wait for ever, and that all is given back."""

from __future__ import annotations

import http.server
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.ray.conftest import ROOT, everything_is_back, ray

LIMIT_S = 150.0


def command(address: str, *words: str, workers: int = 2, gpus: float = 0) -> list[str]:
    own = [f"--address={address}", f"--num-workers={workers}", f"--gpus-per-worker={gpus}"]
    return [sys.executable, "-m", "ray_nccl_guard", "probe", *own, *words]


def environment() -> dict[str, str]:
    return {**os.environ, "RAY_AUTH_MODE": "disabled", "PYTHONPATH": ROOT}


def probe(address: str, *words: str, **how: float) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(address, *words, **how), env=environment(), capture_output=True, text=True, timeout=LIMIT_S, check=False
    )


@pytest.fixture
def address(cluster) -> str:
    return str(cluster.get_runtime_context().gcs_address)


def test_plain_actors_prove_gloo_and_everything_is_given_back(address):
    done = probe(address, "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["action"] == "proceed" and report["world_size"] == 2 and report["backend_chosen"] == "gloo"
    assert [rank["local_rank"] for rank in report["ranks"]] == [0, 1]
    everything_is_back()


def test_settings_of_the_command_reach_the_workers(address):
    done = subprocess.run(
        command(address, "--json"), env={**environment(), "GLOO_SOCKET_IFNAME": "no-such"}, capture_output=True, text=True,
        timeout=LIMIT_S, check=False,
    )  # fmt: skip
    report = json.loads(done.stdout)
    assert done.returncode == 20 and report["verdict"]["failure"] == "gloo_network", report["verdict"]
    assert "no-such" in report["verdict"]["summary"]


@pytest.mark.parametrize("workers, gpus", [(64, 0), (2, 1)])
def test_more_workers_than_the_cluster_has_is_said_at_once(address, workers, gpus):
    started_s = time.monotonic()
    done = probe(address, workers=workers, gpus=gpus)
    assert done.returncode == 2 and "the cluster has room for" in done.stderr, done.stderr
    assert "placing" not in done.stderr and time.monotonic() - started_s < LIMIT_S / 2


def test_a_busy_cluster_is_said_at_once(address):
    holder = ray.remote(num_cpus=3)(Holder).remote()
    ray.get(holder.held.remote(), timeout=60)
    try:
        done = probe(address)
    finally:
        ray.kill(holder)
    assert done.returncode == 2 and "do not fit beside what runs on the cluster now: free are 1 CPU" in done.stderr
    everything_is_back()


class Holder:
    def held(self) -> bool:
        return True


@pytest.mark.parametrize("where", ["ray://127.0.0.1:10001", "head", "127.0.0.1:port"])
def test_an_address_of_another_form_is_wrong_usage(where):
    done = probe(where)
    assert done.returncode == 2 and "HOST:PORT" in done.stderr


def test_a_port_where_nobody_listens_and_one_that_is_not_ray_are_told_apart_at_once():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        done = probe(f"127.0.0.1:{free.getsockname()[1]}")
    assert done.returncode == 2 and "refuses" in done.stderr
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        done = probe(f"127.0.0.1:{server.server_port}")
    finally:
        server.shutdown()
        server.server_close()
    assert done.returncode == 2 and "is not Ray" in done.stderr


def start(address: str) -> subprocess.Popen[str]:
    """A probe whose workers have begun to import torch."""
    process = subprocess.Popen(
        command(address, "--json"), env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    for line in process.stderr:
        if "importing torch in the workers" in line:
            return process
    process.kill()
    raise AssertionError("the probe ended before its workers were placed")


def rank_processes() -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            # In a call; one that dies while it is made is made again by Ray, and nothing is lost.
            if path.read_bytes().startswith(b"ray::_Rank.run"):
                found.append(int(path.parent.name))
        except OSError:
            continue  # it ended while we looked
    return found


def test_a_worker_that_is_lost_is_a_verdict_and_no_hang(address):
    process = start(address)
    try:
        end_s = time.monotonic() + 60
        while not (ranks := rank_processes()):
            assert time.monotonic() < end_s, "no worker came up"
            time.sleep(0.02)
        os.kill(ranks[0], signal.SIGKILL)
        out, err = process.communicate(timeout=LIMIT_S)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 20, (out, err)
    report = json.loads(out)
    assert report["action"] == "refuse" and report["verdict"]["failure"] in ("process_crashed", "missing_rank")
    everything_is_back()


@pytest.mark.parametrize("how, code", [pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow), (signal.SIGKILL, -9)])
def test_a_probe_that_is_ended_gives_the_cluster_back(address, how, code):
    process = start(address)
    process.send_signal(how)
    try:
        assert process.wait(timeout=60) == code
    finally:
        process.kill()
        process.communicate()
    everything_is_back(within_s=60)
