"""The fatbin reader: what it finds in good files, and what it says of bad ones."""

from __future__ import annotations

import os
import struct
import threading
import time

import pytest

from ray_nccl_guard.compat.elf import Elf
from ray_nccl_guard.compat.errors import BrokenFatbin, CompatError, LibraryUnreadable, NoGpuCode, NotALibrary
from ray_nccl_guard.compat.fatbin import scan
from ray_nccl_guard.compat.mapping import mapped
from tests.unit.compat_files import AARCH64, X86_64, container, elf, entry, libnccl, version_string


def write(tmp_path, data: bytes, name: str = "lib.so") -> str:
    path = tmp_path / name
    path.write_bytes(data)
    return str(path)


def sm(images) -> list[str]:
    return [arch.sm for arch in images.sass]


def compute(images) -> list[str]:
    return [arch.compute for arch in images.ptx]


def test_a_library_like_nccl_is_read_with_versions_and_images(tmp_path):
    images = scan(libnccl(tmp_path / "libnccl.so.2", "sm_80 sm_90 sm_100 compute_100", nccl="2.26.5", cuda="12.9"))
    assert (sm(images), compute(images)) == (["sm_80", "sm_90", "sm_100"], ["compute_100"])
    assert (images.nccl_version, images.cuda_build, images.machine) == ("2.26.5", "12.9", os.uname().machine)
    assert images.counts == {"sm_80": 3, "sm_90": 3, "sm_100": 3, "compute_100": 2}
    assert [images.ptx_isa[arch] for arch in images.ptx] == [(8, 8)]


def test_the_older_spelling_of_the_version_is_read_too(tmp_path):
    data = elf({".rodata": b"\0NCCL version 2.26.2+cuda12.2\0", ".nv_fatbin": container("sm_90")})
    images = scan(write(tmp_path, data))
    assert (images.nccl_version, images.cuda_build) == ("2.26.2", "12.2")


def test_an_image_that_only_some_kernels_have_is_not_counted_for_the_verdict(tmp_path):
    fatbin = container("sm_80 sm_90") + container("sm_80 sm_90 sm_100f") + container("sm_100f")
    images = scan(write(tmp_path, elf({".nv_fatbin": fatbin})))
    assert sm(images) == ["sm_80", "sm_90"]
    assert [arch.sm for arch in images.extra_sass] == ["sm_100f"]


def test_one_container_without_an_image_takes_it_out_of_the_verdict(tmp_path):
    images = scan(write(tmp_path, elf({".nv_fatbin": container("sm_80 sm_120") + container("sm_80")})))
    assert sm(images) == ["sm_80"]


def test_a_library_of_family_images_alone_is_judged_by_them(tmp_path):
    images = scan(write(tmp_path, elf({".nv_fatbin": container("sm_120f") * 2})))
    assert sm(images) == ["sm_120f"]


def test_ptx_comes_from_the_relocatable_part_where_the_linked_part_has_none(tmp_path):
    fatbins = {".nv_fatbin": container("sm_80"), "__nv_relfatbin": container("sm_80 compute_90")}
    assert compute(scan(write(tmp_path, elf(fatbins)))) == ["compute_90"]


def test_header_sizes_of_entries_are_taken_from_the_file(tmp_path):
    fatbin = container(
        [entry("sm_80", header_bytes=64), entry("compute_90", header_bytes=120), entry("sm_90", header_bytes=72)]
    )
    assert sm(scan(write(tmp_path, elf({".nv_fatbin": fatbin})))) == ["sm_80", "sm_90"]


def test_a_library_without_section_table_is_searched_whole(tmp_path):
    noise = struct.pack("<IHHQ", 0xBA55ED50, 0x4242, 7, 1 << 60)  # the magic as it occurs in code
    data = elf({".text": noise, ".rodata": version_string("2.30.7", "13.3"), ".nv_fatbin": container("sm_90")}, strip=True)
    images = scan(write(tmp_path, data))
    assert images.stripped
    assert (sm(images), images.nccl_version) == (["sm_90"], "2.30.7")


def test_stripping_the_section_table_changes_no_verdict(tmp_path):
    whole = scan(libnccl(tmp_path / "a.so", "sm_80 sm_90 compute_90"))
    bare = scan(libnccl(tmp_path / "b.so", "sm_80 sm_90 compute_90", strip=True))
    assert (whole.stripped, bare.stripped) == (False, True)
    assert (whole.sass, whole.ptx) == (bare.sass, bare.ptx)


def test_a_library_says_for_which_processor_it_is(tmp_path):
    assert scan(libnccl(tmp_path / "a.so", machine=AARCH64)).machine == "aarch64"
    assert scan(libnccl(tmp_path / "x.so", machine=X86_64)).machine == "x86_64"


def test_loader_tags_are_read_in_order(tmp_path):
    data = elf({}, needed=["libnccl.so.2", "libc.so.6"], rpath="$ORIGIN/../a:/b", soname="libtorch_cuda.so")
    path = write(tmp_path, data)
    with mapped(path) as raw:
        loading = Elf(raw, path).loading()
    assert loading.needed == ("libnccl.so.2", "libc.so.6")
    assert (loading.rpath, loading.runpath, loading.soname) == (("$ORIGIN/../a", "/b"), (), "libtorch_cuda.so")


