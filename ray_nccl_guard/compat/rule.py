"""The judgement: can this library run on this GPU, under this driver and these settings, and if not, what does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from ray_nccl_guard.classes import FailureClass
from ray_nccl_guard.compat.arch import Arch, Capability, Fit, fit
from ray_nccl_guard.compat.driver import FIRST_DRIVER, CudaVersion, cuda_for_ptx, dotted, minimum_driver, parse_cuda
from ray_nccl_guard.compat.fatbin import Images
from ray_nccl_guard.compat.hazards import Effect, Hazard, Known, Version, known_hazard
from ray_nccl_guard.compat.wheels import first_good

# CUDA programming guide, "CUDA Environment Variables": the PTX spelling overrides the other where both are set.
_FORCE_JIT = ("CUDA_FORCE_PTX_JIT", "CUDA_FORCE_JIT")
_FORBID_JIT = ("CUDA_DISABLE_PTX_JIT", "CUDA_DISABLE_JIT")


class Exit(Enum):
    """Exit codes of `compat` (a contract): runs; runs, but look; does not run or cannot be shown to."""

    RUNS = 0
    LOOK = 10
    FAILS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """What becomes of one library on one GPU.

    Attributes:
        capability: the GPU, (major, minor).
        verdict: how the library's code fits.
        image: the image that would run, None if none.
        hazard: a known fault or refusal of this combination, None if none is known.
        why: what the file holds and what the GPU needs, one sentence.
        fix: what to do, empty if nothing.
        driver_cuda_needed: CUDA version that the driver must report for it, None if any that knows the GPU will do.
    """

    capability: Capability
    verdict: Fit
    image: Arch | None
    hazard: Hazard | None
    why: str
    fix: str
    driver_cuda_needed: CudaVersion | None = None

    @property
    def exit(self) -> Exit:
        if self.verdict is Fit.NONE or (self.hazard and self.hazard.effect.fatal):
            return Exit.FAILS
        return Exit.LOOK if self.verdict is Fit.PTX_JIT_ONLY or self.hazard else Exit.RUNS

    @property
    def failure(self) -> FailureClass:
        """The class this judgement foretells; OK if none."""
        if self.verdict is Fit.NONE:
            return FailureClass.NO_KERNEL_IMAGE
        return self.hazard.effect.failure if self.hazard else FailureClass.OK

    @property
    def image_name(self) -> str | None:
        if self.image is None:
            return None
        return self.image.compute if self.verdict is Fit.PTX_JIT_ONLY else self.image.sm


def judge(images: Images, capability: Capability, driver_cuda: CudaVersion | None, env: Mapping[str, str]) -> Judgement:
    """Judge one library for one GPU.

    Args:
        images: what the library holds.
        capability: (major, minor) of the GPU.
        driver_cuda: CUDA version the driver reports (`cuDriverGetVersion`), None if not known: then no PTX is ruled out.
        env: the settings the process will run under; CUDA_FORCE_PTX_JIT, CUDA_DISABLE_PTX_JIT, CUDA_CACHE_DISABLE and
            TORCH_NCCL_USE_COMM_NONBLOCKING matter.
    """
    forced, forbidden = _switch(env, _FORCE_JIT), _switch(env, _FORBID_JIT)
    too_new = {arch for arch in images.ptx if driver_cuda and (_ptx_needs(images, arch) or (0, 0)) > driver_cuda}
    verdict, image = fit(
        capability,
        sass=() if forced else images.sass,
        ptx=() if forbidden else [arch for arch in images.ptx if arch not in too_new],
        sbsa_on_tegra=images.machine == "aarch64" and (parse_cuda(images.cuda_build) or (0, 0)) >= (13, 2),
    )
    jit = verdict is Fit.PTX_JIT_ONLY
    hazard = _driver_hazard(images, driver_cuda)
    if hazard is None and verdict is not Fit.NONE:
        hazard = known_hazard(capability=capability, version=_version(images), image=image, jit=jit, env=env)
    needed = _ptx_needs(images, image) if jit and image else None
    return Judgement(
        capability=capability,
        verdict=verdict,
        image=image,
        hazard=hazard,
        why=_why(images, capability, verdict, image, needed)
        + _settings(
            capability, images, verdict, forced=forced, forbidden=forbidden, too_new=too_new, driver_cuda=driver_cuda
        ),
        fix=_fix(images, capability, verdict, hazard, forced=forced, forbidden=forbidden),
        driver_cuda_needed=needed,
    )


def _switch(env: Mapping[str, str], names: tuple[str, ...]) -> str | None:
    """Which of two spellings is on; the first one set decides."""
    name = next((name for name in names if name in env), None)
    return name if name and env[name] == "1" else None


def _version(images: Images) -> Version | None:
    if images.nccl_version is None:
        return None
    major, minor, patch = (int(part) for part in images.nccl_version.split("."))
    return major, minor, patch


def _ptx_needs(images: Images, arch: Arch) -> CudaVersion | None:
    return cuda_for_ptx(images.ptx_isa[arch]) if arch in images.ptx_isa else None


def _driver_hazard(images: Images, driver_cuda: CudaVersion | None) -> Hazard | None:
    build = parse_cuda(images.cuda_build)
    if build is None or driver_cuda is None or driver_cuda[0] >= build[0]:
        return None
    return Hazard(
        id="driver-older-than-cuda-major",
        effect=Effect.DRIVER_TOO_OLD,
        mechanism=f"the driver reports CUDA {dotted(driver_cuda)}, the library was built with {dotted(build)}:"
        " a driver runs libraries of its own CUDA major and older ones only (error 35)",
        source="CUDA compatibility guide, minor version compatibility",
        known=Known.QUOTED,
        fix=f"install driver {minimum_driver(build) or 'of that major'} or newer, or the build for CUDA {driver_cuda[0]}",
    )


def _why(images: Images, capability: Capability, verdict: Fit, image: Arch | None, needed: CudaVersion | None) -> str:
    gpu = dotted(capability)
    if image is None:
        return f"it holds {holdings(images)}, and compute capability {gpu} runs none of it"
    if verdict is Fit.NATIVE:
        return f"{image.sm} is compiled for compute capability {gpu}"
    if verdict is Fit.BINARY_COMPATIBLE:
        major = image.number // 10
        kin = "all of its family" if image.suffix == "f" else f"{major}.{image.number % 10} and every higher {major}.x"
        return f"{image.sm} code runs on {kin}, {gpu} among them"
    driver = f", which takes a driver of CUDA {dotted(needed)} or newer" + _first_driver(needed) if needed else ""
    return (
        f"no compiled code for {gpu} among {' '.join(a.sm for a in images.sass) or 'its images'}:"
        f" the driver compiles {image.compute} at first use{driver}"
    )


def _first_driver(cuda: CudaVersion) -> str:
    return f" ({FIRST_DRIVER[cuda]})" if cuda in FIRST_DRIVER else ""


def holdings(images: Images) -> str:
    """What a library holds, in one clause."""
    ptx = " ".join(arch.compute for arch in images.ptx)
    return f"{' '.join(arch.sm for arch in images.sass) or 'no compiled code'} and {f'PTX {ptx}' if ptx else 'no PTX'}"


def _settings(
    capability: Capability,
    images: Images,
    verdict: Fit,
    *,
    forced: str | None,
    forbidden: str | None,
    too_new: set[Arch],
    driver_cuda: CudaVersion | None,
) -> str:
    said = []
    if forced:
        said.append(f"{forced}=1 makes CUDA ignore all compiled code")
    if forbidden and fit(capability, sass=(), ptx=images.ptx)[0] is not Fit.NONE:
        said.append(f"{forbidden}=1 forbids compiling its PTX")
    for arch in sorted(too_new) if verdict in (Fit.PTX_JIT_ONLY, Fit.NONE) else ():
        needs = _ptx_needs(images, arch)
        if fit(capability, sass=(), ptx=[arch])[0] is not Fit.NONE and needs and driver_cuda:
            said.append(
                f"{arch.compute} needs a driver of CUDA {dotted(needs)}, this one has {dotted(driver_cuda)} (error 222)"
            )
    return "".join(f"; {part}" for part in said)


def _fix(
    images: Images,
    capability: Capability,
    verdict: Fit,
    hazard: Hazard | None,
    *,
    forced: str | None,
    forbidden: str | None,
) -> str:
    if hazard and hazard.effect in (Effect.DRIVER_TOO_OLD, Effect.MAY_HANG, Effect.SLOW_START):
        return hazard.fix
    if verdict in (Fit.NATIVE, Fit.BINARY_COMPATIBLE) and hazard is None:
        return ""
    if (switch := forced or (forbidden if verdict is Fit.NONE else None)) and fit(
        capability, sass=images.sass, ptx=images.ptx
    )[0] is not (Fit.NONE if verdict is Fit.NONE else verdict):
        return f"unset {switch}"
    if images.nccl_version is None:
        return f"install a build whose architecture list covers {dotted(capability)}"
    return _wheel_fix(capability, parse_cuda(images.cuda_build))


def _wheel_fix(capability: Capability, build: CudaVersion | None) -> str:
    gpu = dotted(capability)
    remedy = first_good(capability, cuda_major=build[0] if build else None)
    if remedy is None:
        return f"no published nvidia-nccl wheel has compiled code for {gpu}: build NCCL from source for it"
    first = remedy.first
    code = " ".join(arch.sm for arch in first.sass)
    other = "" if build and first.cuda_major == build[0] else f", beside a torch build for CUDA {first.cuda_major}"
    return (
        f'pip install "{remedy.requirement}"{other} ({first.version} is the first wheel with compiled code for {gpu}:'
        f" {code}; built with CUDA {first.cuda_build})"
    )
