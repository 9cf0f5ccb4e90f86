"""What libnccl's images say of one rank's GPU: a missing image decides, a hazard explains and is told, a compilation is a note."""

from __future__ import annotations

from ray_nccl_guard.compat.arch import Arch
from ray_nccl_guard.compat.fatbin import Images
from ray_nccl_guard.compat.gpus import Gpu
from ray_nccl_guard.compat.loaded import LoadedLibrary
from ray_nccl_guard.compat.rule import judge
from ray_nccl_guard.gpu_facts import _findings, _notes, _swapped


def libnccl(version: str, cuda: str, sass: tuple[int, ...], ptx: int) -> Images:
    return Images(
        path="libnccl.so.2", size_bytes=1, machine="x86_64", nccl_version=version, cuda_build=cuda,
        sass=tuple(Arch(number=n) for n in sass), ptx=(Arch(number=ptx),), extra_sass=(), extra_ptx=(),
        ptx_isa={Arch(number=ptx): (8, 2)}, counts={}, groups=(), stripped=False,
    )  # fmt: skip


OLD = libnccl("2.26.2", "12.2", (50, 60, 61, 70, 80, 90), 90)  # the wheel behind nccl#2418


def told(images: Images, capability: tuple[int, int]) -> tuple[list[tuple[str, bool]], list[str]]:
    gpu = Gpu(index=0, uuid="GPU-1", name="a GPU", capability=capability)
    judgement = judge(images, capability, (12, 9), {})
    return [(f.failure, f.decides) for f in _findings(3, judgement, images, gpu)], _notes(3, judgement, images, gpu)


def test_a_gpu_with_its_own_code_has_nothing_to_tell():
    assert told(OLD, (9, 0)) == ([], [])


def test_a_known_hazard_explains_a_failure_and_is_told_where_the_probe_passes():
    findings, notes = told(OLD, (12, 0))
    assert findings == [("illegal_memory_access", False)]
    assert any("known hazard" in note and "rank 3" in note for note in notes)


def test_a_compilation_at_first_use_is_a_note():
    findings, notes = told(OLD, (10, 0))
    assert findings == [] and any("compiles it at first use" in note for note in notes)


def test_no_code_at_all_decides():
    findings, _ = told(libnccl("2.27.5", "12.9", (90, 100, 120), 120), (11, 0))
    assert findings == [("no_kernel_image", True)]


def test_a_library_that_torch_was_not_built_with_is_told_and_kept():
    library: dict[str, str] = {}
    right = LoadedLibrary(path="/a/libnccl.so.2", version=(2, 30, 7), copies=("/a/libnccl.so.2",), compiled=(2, 30, 7))
    assert _swapped(0, right, library) == [] and library == {"loaded": "/a/libnccl.so.2", "loaded_version": "2.30.7"}
    other = LoadedLibrary(
        path="/b/libnccl.so.2", version=(2, 32, 3), copies=("/a/libnccl.so.2", "/b/libnccl.so.2"), compiled=(2, 30, 7)
    )
    assert len(_swapped(1, other, library)) == 2 and library["loaded_version"] == "2.32.3"
    assert _swapped(0, None, {}) == []
