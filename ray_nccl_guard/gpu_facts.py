"""Facts about one rank's GPU and the libraries it will use: NVML, the images in libnccl and libtorch_cuda. No CUDA call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ray_nccl_guard.classes import FailureClass
from ray_nccl_guard.compat import record
from ray_nccl_guard.compat.arch import Fit
from ray_nccl_guard.compat.driver import dotted
from ray_nccl_guard.compat.errors import CompatError
from ray_nccl_guard.compat.fatbin import Images, scan
from ray_nccl_guard.compat.fingerprint import fingerprint
from ray_nccl_guard.compat.gpus import Gpu as ListedGpu
from ray_nccl_guard.compat.gpus import GpusHere, gpus_here, numbered
from ray_nccl_guard.compat.loaded import LoadedLibrary, loaded_libnccl
from ray_nccl_guard.compat.locate import find_libnccl, find_libtorch_cuda
from ray_nccl_guard.compat.rule import Judgement, judge
from ray_nccl_guard.facts import Finding, Gpu

# A volume that init and main container share (`ray-nccl-guard compat --record FILE`).
RECORD_VARIABLE = "RAY_NCCL_GUARD_COMPAT_RECORD"


def collect(rank: int, device_index: int, environ: Mapping[str, str]) -> dict[str, Any]:
    """Fields of `RankFacts` for a rank with a GPU. What could not be asked stands in `not_run`, never as passed."""
    not_run: dict[str, str] = {}
    here = gpus_here()
    if here.not_run:
        not_run["NVML"] = here.not_run
    listed, uuid = _of_index(here, device_index, environ)
    library, images, torch_images = _libraries(not_run)
    findings: list[Finding] = []
    notes: list[str] = []
    jit = False
    if listed is not None and images is not None:
        judgement = judge(images, listed.capability, here.driver_cuda, environ)
        findings += _findings(rank, judgement, images, listed)
        jit = judgement.verdict is Fit.PTX_JIT_ONLY
        notes += _notes(rank, judgement, images, listed)
        if (
            torch_images is not None
            and judge(torch_images, listed.capability, here.driver_cuda, environ).verdict is Fit.NONE
        ):
            # Without torch's own code there is nothing to train with, and gloo is no way out: the device step will say it.
            findings.append(
                Finding(
                    failure=FailureClass.NO_KERNEL_IMAGE.value,
                    text=f"torch itself has no code for {listed.name} (compute capability {dotted(listed.capability)})",
                    culprit_ranks=(rank,),
                )
            )
    notes += _swapped(rank, loaded_libnccl(), library)
    return {
        "gpu": None if listed is None else Gpu(uuid=uuid, name=listed.name, capability=listed.capability),
        "gpu_count": len(here.gpus) if not here.not_run else None,
        "driver_version": here.driver or "",
        "driver_cuda": here.driver_cuda,
        "libnccl": library,
        "jit": jit,
        "findings": tuple(findings),
        "notes": (*notes, *_another_gpu(rank, listed, environ, not_run)),
        "not_run": not_run,
    }


def _of_index(here: GpusHere, device_index: int, environ: Mapping[str, str]) -> tuple[ListedGpu | None, str]:
    """The GPU of a device index and the device's own UUID, which is a MIG device's where CUDA_VISIBLE_DEVICES names one."""
    seen = numbered(here.gpus, environ)
    return seen[device_index] if device_index < len(seen) else (None, "")


def _libraries(not_run: dict[str, str]) -> tuple[dict[str, str], Images | None, Images | None]:
    library = find_libnccl()
    if library is None:
        not_run["libnccl"] = "no libnccl was found that this process would load"
        return {}, None, None
    known = {"path": library.path, "found_by": library.via.value}
    images = _scan(library.path, "libnccl", not_run)
    if images is not None:
        known |= {
            "version": images.nccl_version or "",
            "cuda": images.cuda_build or "",
            "fingerprint": fingerprint(library.path),
        }
    torch_library = find_libtorch_cuda()
    torch_images = None if torch_library is None else _scan(torch_library.path, "libtorch_cuda", not_run)
    return known, images, torch_images


def _scan(path: str, name: str, not_run: dict[str, str]) -> Images | None:
    try:
        images = scan(path)
    except CompatError as error:
        not_run[f"images of {name}"] = str(error)
        return None
    if not images.sass and not images.ptx:
        not_run[f"images of {name}"] = f"{path} holds no GPU code at all"
        return None
    return images


def _findings(rank: int, judgement: Judgement, images: Images, gpu: ListedGpu) -> list[Finding]:
    if judgement.verdict is Fit.NONE:
        text = f"NCCL {images.nccl_version} has no code for {gpu.name}: {judgement.why}"
        return [Finding(failure=FailureClass.NO_KERNEL_IMAGE.value, text=text, decides=True, culprit_ranks=(rank,))]
    hazard = judgement.hazard
    if hazard is None or hazard.effect.failure is FailureClass.OK:
        return []
    text = f"known hazard {hazard.id}: {hazard.mechanism} ({hazard.source})"
    return [Finding(failure=hazard.effect.failure.value, text=text, culprit_ranks=(rank,))]


def _notes(rank: int, judgement: Judgement, images: Images, gpu: ListedGpu) -> list[str]:
    """What is worth a line also where the probe passes: a known hazard, and a first start that waits for a compilation."""
    notes = []
    if judgement.hazard is not None:
        notes.append(
            f"rank {rank}: NCCL {images.nccl_version} on {gpu.name} is a known hazard ({judgement.hazard.effect.value}): "
            f"{judgement.hazard.mechanism}; {judgement.hazard.fix}"
        )
    if judgement.verdict is Fit.PTX_JIT_ONLY:
        notes.append(
            f"rank {rank}: NCCL {images.nccl_version} has no compiled code for {gpu.name}; the driver compiles it at first use"
        )
    return notes


def _swapped(rank: int, loaded: LoadedLibrary | None, library: dict[str, str]) -> list[str]:
    """Keep which NCCL this process has in fact loaded, and say where that is not the one torch was built with."""
    if loaded is None:
        return []  # nothing has loaded torch here yet: the file that will be loaded is what there is to know
    version = ".".join(map(str, loaded.version))
    library |= {"loaded": loaded.path, "loaded_version": version}
    notes = []
    if loaded.swapped and loaded.compiled is not None:
        compiled = ".".join(map(str, loaded.compiled))
        notes.append(f"rank {rank}: NCCL {version} is loaded from {loaded.path}, and torch was compiled against {compiled}")
    if len(loaded.copies) > 1:
        notes.append(f"rank {rank}: {len(loaded.copies)} copies of libnccl are mapped: {', '.join(loaded.copies)}")
    return notes


def _another_gpu(rank: int, gpu: ListedGpu | None, environ: Mapping[str, str], not_run: dict[str, str]) -> tuple[str, ...]:
    """Say so when the init container's gate has judged another GPU than this rank got."""
    path = environ.get(RECORD_VARIABLE)
    if not path:
        return ()
    try:
        strangers = record.strangers(record.read(path), [gpu.uuid] if gpu else [])
    except CompatError as error:
        not_run["compat record"] = str(error)
        return ()
    return tuple(f"rank {rank} got GPU {uuid}, which the gate recorded in {path} had not judged" for uuid in strangers)
