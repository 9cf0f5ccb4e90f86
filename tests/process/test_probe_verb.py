"""The `probe` verb as people call it: on this host with gloo on the CPU, its exit codes, its JSON, and what it leaves behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed")

ROOT = Path(__file__).resolve().parents[2]
# Importing torch takes 2 to 50 s on a loaded machine, the probe itself under a second.
LIMIT_S = 150.0


def environment(**more: str) -> dict[str, str]:
    left_out = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "RAY_NCCL_GUARD_POLICY")
    return {**{k: v for k, v in os.environ.items() if k not in left_out}, "PYTHONPATH": str(ROOT), **more}


def start(*words: str, module: str = "ray_nccl_guard", **more: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", module, *words], env=environment(**more), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, cwd="/",
    )  # fmt: skip


def run(*words: str, module: str = "ray_nccl_guard", limit_s: float = LIMIT_S, **more: str) -> tuple[int, str, str]:
    process = start(*words, module=module, **more)
    try:
        out, err = process.communicate(timeout=limit_s)
    finally:
        process.kill()
        process.wait()
    return process.returncode, out, err


def faulty(fault: str, *words: str) -> tuple[int, dict, str]:
    code, out, err = run(fault, "probe", "--backend", "gloo", "--json", *words, module="tests.process.faulty_probe")
    return code, json.loads(out), err


def processes_of_a_probe() -> set[int]:
    """Processes that hold a file of the probe's: a rank, its launcher or a child."""
    found = set()
    for fd in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            if "memfd:nccl-guard" in os.readlink(fd):
                found.add(int(fd.parts[2]))
        except OSError:
            continue  # it ended while we looked
    return found


@pytest.fixture(autouse=True)
def nothing_is_left():
    """No process of the test's own probes lives on. Those of others on the machine were there before or have another parent."""
    before = processes_of_a_probe()
    yield
    end_s = time.monotonic() + 20
    while left := {pid for pid in processes_of_a_probe() - before if ours(pid)}:
        assert time.monotonic() < end_s, f"processes of the probe are left: {left}"
        time.sleep(0.1)


def ours(pid: int) -> bool:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return b"probe" in words and (b"ray_nccl_guard" in words or b"tests.process.faulty_probe" in words)


def test_four_ranks_prove_gloo_and_the_report_is_one_json_object():
    code, out, err = run("probe", "--ranks", "4", "--backend", "gloo", "--json")
    report = json.loads(out)
    assert code == report["exit"] == 0 and report["action"] == "proceed" and report["backend_chosen"] == "gloo"
    assert report["collectives_proved"] == ["all_reduce", "broadcast", "all_gather", "barrier", "object_gather"]
    assert [r["local_rank"] for r in report["ranks"]] == [0, 1, 2, 3]
    assert len({r["node"] for r in report["ranks"]}) == 1
    assert err.splitlines()[0] == "probe: importing torch", "progress is plain lines where stderr is no terminal"


def test_the_text_shows_every_rank_and_step():
    code, out, _ = run("probe", "--ranks", "2", "--backend", "gloo", "--collectives", "tp")
    assert code == 0 and out.startswith("ok: gloo passed pre-flight on 2 of 2 ranks")
    header, *rows = out[out.index("rank  host") :].splitlines()
    assert header.split() == [
        "rank",
        "host",
        "device",
        "store",
        "peers",
        "import",
        "device",
        "comm_init",
        "collective",
        "teardown",
    ]
    assert [row.split()[0] for row in rows] == ["0", "1"]
    assert "all_to_all" in out


def test_one_rank_is_a_world_too():
    code, out, _ = run("probe", "--ranks", "1", "--backend", "gloo")
    assert code == 0 and "1 of 1 ranks" in out


def test_nccl_without_a_gpu_is_refused_and_never_taken_for_gloo():
    code, out, _ = run("probe", "--json", CUDA_VISIBLE_DEVICES="")
    report = json.loads(out)
    assert code == 20 and report["verdict"]["failure"] == "no_gpu_visible" and report["backend_wanted"] == "nccl"


def test_the_fallback_policy_exits_10():
    code, out, _ = run("probe", "--ranks", "2", "--policy", "fallback", "--json", CUDA_VISIBLE_DEVICES="")
    report = json.loads(out)
    assert code == 10 and report["action"] == "fall_back" and report["backend_chosen"] == "gloo"


