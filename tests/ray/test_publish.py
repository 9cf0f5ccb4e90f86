"""The word gets out: files under the run's storage, Ray's metrics endpoint, Ray's structured log; and what storage may do wrong."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import threading
import time
import urllib.request
from pathlib import Path

import pytest
import ray
from fsspec.implementations.local import LocalFileSystem as FsspecLocal
from pyarrow import fs

from ray_nccl_guard import GuardedTorchConfig, Policy, ProbeSpec
from ray_nccl_guard.ray_train import storage
from tests.ray.conftest import Fit

# Several fits on clusters of their own: part of .ci/run, not of make test.
pytestmark = pytest.mark.slow

QUICK = ProbeSpec(store_s=5, comm_init_s=5, comm_init_per_rank_s=0, collective_s=5)
FALLS_BACK = {"policy": Policy.fallback(), "probe": QUICK}
LOCAL = fs.LocalFileSystem()
FALLBACKS = "ray_nccl_guard_fallbacks_total"  # Prometheus' suffix for counters, which Ray adds (2.60)


def guarded(**options) -> GuardedTorchConfig:
    return GuardedTorchConfig(backend="nccl", **{**FALLS_BACK, **options})


def wait_for_file(config) -> None:
    """A train_func that goes on until the test has looked."""
    end_s = time.monotonic() + 120
    while not os.path.exists(config["until"]) and time.monotonic() < end_s:
        time.sleep(0.1)


def scrape() -> str:
    node = ray.nodes()[0]
    url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    with urllib.request.urlopen(url, timeout=10) as answer:
        return answer.read().decode()


def series(text: str, name: str, **tags: str) -> list[float]:
    """The values of a metric's series that carry `tags`."""
    lines = [line for line in text.splitlines() if line.startswith(name + "{")]
    return [float(line.rsplit(" ", 1)[1]) for line in lines if all(f'{k}="{v}"' in line for k, v in tags.items())]


def test_a_run_on_gloo_is_seen_on_the_metrics_endpoint_in_the_log_and_in_the_runs_storage(fit, tmp_path):
    until, seen = tmp_path / "seen", []

    def watch() -> None:
        end_s = time.monotonic() + 130
        while time.monotonic() < end_s and not seen:
            try:
                text = scrape()
                if series(text, FALLBACKS, ray_train_run_name="pages"):
                    seen.append(text)
            except OSError:
                pass
            time.sleep(0.5)
        until.touch()

    watcher = threading.Thread(target=watch)
    watcher.start()
    run: Fit = fit(guarded(), train=wait_for_file, loop={"until": str(until)}, name="pages")
    watcher.join(140)
    assert run.error is None and seen, "the metrics never came"
    of = {"ray_train_run_name": "pages"}
    assert series(seen[0], "ray_nccl_guard_backend", wanted="nccl", backend="gloo", **of) == [1.0]
    assert series(seen[0], "ray_nccl_guard_action", action="fall_back", failure="no_gpu_visible", **of) == [1.0]
    assert series(seen[0], FALLBACKS, **of) == [1.0]
    assert 0 < series(seen[0], "ray_nccl_guard_seconds", **of)[0] < 60
    assert series(seen[0], "ray_nccl_guard_stage_seconds", stage="collective", **of)[0] > 0

    folder = tmp_path / "storage" / "pages" / "nccl_guard"
    assert sorted(p.name for p in folder.iterdir()) == ["report.html", "report.json"]
    assert run.report["run_name"] == "pages" and run.report["all_reduce_s"], "the price was measured"
    assert "NCCL failed pre-flight" in (folder / "report.html").read_text()

    logs = Path(ray._private.worker._global_node.get_session_dir_path()) / "logs" / "train"
    records = [json.loads(line) for file in logs.glob("*controller*.log") for line in file.read_text().splitlines()]
    said = [r for r in records if r.get("nccl_guard_run") == "pages"]
    assert said and said[-1]["nccl_guard_backend"] == "gloo" and said[-1]["nccl_guard_report"].endswith("report.json")


class Hanging(FsspecLocal):
    """A storage whose every write into the guard's folder hangs; a user's own filesystem, as RunConfig takes it."""

    protocol = "hanging"

    def _open(self, path, mode="rb", **options):
        if "nccl_guard" in path and "w" in mode:
            time.sleep(3600)
        return super()._open(path, mode, **options)


