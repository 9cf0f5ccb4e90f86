"""`compat` in real processes: what it imports, what NVML absent, silent or dead does to it, and which libnccl is loaded."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.unit.compat_files import container, elf, libnccl, version_string

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 120  # of any process here; a loaded machine needs a few seconds


def python(*words: str, path: Path | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    """Run this Python on the package, with `path` before everything else on its sys.path."""
    search = os.pathsep.join(str(p) for p in (path, ROOT) if p)
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("CUDA_", "LD_", "TORCH_"))}
    return subprocess.run(
        [sys.executable, *words], env={**clean, "PYTHONPATH": search, **env}, capture_output=True, text=True,
        timeout=DEADLINE_S, cwd=path or ROOT, check=False,
    )  # fmt: skip


def compat(*words: str, path: Path | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    return python("-m", "ray_nccl_guard", "compat", *words, path=path, **env)


@pytest.fixture
def library(tmp_path):
    return libnccl(tmp_path / "lib" / "libnccl.so.2", "sm_80 sm_90 compute_90", cuda="12.9", isa=(8, 8))


# A stand-in for nvidia-ml-py, since it is the driver that is not here. `BODY` is what nvmlInit does.
PYNVML = """
class NVMLError(Exception): pass
def nvmlInit():
    BODY
def nvmlShutdown(): pass
def nvmlSystemGetDriverVersion(): return "575.51.03"
def nvmlSystemGetCudaDriverVersion_v2(): return 12090
def nvmlDeviceGetCount(): return 2
def nvmlDeviceGetHandleByIndex(i): return i
def nvmlDeviceGetUUID(h): return f"GPU-{h}"
def nvmlDeviceGetName(h): return "NVIDIA H100 80GB HBM3".encode()
def nvmlDeviceGetCudaComputeCapability(h): return (9, 0)
def nvmlDeviceGetMigMode(h): raise NVMLError("Not Supported")
"""


def nvml(tmp_path: Path, body: str = "pass") -> Path:
    folder = tmp_path / "nvml"
    folder.mkdir(exist_ok=True)
    (folder / "pynvml.py").write_text(PYNVML.replace("BODY", body))
    return folder


def test_an_image_build_imports_neither_torch_nor_ray_nor_anything_heavy(library):
    code = (
        "import sys\nfrom ray_nccl_guard.cli import main\n"
        f"code = main(['compat', '--libnccl', {library!r}, '--target', 'sm_90', '--json'])\n"
        "heavy = {'torch', 'ray', 'numpy', 'rich', 'jinja2', 'yaml', 'pynvml'} & set(sys.modules)\n"
        "print(sorted(heavy), file=sys.stderr); sys.exit(code)"
    )
    done = python("-c", code)
    assert (done.returncode, done.stderr.strip()) == (0, "[]")


def test_without_a_target_and_without_nvml_nothing_passes(library):
    done = compat("--libnccl", library)
    if done.returncode != 20:
        pytest.skip("this machine has a GPU, so NVML is present")
    assert "could not be asked for" in done.stderr
    assert "--target" in done.stderr


def test_the_gpus_present_are_judged_and_recorded(tmp_path, library):
    record = tmp_path / "record.json"
    done = compat("--libnccl", library, "--json", "--record", str(record), path=nvml(tmp_path))
    answer = json.loads(done.stdout)
    assert done.returncode == 0, done.stderr
    assert [(t["target"], t["uuid"], t["verdict"]) for t in answer["targets"]] == [
        ("sm_90", "GPU-0", "native"), ("sm_90", "GPU-1", "native")]  # fmt: skip
    assert answer["driver"] == "575.51.03"
    assert [gpu["uuid"] for gpu in json.loads(record.read_text())["gpus"]] == ["GPU-0", "GPU-1"]


def test_only_visible_gpus_are_judged(tmp_path, library):
    done = compat("--libnccl", library, "--json", path=nvml(tmp_path), CUDA_VISIBLE_DEVICES="1")
    assert [t["uuid"] for t in json.loads(done.stdout)["targets"]] == ["GPU-1"]
    assert compat("--libnccl", library, path=nvml(tmp_path), CUDA_VISIBLE_DEVICES="").returncode == 20


def test_an_nvml_that_hangs_is_ended_at_its_deadline_and_is_no_pass(tmp_path, library):
    marker = tmp_path / "pid"
    body = f"import os, time; open({str(marker)!r}, 'w').write(str(os.getpid())); time.sleep(3600)"
    start_s = time.monotonic()
    done = compat("--libnccl", library, "--nvml-timeout", "3", path=nvml(tmp_path, body))
    assert time.monotonic() - start_s < 60
    assert done.returncode == 20
    assert "did not answer within 3 s" in done.stderr
    with pytest.raises(ProcessLookupError):
        os.kill(int(marker.read_text()), 0)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("raise NVMLError('Driver Not Loaded')", "Driver Not Loaded"),
        ("import os; os.abort()", "ended with status -6"),
        ("raise RuntimeError('broken driver')", "broken driver"),
    ],
)
def test_an_nvml_that_fails_or_dies_is_no_pass(tmp_path, library, body, words):
    done = compat("--libnccl", library, path=nvml(tmp_path, body))
    assert done.returncode == 20
    assert words in done.stderr


def test_the_nccl_of_the_installed_torch_is_found_and_scanned_without_importing_it():
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed here")
    done = compat("--target", "sm_90", "--json")
    answer = json.loads(done.stdout)
    if answer["error"] and "the loader would not find it" in answer["error"]:
        pytest.skip(f"no NCCL beside this torch: {answer['error']}")
    assert done.returncode == 0, done.stdout
    assert answer["found_by"].startswith(("the RPATH", "NCCL linked into", "the RUNPATH"))
    assert "sm_90" in answer["sass"]
    assert answer["torch"]["sass"]


@pytest.fixture
def site(tmp_path):
    """A site-packages with a torch of one's own making beside an NCCL for sm_80, sm_90 and sm_110."""
    libnccl(tmp_path / "site/nvidia/nccl/lib/libnccl.so.2", "sm_80 sm_90 sm_110", cuda="13.0", nccl="2.28.9")
    (tmp_path / "site/torch/lib").mkdir(parents=True)
    (tmp_path / "site/torch/__init__.py").write_text("raise ImportError('compat must not import torch')\n")

    def torch(data: bytes | None) -> Path:
        if data is not None:
            (tmp_path / "site/torch/lib/libtorch_cuda.so").write_bytes(data)
        return tmp_path / "site"

    return torch


