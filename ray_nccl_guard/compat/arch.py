"""GPU architectures as CUDA writes them (sm_90, compute_120, sm_100f), and which image runs on which GPU."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

Capability = tuple[int, int]


@dataclass(frozen=True, slots=True, order=True)
class Arch:
    """One architecture: its number (90 is 9.0) and its suffix ("" plain, "a" this GPU only, "f" its family)."""

    number: int
    suffix: str = ""

    @property
    def sm(self) -> str:
        return f"sm_{self.number}{self.suffix}"

    @property
    def compute(self) -> str:
        return f"compute_{self.number}{self.suffix}"


class Fit(Enum):
    """How a library's code fits a GPU, best first.

    NATIVE: compiled for this very GPU. BINARY_COMPATIBLE: compiled for a lower minor of the same major, or for its family.
    PTX_JIT_ONLY: the driver must compile PTX at first use. NONE: nothing in the file can run there.
    """

    NATIVE = "native"
    BINARY_COMPATIBLE = "binary_compatible"
    PTX_JIT_ONLY = "ptx_jit_only"
    NONE = "none"


_RANK = {fit: rank for rank, fit in enumerate(Fit)}

# Integrated GPUs (Jetson, Drive). The CUDA programming guide promises binary compatibility for desktop GPUs only, and
# torch/cuda/__init__.py (DEVICE_REQUIREMENT, 2.15.0) excludes the same ones.
TEGRA = frozenset({53, 62, 72, 87, 101, 110})

# CUDA 13 renamed sm_101 (Thor) to sm_110: the two numbers are one GPU.
_RENAMED = frozenset({101, 110})

# "f" images: CUDA programming guide, "Family-Specific Compatibility"; older copies of that table lack 10.7. The cells agree
# with what ptxas 13.5 accepts (19 targets x 25 architectures, tried one by one).
FAMILY: Mapping[int, frozenset[int]] = {
    100: frozenset({100, 103, 107}),
    101: frozenset({101, 110}),
    103: frozenset({103, 107}),
    107: frozenset({107}),
    110: frozenset({101, 110}),
    120: frozenset({120, 121}),
    121: frozenset({121}),
}


def number_of(capability: Capability) -> int:
    """The architecture number of a compute capability: (9, 0) is 90."""
    return capability[0] * 10 + capability[1]


def fit(
    capability: Capability, *, sass: Iterable[Arch], ptx: Iterable[Arch], sbsa_on_tegra: bool = False
) -> tuple[Fit, Arch | None]:
    """Which of a library's images runs on a GPU, and how; the best of all images wins.

    The rule is the CUDA programming guide's: SASS sm_XY runs on X.Z for Z >= Y, never across majors; plain PTX is compiled
    upward to any GPU, never downward; "a" code runs on its own GPU only, "f" code on its family.

    Args:
        capability: (major, minor) of the GPU.
        sass: compiled images. ptx: intermediate ones.
        sbsa_on_tegra: from CUDA 13.2 on, server (SBSA) binaries may run on Jetson (torch 2.15.0 lifts the exclusions).
    """
    gpu = number_of(capability)
    offers = [(how, arch) for arch in sass if (how := _sass_fit(arch, gpu, sbsa_on_tegra)) is not Fit.NONE]
    offers += [(Fit.PTX_JIT_ONLY, arch) for arch in ptx if _ptx_fits(arch, gpu)]
    if not offers:
        return Fit.NONE, None
    # The highest image among equals, a suffixed one before a plain one: it is the one built for that GPU.
    return min(offers, key=lambda offer: (_RANK[offer[0]], -offer[1].number, offer[1].suffix == ""))


def _sass_fit(arch: Arch, gpu: int, sbsa_on_tegra: bool) -> Fit:
    if arch.number == gpu or {arch.number, gpu} == _RENAMED:
        return Fit.NATIVE
    if arch.suffix == "f":
        return Fit.BINARY_COMPATIBLE if gpu in FAMILY.get(arch.number, ()) else Fit.NONE
    if arch.suffix or arch.number // 10 != gpu // 10 or arch.number > gpu:
        return Fit.NONE
    desktop = arch.number not in TEGRA and (gpu not in TEGRA or sbsa_on_tegra)
    return Fit.BINARY_COMPATIBLE if desktop else Fit.NONE


def _ptx_fits(arch: Arch, gpu: int) -> bool:
    if arch.suffix == "a":
        return arch.number == gpu
    if arch.suffix == "f":
        return gpu in FAMILY.get(arch.number, ())
    return arch.number <= gpu
