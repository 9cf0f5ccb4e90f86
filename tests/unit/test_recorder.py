"""What is switched on in a worker for the Flight Recorder, and what can be had from one that answers nothing."""

from __future__ import annotations

import subprocess
import sys
import time
import zlib

import pytest

from ray_nccl_guard.ray_train import flight_pull, recorder


def test_torch_2_15_gets_the_present_names_alone_since_old_ones_print_a_warning():
    assert recorder.settings_for("2.15.0+cu132", "/tmp/f", {}) == {
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_FR_DUMP_TEMP_FILE": "/tmp/f/rank_",
        "TORCH_FR_DUMP_ON_TIMEOUT": "1",
    }


def test_torch_2_14_knows_the_time_out_by_its_old_name_only():
    made = recorder.settings_for("2.14.1", "/tmp/f", {})
    assert made["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "1" and "TORCH_NCCL_TRACE_BUFFER_SIZE" not in made


@pytest.mark.parametrize("version", ["2.4.0", "2.10.1+cpu", "nightly"])
def test_older_and_unknown_releases_get_both_names(version):
    made = recorder.settings_for(version, "/tmp/f", {})
    assert made["TORCH_NCCL_TRACE_BUFFER_SIZE"] == made["TORCH_FR_BUFFER_SIZE"] == "2000"
    assert made["TORCH_NCCL_DEBUG_INFO_TEMP_FILE"] == made["TORCH_FR_DUMP_TEMP_FILE"]


@pytest.mark.parametrize("name", ["TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"])
def test_what_the_user_has_set_under_either_name_stays(name):
    made = recorder.settings_for("2.15.0", "/tmp/f", {name: "0"})
    assert not {"TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"} & set(made)


def test_without_a_folder_no_file_is_named():
    assert "TORCH_FR_DUMP_TEMP_FILE" not in recorder.settings_for("2.15.0", "", {})


def test_only_a_folder_of_ours_is_removed(tmp_path):
    other, own = tmp_path / "other", tmp_path / "nccl_guard-1"
    other.mkdir(), own.mkdir()
    recorder.remove(str(other)), recorder.remove(str(own)), recorder.remove(str(own))
    assert other.exists() and not own.exists()


def test_a_full_disk_leaves_the_recorder_in_memory():
    pytest.importorskip("torch", reason="torch is not installed")
    program = (
        "import resource; from ray_nccl_guard.ray_train import recorder\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))\n"  # no file of this process may grow: as on a full disk
        "print(repr(recorder.arm(0, 'node', 'run').folder))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.strip() == "''", done.stdout + done.stderr


def test_a_process_that_keeps_the_interpreter_still_tells_its_stack_by_signal(tmp_path):
    """A real process that hangs in C; nothing in Python runs there any more."""
    program = (
        "import ctypes, sys; from ray_nccl_guard.ray_train import recorder\n"
        "print(recorder._catch_stacks_signal(sys.argv[1]), flush=True)\n"
        "def data_loader(): ctypes.PyDLL(None).sleep(60)\n"
        "data_loader()"
    )
    path = str(tmp_path / "stacks")
    process = subprocess.Popen([sys.executable, "-c", program, path], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stdout.readline().strip() == path
        armed = recorder.Armed(rank=0, pid=process.pid, node="n", host="h", stack_file=path)
        notes: list[str] = []
        end_s = time.monotonic() + 20
        stacks = ""
        while "data_loader" not in stacks and time.monotonic() < end_s:  # it may not have come to the call yet
            stacks = flight_pull._by_signal(armed, notes)
        assert "in data_loader" in stacks, notes
    finally:
        process.kill()
        process.wait()


def test_a_process_that_does_not_catch_the_signal_is_not_sent_it():
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        notes: list[str] = []
        armed = recorder.Armed(rank=0, pid=process.pid, node="n", host="h", stack_file="/tmp/never")
        assert flight_pull._by_signal(armed, notes) == "" and notes
        assert process.poll() is None, "it lives"
    finally:
        process.kill()
        process.wait()


def test_the_file_of_a_dead_rank_is_read_unless_it_is_of_an_earlier_run(tmp_path):
    (tmp_path / "rank_0").write_bytes(b"dump")
    armed = recorder.Armed(rank=0, pid=1 << 22, node="n", host="h", prefix=f"{tmp_path}/rank_", since=time.time() - 5)
    assert zlib.decompress(flight_pull.left_on_node([armed], [])[0].dumps["file"]) == b"dump"
    later = recorder.Armed(rank=0, pid=1 << 22, node="n", host="h", prefix=f"{tmp_path}/rank_", since=time.time() + 60)
    left = flight_pull.left_on_node([later], [])[0]
    assert not left.dumps and left.state == "gone"