TAGS = {"needed": ["libnccl.so.2"], "rpath": "$ORIGIN/../../nvidia/nccl/lib"}


def test_a_torch_without_code_for_the_gpu_fails_although_nccl_has_it(site):
    path = site(elf({".nv_fatbin": container("sm_80 sm_90")}, **TAGS))
    done = compat("--target", "sm_110", path=path)
    assert done.returncode == 20
    assert done.stdout.startswith("error[no_kernel_image]: NCCL 2.28.9 runs on sm_110, but torch has no code for it")
    assert compat("--target", "sm_90", path=path).returncode == 0


def test_nccl_linked_into_torch_is_judged_by_that_file(site):
    sections = {".rodata": version_string("2.27.5", "12.9"), ".nv_fatbin": container("sm_90")}
    done = compat("--target", "sm_90", "--json", path=site(elf(sections)))
    answer = json.loads(done.stdout)
    assert (done.returncode, answer["nccl_version"]) == (0, "2.27.5")
    assert answer["found_by"] == "NCCL linked into libtorch_cuda.so"
    assert answer["libnccl"].endswith("libtorch_cuda.so")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (None, "built without CUDA"),
        (b"\x7fELF rubbish", "cut short"),
        (elf({".rodata": b"x"}, **TAGS), "no CUDA code"),
    ],
)
def test_a_torch_without_cuda_or_with_a_broken_library_is_no_pass(site, data, words):
    done = compat("--target", "sm_90", path=site(data))
    assert (done.returncode, done.stdout) == (20, "")
    assert words in done.stderr


def test_without_torch_the_nccl_wheel_is_judged_and_that_is_said(site, tmp_path):
    path = site(None)
    shutil.rmtree(path / "torch")
    # -I and -S leave out site-packages, where a real torch may lie.
    code = (
        f"import sys; sys.path[:0] = [{str(path)!r}, {str(ROOT)!r}]; from ray_nccl_guard.cli import main; sys.exit(main())"
    )
    done = python("-I", "-S", "-c", code, "compat", "--target", "sm_90")
    assert done.returncode == 0, done.stderr
    assert "no torch here that would load it" in done.stdout
    done = python("-I", "-S", "-c", code.replace(str(path), "/nonexistent"), "compat", "--target", "sm_90")
    assert (done.returncode, "no libnccl would be loaded" in done.stderr) == (20, True)


