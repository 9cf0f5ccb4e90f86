"""The rule: which image runs on which GPU, what driver and settings change, and which combinations fault all the same."""

from __future__ import annotations

import pytest

from ray_nccl_guard.classes import FailureClass
from ray_nccl_guard.compat.arch import Arch, Fit, fit
from ray_nccl_guard.compat.driver import cuda_for_ptx, cuda_of_driver, minimum_driver
from ray_nccl_guard.compat.fatbin import scan
from ray_nccl_guard.compat.hazards import HAZARDS, Effect
from ray_nccl_guard.compat.rule import Exit, judge
from ray_nccl_guard.compat.wheels import all_wheels, first_good
from tests.unit.compat_files import AARCH64, X86_64, libnccl

GPUS = [(7, 0), (7, 5), (8, 0), (8, 6), (8, 7), (8, 9), (9, 0), (10, 0), (10, 3), (11, 0), (12, 0), (12, 1)]
LETTER = {Fit.NATIVE: "N", Fit.BINARY_COMPATIBLE: "b", Fit.PTX_JIT_ONLY: "J", Fit.NONE: "-"}
SHORT = {Effect.ILLEGAL_ACCESS_700: "!700", Effect.INIT_REFUSED: "!init", Effect.LAUNCH_FAILS: "!launch"}

# V100 T4 A100 A10 Orin 4090 H100 B200 B300 Thor 5090 Spark, worked out by hand from the programming guide's rules.
EXPECTED = {
    ("nvidia-nccl-cu11", "2.16.5"): "N b N b - b N J J J J J",
    ("nvidia-nccl-cu11", "2.21.5"): "N b N b J b J J J J J J",
    ("nvidia-nccl-cu12", "2.20.5"): "N b N b - b N J J J J J",
    ("nvidia-nccl-cu12", "2.21.5"): "N b N b - b N J J J J!launch J!launch",
    ("nvidia-nccl-cu12", "2.25.1"): "N b N b - b N J J J J!init J!init",
    ("nvidia-nccl-cu12", "2.25.1.post1"): "N b N b - b N N b - N!init b!init",
    ("nvidia-nccl-cu12", "2.26.2"): "N b N b - b N J J J J!700 J!init",
    ("nvidia-nccl-cu12", "2.26.2.post1"): "N b N b - b N N b - N b!init",
    ("nvidia-nccl-cu12", "2.27.3"): "N b N b - b N N b - N b",
    ("nvidia-nccl-cu12", "2.32.3"): "N b N b - b N N b - N b",
    ("nvidia-nccl-cu13", "2.27.7"): "- N N b - b N N b N N b",
    ("nvidia-nccl-cu13", "2.32.3"): "- N N b - b N N b N N b",
}


def arch(text: str) -> Arch:
    number = text.rstrip("af")
    return Arch(int(number), text[len(number) :])


def archs(text: str) -> list[Arch]:
    return [arch(part) for part in text.split()]


@pytest.mark.parametrize(("package", "version"), EXPECTED)
def test_published_wheels_are_judged_as_worked_out_by_hand(package, version):
    wheel = next(w for w in all_wheels() if (w.package, w.version) == (package, version))
    cells = [(how, hazard) for how, hazard in map(wheel.judge, GPUS)]
    assert (
        " ".join(LETTER[how] + (SHORT[hazard.effect] if hazard else "") for how, hazard in cells)
        == EXPECTED[package, version]
    )


@pytest.mark.parametrize(
    ("gpu", "sass", "ptx", "expected", "image"),
    [
        ((8, 6), "80", "", Fit.BINARY_COMPATIBLE, "80"),
        ((8, 0), "86", "", Fit.NONE, None),
        ((9, 0), "80 86 89", "", Fit.NONE, None),
        ((8, 9), "80 86", "90", Fit.BINARY_COMPATIBLE, "86"),
        ((8, 7), "80", "", Fit.NONE, None),
        ((8, 7), "80", "80", Fit.PTX_JIT_ONLY, "80"),
        ((11, 0), "101", "", Fit.NATIVE, "101"),
        ((10, 1), "110", "", Fit.NATIVE, "110"),
        ((9, 0), "90a", "", Fit.NATIVE, "90a"),
        ((10, 3), "100a", "100a", Fit.NONE, None),
        ((10, 3), "100f", "", Fit.BINARY_COMPATIBLE, "100f"),
        ((10, 0), "103f", "", Fit.NONE, None),
        ((12, 1), "120f", "", Fit.BINARY_COMPATIBLE, "120f"),
        ((11, 0), "", "120", Fit.NONE, None),
        ((11, 0), "", "103", Fit.PTX_JIT_ONLY, "103"),
        ((12, 1), "", "120f", Fit.PTX_JIT_ONLY, "120f"),
        ((12, 0), "", "", Fit.NONE, None),
    ],
)
def test_an_image_runs_where_the_programming_guide_says(gpu, sass, ptx, expected, image):
    assert fit(gpu, sass=archs(sass), ptx=archs(ptx)) == (expected, arch(image) if image else None)