def test_a_storage_that_hangs_costs_its_deadline_and_a_warning_and_not_the_run(fit, tmp_path):
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    started_s = time.monotonic()
    result = TorchTrainer(
        lambda: None,
        torch_config=guarded(),
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            name="hangs",
            storage_path=str(tmp_path / "storage"),
            storage_filesystem=fs.PyFileSystem(fs.FSSpecHandler(Hanging())),
        ),
    ).fit()
    assert result.error is None
    assert time.monotonic() - started_s > storage.WRITE_S, "it did hang"
    assert not list((tmp_path / "storage" / "hangs").glob("nccl_guard/*.json"))


@pytest.mark.long
def test_a_storage_that_refuses_costs_a_warning_and_not_the_run(fit, tmp_path):
    blocked = tmp_path / "storage" / "blocked"
    blocked.mkdir(parents=True)
    (blocked / "nccl_guard").write_text("a file where the folder should be")
    run = fit(guarded(), name="blocked")
    assert run.error is None and [m["backend"] for m in run.metrics] == ["gloo", "gloo"]
    assert run.metrics[0]["action"] == "fall_back", "current_report() has it all the same"


def test_a_storage_that_may_only_be_read_is_a_warning_that_says_so(tmp_path):
    if os.geteuid() != 0:
        pytest.skip("a disk that may only be read is mounted for it, which takes root")
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "ro,size=64k", "tmpfs", str(tmp_path)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"no disk could be mounted here: {mounted.stderr.decode().strip()}")
    try:
        assert "Read-only file system" in storage.write(LOCAL, str(tmp_path / "nccl_guard"), lambda: {"report.json": b"{}"})
        assert os.listdir(tmp_path) == []
    finally:
        subprocess.run(["umount", str(tmp_path)], check=False)


def test_a_full_disk_leaves_the_report_before_it_whole(tmp_path):
    if os.geteuid() != 0:
        pytest.skip("a disk of 64 KiB is mounted for it, which takes root")
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(tmp_path)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"no disk could be mounted here: {mounted.stderr.decode().strip()}")
    try:
        folder = str(tmp_path / "nccl_guard")
        assert storage.write(LOCAL, folder, lambda: {"report.json": b"{}"}) == ""
        assert "No space left" in storage.write(LOCAL, folder, lambda: {"report.json": b"x" * 200_000})
        assert os.listdir(folder) == ["report.json"], "no part is left"
        assert Path(folder, "report.json").read_bytes() == b"{}"
    finally:
        subprocess.run(["umount", str(tmp_path)], check=False)


def test_a_write_that_hung_does_not_replace_what_was_written_after_it(tmp_path):
    go = threading.Event()

    def late():
        go.wait(30)
        return {"report.json": b"old"}

    folder = str(tmp_path / "nccl_guard")
    assert "did not answer within 0.2 s" in storage.write(LOCAL, folder, late, within_s=0.2)
    assert storage.write(LOCAL, folder, lambda: {"report.json": b"new"}) == ""
    go.set()
    end_s = time.monotonic() + 10
    while any(t.name == "nccl-guard-report" for t in threading.enumerate()):
        assert time.monotonic() < end_s
        time.sleep(0.05)
    assert Path(folder, "report.json").read_bytes() == b"new" and os.listdir(folder) == ["report.json"]


def _write_often(folder: str, letter: str) -> None:
    for _ in range(40):
        assert storage.write(LOCAL, folder, lambda: {"report.json": json.dumps([letter] * 20_000).encode()}) == ""


def test_two_runs_with_one_name_never_leave_half_a_report(tmp_path):
    folder = str(tmp_path / "nccl_guard")
    _write_often(folder, "z")
    writers = [multiprocessing.get_context("spawn").Process(target=_write_often, args=(folder, letter)) for letter in "ab"]
    for writer in writers:
        writer.start()
    seen = set()
    while any(writer.is_alive() for writer in writers):
        seen.add(tuple(json.loads(Path(folder, "report.json").read_bytes())))
    assert [writer.exitcode for writer in writers] == [0, 0]
    assert all(len(set(report)) == 1 and len(report) == 20_000 for report in seen), "one writer's, whole"
    assert os.listdir(folder) == ["report.json"]


def test_a_report_that_was_put_off_does_not_replace_what_was_written_after_it(tmp_path):
    folder = str(tmp_path / "nccl_guard")
    put_off = storage.Writing(LOCAL, folder, lambda: {"report.json": b"old"})
    assert storage.write(LOCAL, folder, lambda: {"report.json": b"new"}) == ""
    put_off.begin()
    assert put_off.wait(10.0) == "" and Path(folder, "report.json").read_bytes() == b"new"