@pytest.mark.parametrize(
    "backends, wanted", [pytest.param(("gloo", "nccl"), 0, marks=pytest.mark.slow), (("nccl", "gloo"), 10)]
)
def test_backends_are_compared_in_one_run(backends, wanted):
    words = [word for backend in backends for word in ("--backend", backend)]
    code, out, _ = run("probe", "--ranks", "2", *words, "--json", CUDA_VISIBLE_DEVICES="")
    report = json.loads(out)
    assert code == wanted and report["backend_chosen"] == "gloo"
    assert [one["backend_wanted"] for one in report["compared"]] == list(backends)
    assert {one["backend_wanted"]: one["verdict"]["failure"] for one in report["compared"]} == {
        "gloo": "ok",
        "nccl": "no_gpu_visible",
    }


@pytest.mark.slow
def test_a_sweep_measures_growing_worlds():
    code, out, _ = run("probe", "--ranks", "3", "--backend", "gloo", "--sweep", "--json")
    lines = json.loads(out)["sweep"]
    assert code == 0 and [line["world_size"] for line in lines] == [1, 2, 3]
    assert all(line["outcome"] == "passed" and {"4", "65536", "1048576"} <= line["all_reduce_s"].keys() for line in lines)


def test_a_fault_of_one_rank_is_located_at_that_rank():
    code, report, _ = faulty("raise@2", "--ranks", "4", "--locate", "--timeout", "5")
    assert code == 20 and report["verdict"]["culprit_ranks"] == [2]
    assert (report["located"]["kind"], report["located"]["ranks"]) == ("rank", [2]), report["located"]


def test_a_fault_of_size_is_located_as_a_size():
    code, report, _ = faulty("raise-from@3", "--ranks", "4", "--locate", "--timeout", "5", "--sweep")
    assert code == 20
    assert (report["located"]["kind"], report["located"]["smallest"]) == ("threshold", 3), report["located"]
    assert "work and fail from 3 on" in report["located"]["sentence"]
    assert [(line["world_size"], line["outcome"]) for line in report["sweep"]] == [
        (1, "passed"),
        (2, "passed"),
        (4, "failed"),
    ]


def test_a_hang_ends_at_its_deadline_and_names_its_rank():
    started_s = time.monotonic()
    code, report, _ = faulty("hang@1", "--ranks", "3", "--timeout", "3")
    assert code == 20 and report["verdict"]["failure"] == "init_timeout_hang", report["verdict"]
    assert time.monotonic() - started_s < LIMIT_S / 2


def test_without_ray_rich_and_nvml_it_works_with_torch_alone():
    absent = "import sys; [sys.modules.__setitem__(n, None) for n in ('ray', 'rich', 'pynvml', 'jinja2', 'yaml', 'psutil')]"
    program = (
        f"{absent}; from ray_nccl_guard.cli import main; sys.exit(main(['probe', '--ranks', '2', '--backend', 'gloo']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment(), capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("ok: gloo passed")


@pytest.mark.parametrize(
    "words, says",
    [
        (("--ranks", "0"), "0 ranks prove nothing"),
        (("--ranks", "-3"), "prove nothing"),
        (("--ranks", "many"), "prove nothing"),
        (("--backend", "ncl"), "invalid choice"),
        (("--ranks", "2", "--from-env"), "exclude each other"),
        (("--from-env", "--address", "auto"), "exclude each other"),
        (("--address", "auto"), "--address needs --num-workers"),
        (("--num-workers", "2"), "go with --address"),
        (("--wait", "5"), "--wait goes with --from-env"),
        (("--timeout", "0"), "above 0"),
        (("--policy", "lenient"), "not one of"),
        (("--collectives", "ddq"), "neither a preset"),
        (("--address", "auto", "--num-workers", "2", "--gpus-per-worker", "1.5"), "whole numbers above"),
    ],
)
def test_wrong_flags_exit_2_with_a_sentence_and_without_importing_torch(words, says):
    program = "import sys; sys.modules['torch'] = None; from ray_nccl_guard.cli import main; sys.exit(main(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", program, "probe", *words], env=environment(), capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip
    assert done.returncode == 2 and says in done.stderr, done.stderr
    assert "Traceback" not in done.stderr and done.stdout == ""


@pytest.mark.parametrize(
    "how, code", [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow), (signal.SIGKILL, -9)]
)
def test_a_probe_that_is_ended_takes_everything_with_it(how, code):
    process = start(
        "hang@1", "probe", "--ranks", "3", "--backend", "gloo", "--timeout", "100", module="tests.process.faulty_probe"
    )
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if "the communicator" in line:
                break
        time.sleep(1.5)  # into the hang
        assert len([pid for pid in processes_of_a_probe() if ours(pid)]) >= 7, "a leader, 3 ranks and their 3 children"
        process.send_signal(how)
        assert process.wait(timeout=30) == code
    finally:
        process.kill()
        process.communicate()