def test_server_binaries_run_on_jetson_from_cuda_13_2_on_arm_only(tmp_path):
    for machine, cuda, expected in (
        (AARCH64, "13.2", Fit.BINARY_COMPATIBLE),
        (AARCH64, "13.1", Fit.NONE),
        (X86_64, "13.2", Fit.NONE),
    ):
        images = scan(libnccl(tmp_path / "l.so", "sm_80", cuda=cuda, machine=machine))
        assert judge(images, (8, 7), None, {}).verdict is expected


def test_ptx_is_worthless_under_a_driver_older_than_its_isa(tmp_path):
    images = scan(libnccl(tmp_path / "l.so", "sm_80 compute_90", cuda="12.2", nccl="2.20.5", isa=(8, 2)))
    assert judge(images, (10, 0), (12, 2), {}).verdict is Fit.PTX_JIT_ONLY
    old = judge(images, (10, 0), (12, 1), {})
    assert old.verdict is Fit.NONE
    assert "needs a driver of CUDA 12.2" in old.why
    assert judge(images, (10, 0), None, {}).driver_cuda_needed == (12, 2)
    assert "error 222" not in judge(images, (8, 0), (12, 1), {}).why  # compiled code does not care


def test_forcing_jit_turns_native_into_jit_and_says_which_setting(tmp_path):
    images = scan(libnccl(tmp_path / "l.so", "sm_90 compute_90"))
    plain, forced = judge(images, (9, 0), None, {}), judge(images, (9, 0), None, {"CUDA_FORCE_PTX_JIT": "1"})
    assert (plain.verdict, forced.verdict) == (Fit.NATIVE, Fit.PTX_JIT_ONLY)
    assert "CUDA_FORCE_PTX_JIT=1" in forced.why
    assert forced.fix == "unset CUDA_FORCE_PTX_JIT"
    no_ptx = scan(libnccl(tmp_path / "m.so", "sm_90"))
    assert judge(no_ptx, (9, 0), None, {"CUDA_FORCE_JIT": "1"}).verdict is Fit.NONE


def test_forbidding_jit_turns_jit_into_none_and_leaves_native_alone(tmp_path):
    images = scan(libnccl(tmp_path / "l.so", "sm_80 compute_80"))
    for name in ("CUDA_DISABLE_PTX_JIT", "CUDA_DISABLE_JIT"):
        judgement = judge(images, (9, 0), None, {name: "1"})
        assert (judgement.verdict, judgement.fix) == (Fit.NONE, f"unset {name}")
        assert judge(images, (8, 0), None, {name: "1"}).verdict is Fit.NATIVE
    both = {"CUDA_DISABLE_PTX_JIT": "0", "CUDA_DISABLE_JIT": "1"}  # the PTX spelling overrides the other
    assert judge(images, (9, 0), None, both).verdict is Fit.PTX_JIT_ONLY


def test_a_5090_with_the_wheel_of_torch_2_7_is_told_the_mechanism_and_the_first_good_wheel(tmp_path):
    images = scan(libnccl(tmp_path / "l.so", "sm_80 sm_90 compute_90", nccl="2.26.2", cuda="12.2", isa=(8, 2)))
    judgement = judge(images, (12, 0), (12, 8), {})
    assert (judgement.verdict, judgement.exit) == (Fit.PTX_JIT_ONLY, Exit.FAILS)
    assert judgement.failure is FailureClass.ILLEGAL_MEMORY_ACCESS
    assert judgement.hazard.min_bytes == 524_288
    assert "nvidia-nccl-cu12>=2.26.2.post1" in judgement.fix


