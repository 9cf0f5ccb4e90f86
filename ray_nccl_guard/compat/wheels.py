"""Which published nvidia-nccl wheel first carries code for a GPU: the answer to "what do I install"."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ray_nccl_guard.compat.arch import Arch, Capability, Fit, fit
from ray_nccl_guard.compat.hazards import Hazard, Version, known_hazard
from ray_nccl_guard.compat.wheel_images import ROWS


@dataclass(frozen=True, slots=True, kw_only=True)
class Wheel:
    """A published wheel and what its libnccl holds, as scanned.

    Attributes:
        package, version: as pip names them. cuda_build: the CUDA that compiled it.
        nccl_version: what the library calls itself (2.26.2.post1 calls itself 2.26.2).
        sass, ptx: images every kernel has. ptx_isa: the highest PTX ISA, None without PTX.
    """

    package: str
    version: str
    nccl_version: str
    cuda_build: str
    sass: tuple[Arch, ...]
    ptx: tuple[Arch, ...]
    ptx_isa: tuple[int, int] | None

    @property
    def cuda_major(self) -> int:
        return int(self.cuda_build.split(".")[0])

    def judge(self, capability: Capability) -> tuple[Fit, Hazard | None]:
        """How this wheel's code fits a GPU, with the hazard that the combination is known for."""
        major, minor, patch = (int(part) for part in self.nccl_version.split("."))
        version: Version = (major, minor, patch)
        how, image = fit(capability, sass=self.sass, ptx=self.ptx)
        if image is None:
            return how, None
        jit = how is Fit.PTX_JIT_ONLY
        return how, known_hazard(capability=capability, version=version, image=image, jit=jit, env={})

    def runs(self, capability: Capability) -> bool:
        """True if compiled code in it runs on the GPU and nothing fatal is known of that."""
        how, hazard = self.judge(capability)
        return how in (Fit.NATIVE, Fit.BINARY_COMPATIBLE) and not (hazard and hazard.effect.fatal)


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """The wheels of one package that run on a GPU: the first, and the last if newer ones dropped the GPU again."""

    first: Wheel
    last: Wheel | None

    @property
    def requirement(self) -> str:
        """As pip takes it: "nvidia-nccl-cu12>=2.26.2.post1"."""
        upper = f",<={self.last.version}" if self.last else ""
        return f"{self.first.package}>={self.first.version}{upper}"


def _architectures(text: str) -> tuple[Arch, ...]:
    return tuple(Arch(int(number), suffix) for number, suffix in re.findall(r"(\d+)([af]?)", text))


def _wheel(row: str) -> Wheel:
    package, version, nccl, cuda, sass, ptx, isa = (part.strip() for part in row.split("|"))
    major, _, minor = isa.partition(".")
    return Wheel(
        package=package,
        version=version,
        nccl_version=nccl,
        cuda_build=cuda,
        sass=_architectures(sass),
        ptx=_architectures(ptx),
        ptx_isa=(int(major), int(minor)) if minor else None,
    )


def all_wheels() -> tuple[Wheel, ...]:
    """Every scanned wheel, by package and then in the order of release numbers."""
    return tuple(_wheel(line) for line in ROWS.strip().splitlines())


def first_good(capability: Capability, *, cuda_major: int | None) -> Remedy | None:
    """The first wheel whose compiled code runs on a GPU, of the library's own CUDA major if there is one.

    Only x86_64 wheels were scanned; aarch64 wheels of the same version may differ.
    """
    known = all_wheels()
    majors = sorted({wheel.cuda_major for wheel in known}, key=lambda major: (major != cuda_major, -major))
    for major in majors:
        family = [wheel for wheel in known if wheel.cuda_major == major]
        good = [wheel for wheel in family if wheel.runs(capability)]
        if good:
            return Remedy(first=good[0], last=None if good[-1] is family[-1] else good[-1])
    return None