SOURCE = "int ncclGetVersion(int *v) { *v = %d; return 0; }\n"
SHOW = """
import ctypes, json, os, sys
for path in sys.argv[1:]: ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
from ray_nccl_guard.compat.loaded import loaded_libnccl
found = loaded_libnccl()
print(json.dumps(found and [found.path, found.version, found.copies]))
"""


@pytest.fixture
def built(tmp_path):
    """Builds a libnccl.so.2 that knows its version and nothing else."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler here to build two libraries with")

    def build(name: str, version: int) -> str:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "nccl.c").write_text(SOURCE % version)
        target = folder / "libnccl.so.2"
        command = [compiler, "-shared", "-fPIC", "-Wl,-soname,libnccl.so.2", "-o", str(target), str(folder / "nccl.c")]
        subprocess.run(command, check=True, timeout=DEADLINE_S)
        return str(target)

    return build


def show(*libraries: str, **env: str) -> object:
    done = python("-c", SHOW, *libraries, **env)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_no_nccl_loaded_is_none(built):
    built("unused", 23007)
    assert show() is None


def test_the_loaded_nccl_is_the_one_whose_function_answers(built):
    path = built("one", 23007)
    assert show(path) == [path, [2, 30, 7], [path]]


def test_of_two_mapped_copies_the_preloaded_one_is_named_and_both_are_listed(built):
    first, second = built("wheel", 23007), built("preload", 22602)
    path, version, copies = show(first, LD_PRELOAD=second)
    assert (path, version) == (second, [2, 26, 2])
    assert set(copies) == {first, second} or copies == [second]  # a loader may serve both names by one file


@pytest.fixture(scope="module")
def double():
    """The fake NVIDIA libraries, under the real nvidia-ml-py."""
    if importlib.util.find_spec("pynvml") is None:
        pytest.skip("nvidia-ml-py is not installed here")
    from tests.fakegpu.double import CannotBuild, build

    try:
        return build()
    except CannotBuild as reason:
        pytest.skip(f"the double cannot be built: {reason}")


def test_the_real_nvidia_ml_py_is_asked_for_gpus_mig_devices_and_the_driver(double, library):
    done = compat("--libnccl", library, "--json", **double.env(2, cc="9.0", driver="12090", mig="1"))
    answer = json.loads(done.stdout)
    assert done.returncode == 0, done.stdout
    assert [target["target"] for target in answer["targets"]] == ["sm_90", "sm_90"]
    assert answer["driver_cuda"] == "12.9"
    assert all(gpu["uuid"].startswith("GPU-") and gpu["mig_uuids"] for gpu in answer["gpus"])


def test_a_driver_too_old_for_the_ptx_leaves_nothing_to_run(double, library):
    old = compat("--libnccl", library, "--json", **double.env(1, cc="10.0", driver="12040"))
    new = compat("--libnccl", library, "--json", **double.env(1, cc="10.0", driver="12090"))
    assert [(d.returncode, json.loads(d.stdout)["targets"][0]["verdict"]) for d in (old, new)] == [
        (20, "none"), (10, "ptx_jit_only")]  # fmt: skip


def test_an_nvml_library_that_hangs_is_ended(double, library):
    done = compat("--libnccl", library, "--nvml-timeout", "3", **double.env(1, fault="nvmlinit:hang"))
    assert done.returncode == 20
    assert "did not answer within 3 s" in done.stderr


def test_a_preloaded_stand_in_is_found_first_and_never_passes(double):
    done = compat("--target", "sm_90", **double.env(1))
    assert done.returncode == 20
    assert "holds no CUDA code" in done.stderr


def test_a_large_file_takes_little_memory(tmp_path):
    path = tmp_path / "libnccl.so.2"
    path.write_bytes(elf({".nv_fatbin": container("sm_90") + b"\0" * (150 << 20) + container("sm_90")}))
    # VmHWM and not ru_maxrss, which a child inherits from the process that started it.
    code = (
        "import re, sys\nfrom ray_nccl_guard.compat.fatbin import scan\n"
        "peak_kib = lambda: int(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1])\n"
        "before = peak_kib()\nassert scan(sys.argv[1]).counts == {'sm_90': 2}\nprint(peak_kib() - before)"
    )
    done = python("-c", code, str(path))
    path.unlink()  # pytest keeps the last folders
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 60 * 1024  # KiB; a reader that keeps every page it looked at takes 150 MiB