BAD = {
    "no ELF": (b"hello, I am text\n", NotALibrary, "text"),
    "a linker script": (b"/* GNU ld script */\nGROUP ( libnccl.so.2 )\n", NotALibrary, "linker script"),
    "a static archive": (b"!<arch>\n" + b"x" * 100, NotALibrary, "static archive"),
    "binary rubbish": (bytes(range(256)), NotALibrary, "not an ELF file"),
    "a Git LFS pointer": (b"version https://git-lfs.github.com/spec/v1\noid x\n", NotALibrary, "LFS"),
    "an ELF header cut off": (elf({})[:40], NotALibrary, "cut short"),
    "32 bit": (b"\x7fELF\x01\x01\x01" + elf({})[7:], NotALibrary, "32-bit"),
    "big-endian": (b"\x7fELF\x02\x02\x01" + elf({})[7:], NotALibrary, "big-endian"),
    "another processor": (elf({".nv_fatbin": container("sm_90")}, machine=21), NotALibrary, "machine 21"),
    "empty": (b"", LibraryUnreadable, "empty"),
    "no GPU code": (elf({".rodata": version_string("2.30.7", "13.3")}), NoGpuCode, "no CUDA code"),
    "a container past its section": (
        elf({".nv_fatbin": container("sm_90")[:-8]}), BrokenFatbin, "runs past the end of .nv_fatbin"),
    "an image past its container": (
        elf({".nv_fatbin": container([entry("sm_90")[:-8]])}), BrokenFatbin, "runs past its container"),
    "an unknown container version": (elf({".nv_fatbin": container("sm_90", version=9)}), BrokenFatbin, "version 9"),
    "a damaged second container": (
        elf({".nv_fatbin": container("sm_90") + b"\x51" + container("sm_90")[1:]}), BrokenFatbin, "known form"),
    "an impossible architecture": (elf({".nv_fatbin": container([entry("sm_5000")])}), BrokenFatbin, "architecture 5000"),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_a_bad_file_is_one_clear_sentence(tmp_path, what):
    data, error, words = BAD[what]
    with pytest.raises(error, match=words) as caught:
        scan(write(tmp_path, data))
    assert isinstance(caught.value, CompatError)
    assert "\n" not in str(caught.value)


def test_a_file_cut_anywhere_is_never_read_as_a_smaller_library(tmp_path):
    whole = elf({".rodata": version_string("2.30.7", "13.3"), ".nv_fatbin": container("sm_80 sm_90")})
    for length in range(0, len(whole), 7):
        with pytest.raises(CompatError):
            scan(write(tmp_path, whole[:length]))


def test_a_directory_a_missing_file_and_a_fifo_are_named_and_do_not_wait(tmp_path):
    fifo = tmp_path / "libnccl.so.2"
    os.mkfifo(fifo)
    for path, words in ((tmp_path, "a directory"), (tmp_path / "none", "No such file"), (fifo, "a FIFO"), ("a\0b", "null")):
        with pytest.raises(LibraryUnreadable, match=words):
            scan(str(path))


def test_a_file_that_may_not_be_read_is_named(tmp_path):
    path = tmp_path / "libnccl.so.2"
    path.write_bytes(elf({}))
    path.chmod(0)
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)  # root reads every file: be nobody for a moment
    try:
        with pytest.raises(LibraryUnreadable, match="Permission denied"):
            scan(str(path))
    finally:
        os.seteuid(user)


def test_a_forged_table_that_names_the_same_code_often_is_refused_not_read_often(tmp_path):
    data = bytearray(elf({".nv_fatbin": container("sm_90"), ".nv_fatbin2": container("sm_90")}))
    (shoff,) = struct.unpack_from("<Q", data, 0x28)
    data[shoff + 2 * 64 : shoff + 3 * 64] = data[shoff + 64 : shoff + 128]
    with pytest.raises(BrokenFatbin, match="overlapping"):
        scan(write(tmp_path, bytes(data)))


def test_a_claim_of_countless_sections_costs_nothing(tmp_path):
    data = bytearray(elf({".nv_fatbin": container("sm_90")}))
    (shoff,) = struct.unpack_from("<Q", data, 0x28)
    struct.pack_into("<H", data, 0x3C, 0)
    struct.pack_into("<Q", data, shoff + 32, 1 << 40)  # extended numbering
    with pytest.raises(NotALibrary, match="claims"):
        scan(write(tmp_path, bytes(data)))


def test_a_megabyte_of_containers_is_read_in_time_linear_in_it(tmp_path):
    def seconds(count: int) -> float:
        path = write(tmp_path, elf({".nv_fatbin": container("sm_90") * count}))
        start_s = time.process_time()
        assert scan(path).counts == {"sm_90": count}
        return time.process_time() - start_s

    seconds(1000)
    once_s, eight_times_s = seconds(2_000), seconds(16_000)
    # A reader that looks at everything again for each container would need 64 times as long; 24 leaves room for noise.
    assert eight_times_s < 24 * max(once_s, 0.005)


def test_readers_in_two_threads_do_not_disturb_each_other(tmp_path):
    paths = [libnccl(tmp_path / "a.so", "sm_80 compute_80"), libnccl(tmp_path / "b.so", "sm_90 compute_90")]
    found: dict[str, list[str]] = {}
    threads = [threading.Thread(target=lambda p=p: found.update({p: sm(scan(p))})) for p in paths]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert found == {paths[0]: ["sm_80"], paths[1]: ["sm_90"]}