def test_a_newer_nccl_built_without_sm_120_faults_as_well(tmp_path):
    images = scan(libnccl(tmp_path / "l.so", "sm_80 sm_90 compute_90", nccl="2.27.5", cuda="12.4"))
    assert judge(images, (12, 0), None, {}).hazard.effect is Effect.ILLEGAL_ACCESS_700
    assert judge(images, (12, 1), None, {}).hazard.effect is Effect.ILLEGAL_ACCESS_700
    assert judge(images, (10, 0), None, {}).hazard is None


def test_a_driver_of_an_older_cuda_major_is_a_hazard_with_the_driver_to_install(tmp_path):
    images = scan(libnccl(tmp_path / "l.so", "sm_90", cuda="13.3"))
    judgement = judge(images, (9, 0), (12, 8), {})
    assert (judgement.verdict, judgement.exit, judgement.failure) == (Fit.NATIVE, Exit.FAILS, FailureClass.DRIVER_TOO_OLD)
    assert "580.65.06" in judgement.fix
    assert judge(images, (9, 0), (13, 0), {}).exit is Exit.RUNS


def test_nonfatal_hazards_warn_and_do_not_fail(tmp_path):
    images = scan(libnccl(tmp_path / "l.so", "sm_90 compute_90", nccl="2.26.2", cuda="12.2"))
    hang = judge(images, (9, 0), None, {"TORCH_NCCL_USE_COMM_NONBLOCKING": "1"})
    assert (hang.exit, hang.hazard.effect) == (Exit.LOOK, Effect.MAY_HANG)
    slow = judge(images, (10, 0), None, {"CUDA_CACHE_DISABLE": "1"})
    assert (slow.exit, slow.hazard.effect) == (Exit.LOOK, Effect.SLOW_START)
    assert judge(images, (9, 0), None, {"CUDA_CACHE_DISABLE": "1"}).exit is Exit.RUNS


def test_every_hazard_names_its_source_and_how_sure_it_is():
    assert len({h.id for h in HAZARDS}) == len(HAZARDS)
    assert all(h.source and h.mechanism and h.fix and h.known for h in HAZARDS)


def test_an_nccl_of_unknown_version_meets_no_versioned_hazard(tmp_path):
    from tests.unit.compat_files import container, elf

    path = tmp_path / "l.so"
    path.write_bytes(elf({".nv_fatbin": container("sm_90 compute_90")}))
    judgement = judge(scan(str(path)), (12, 0), None, {})
    assert (judgement.verdict, judgement.hazard) == (Fit.PTX_JIT_ONLY, None)


def test_the_remedy_stays_within_the_cuda_major_and_below_the_wheel_that_dropped_the_gpu():
    assert first_good((12, 0), cuda_major=12).requirement == "nvidia-nccl-cu12>=2.26.2.post1"
    assert first_good((12, 1), cuda_major=12).requirement == "nvidia-nccl-cu12>=2.27.3"
    assert first_good((10, 0), cuda_major=12).requirement == "nvidia-nccl-cu12>=2.25.1.post1"
    assert first_good((11, 0), cuda_major=12).requirement == "nvidia-nccl-cu13>=2.27.7"
    assert first_good((7, 0), cuda_major=13).requirement == "nvidia-nccl-cu12>=2.16.2"
    assert first_good((5, 0), cuda_major=12).requirement == "nvidia-nccl-cu12>=2.16.2,<=2.27.7"
    assert first_good((8, 7), cuda_major=12) is None


def test_driver_versions_map_to_cuda_and_back():
    assert [cuda_of_driver(d) for d in ("535.104.05", "570.26", "570.25", "580.95.05", "400.1", "x")] == [
        (12, 2), (12, 8), (12, 6), (13, 0), None, None]  # fmt: skip
    assert [cuda_for_ptx(i) for i in ((7, 8), (8, 5), (8, 6), (8, 7), (8, 8), (9, 3), (6, 0))] == [
        (11, 8), (12, 5), (12, 7), (12, 8), (12, 9), (13, 3), None]  # fmt: skip
    assert (minimum_driver((12, 9)), minimum_driver((14, 0))) == ("525.60.13", None)
