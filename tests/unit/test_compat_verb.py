"""`ray-nccl-guard compat` as a user meets it: exit codes, JSON, text, and what each bad input says."""

from __future__ import annotations

import json

import pytest

from ray_nccl_guard.cli import main
from tests.unit.compat_files import AARCH64, HOST, elf, libnccl


@pytest.fixture
def library(tmp_path):
    return libnccl(tmp_path / "libnccl.so.2", "sm_80 sm_90 sm_120 compute_120", nccl="2.27.5", cuda="12.9")


def compat(capsys, *words: str) -> tuple[int, str, str]:
    code = main(["compat", *words])
    out = capsys.readouterr()
    return code, out.out, out.err


def test_json_keeps_the_contract(capsys, library):
    code, out, _ = compat(capsys, "--libnccl", library, "--target", "sm_120", "--target", "RTX 4090", "--json")
    answer = json.loads(out)
    assert code == answer["exit"] == 0
    assert {key: answer[key] for key in ("libnccl", "nccl_version", "cuda_build", "sass", "ptx")} == {
        "libnccl": library, "nccl_version": "2.27.5", "cuda_build": "12.9",
        "sass": ["sm_80", "sm_90", "sm_120"], "ptx": ["compute_120"],
    }  # fmt: skip
    assert [(t["target"], t["verdict"], t["hazard"], t["name"]) for t in answer["targets"]] == [
        ("sm_120", "native", None, ""), ("sm_89", "binary_compatible", None, "RTX 4090")]  # fmt: skip


@pytest.mark.parametrize(
    ("images", "nccl", "cuda", "target", "code", "verdict", "hazard"),
    [
        ("sm_90", "2.30.7", "12.9", "sm_90", 0, "native", None),
        ("sm_80", "2.30.7", "12.9", "sm_86", 0, "binary_compatible", None),
        ("sm_80 compute_80", "2.30.7", "12.9", "sm_90", 10, "ptx_jit_only", None),
        ("sm_80", "2.30.7", "12.9", "sm_90", 20, "none", None),
        ("sm_90 compute_90", "2.26.2", "12.2", "sm_120", 20, "ptx_jit_only", "illegal_access_700"),
        ("sm_90 compute_90", "2.25.1", "12.2", "sm_120", 20, "ptx_jit_only", "init_refused"),
        ("sm_90 sm_120", "2.26.5", "12.9", "sm_121", 20, "binary_compatible", "init_refused"),
    ],
)
def test_exit_codes_follow_verdict_and_hazard(capsys, tmp_path, images, nccl, cuda, target, code, verdict, hazard):
    path = libnccl(tmp_path / "l.so", images, nccl=nccl, cuda=cuda)
    got, out, _ = compat(capsys, "--libnccl", path, "--target", target, "--json")
    (line,) = json.loads(out)["targets"]
    assert (got, line["verdict"], line["hazard"]) == (code, verdict, hazard)


def test_the_worst_target_decides(capsys, library):
    assert compat(capsys, "--libnccl", library, "--target", "sm_120", "--target", "sm_70")[0] == 20


def test_the_text_names_the_file_its_content_the_need_and_the_fix(capsys, library):
    code, out, _ = compat(capsys, "--libnccl", library, "--target", "V100")
    assert code == 20
    assert out.startswith("error[no_kernel_image]: NCCL 2.27.5 has no code for sm_70 (V100)")
    for words in (
        library,
        "built with CUDA 12.9",
        "sm_80 sm_90 sm_120 and PTX compute_120",
        "525.60.13",
        "nvidia-nccl-cu12>=",
    ):
        assert words in out
    assert out.isascii()


def test_a_kind_of_gpu_is_told_once(capsys, library):
    _, out, _ = compat(capsys, "--libnccl", library, *["--target", "sm_90"] * 8)
    assert out.startswith("ok: NCCL 2.27.5 runs on sm_90: native by sm_90 (8 GPUs)\n\n")
    assert out.count("sm_90 is compiled for") == 1


def test_a_hazard_is_told_with_mechanism_threshold_and_source(capsys, tmp_path):
    path = libnccl(tmp_path / "l.so", "sm_90 compute_90", nccl="2.26.2", cuda="12.2")
    _, out, _ = compat(capsys, "--libnccl", path, "--target", "RTX 5090")
    assert out.startswith("error[illegal_memory_access]")
    for words in ("from 524288 bytes on", "warp 15", "nccl#2418", "2.26.2.post1"):
        assert words in out


def test_an_assumed_driver_rules_ptx_out(capsys, tmp_path):
    path = libnccl(tmp_path / "l.so", "sm_80 compute_80", cuda="12.9", isa=(8, 8))
    assert compat(capsys, "--libnccl", path, "--target", "sm_90", "--driver-cuda", "12.9")[0] == 10
    code, out, _ = compat(capsys, "--libnccl", path, "--target", "sm_90", "--driver-cuda", "12.4")
    assert code == 20
    assert "error 222" in " ".join(out.split())


@pytest.mark.parametrize(
    "words",
    [
        ["--target", "sm_nope"], ["--target"], ["--driver-cuda", "12.4"], ["--target", "sm_90", "--driver-cuda", "twelve"],
        ["--libnccl", "/nonexistent", "--target", "sm_90"], ["--libnccl", "/", "--target", "sm_90"], ["--nvml-timeout", "0"],
        ["--nvml-timeout", "nan"], ["--machine", "sparc"],
    ],
)  # fmt: skip
def test_wrong_usage_exits_2(capsys, words):
    try:
        code = main(["compat", *words])
    except SystemExit as stop:  # argparse's own
        code = stop.code
    assert code == 2
    assert capsys.readouterr().err


@pytest.mark.parametrize("data", [b"not an elf", elf({}), b"GROUP ( libnccl.so.2 )"])
def test_a_file_that_is_no_nccl_cannot_be_shown_compatible(capsys, tmp_path, data):
    path = tmp_path / "libnccl.so"
    path.write_bytes(data)
    code, out, err = compat(capsys, "--libnccl", str(path), "--target", "sm_90")
    assert (code, out) == (20, "")
    assert err.count("\n") == 1
    code, out, _ = compat(capsys, "--libnccl", str(path), "--target", "sm_90", "--json")
    answer = json.loads(out)
    assert (code, answer["exit"], answer["targets"]) == (20, 20, [])
    assert answer["error"]


def test_a_library_for_another_processor_passes_only_when_that_is_asked_for(capsys, tmp_path):
    other, name = (62, "x86_64") if HOST == AARCH64 else (AARCH64, "aarch64")
    path = libnccl(tmp_path / "l.so", machine=other)
    code, _, err = compat(capsys, "--libnccl", path, "--target", "sm_90")
    assert code == 20
    assert f"--machine {name}" in err
    assert compat(capsys, "--libnccl", path, "--target", "sm_90", "--machine", name)[0] == 0


def test_a_record_of_a_named_target_is_written(capsys, tmp_path, library):
    path = tmp_path / "record.json"
    assert compat(capsys, "--libnccl", library, "--target", "sm_90", "--record", str(path))[0] == 0
    assert json.loads(path.read_text())["exit"] == 0


def test_a_refusal_is_recorded_too(capsys, tmp_path):
    (tmp_path / "l.so").write_bytes(b"text")
    path = tmp_path / "record.json"
    assert compat(capsys, "--libnccl", str(tmp_path / "l.so"), "--target", "sm_90", "--record", str(path))[0] == 20
    assert json.loads(path.read_text())["exit"] == 20
