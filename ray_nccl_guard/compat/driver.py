"""What the NVIDIA driver must be: for the CUDA that built a library, and for the PTX that it must compile."""

from __future__ import annotations

import re

CudaVersion = tuple[int, int]

# CUDA release notes, "CUDA Toolkit and Corresponding Driver Versions", Linux x86_64: the driver of each toolkit's first
# release. It is the first driver that reports that CUDA version, hence the first that compiles that toolkit's PTX.
FIRST_DRIVER: dict[CudaVersion, str] = {
    (11, 0): "450.36.06",
    (11, 1): "455.23",
    (11, 2): "460.27.03",
    (11, 3): "465.19.01",
    (11, 4): "470.42.01",
    (11, 5): "495.29.05",
    (11, 6): "510.39.01",
    (11, 7): "515.43.04",
    (11, 8): "520.61.05",
    (12, 0): "525.60.13",
    (12, 1): "530.30.02",
    (12, 2): "535.54.03",
    (12, 3): "545.23.06",
    (12, 4): "550.54.14",
    (12, 5): "555.42.02",
    (12, 6): "560.28.03",
    (12, 8): "570.26",
    (12, 9): "575.51.03",
    (13, 0): "580.65.06",
    (13, 1): "590.44.01",
    (13, 2): "595.45.04",
    (13, 3): "610.43.02",
}

# The same document, "Minor Version Compatibility": the oldest driver that runs compiled code (not PTX) of a whole major.
FLOOR: dict[int, str] = {11: "450.80.02", 12: "525.60.13", 13: "580.65.06"}


def cuda_of_driver(driver: str) -> CudaVersion | None:
    """The CUDA version a kernel driver of this version reports, None if it is older than the table or no version.

    A forward-compatibility libcuda may report a newer one: ask `cuDriverGetVersion` where that is possible.
    """
    numbers = _numbers(driver)
    if not numbers:
        return None
    fits = [cuda for cuda, first in FIRST_DRIVER.items() if _numbers(first) <= numbers]
    return max(fits, default=None)


def minimum_driver(cuda_build: CudaVersion) -> str | None:
    """The oldest driver that runs compiled code built by this CUDA; None if the major is not in the table."""
    return FLOOR.get(cuda_build[0])


def cuda_for_ptx(isa: tuple[int, int]) -> CudaVersion | None:
    """The CUDA version that a driver must report to compile this PTX ISA; None if not known.

    PTX ISA manual, "Release Notes": 7.N came with 11.N, 8.N with 12.N up to 8.5 (12.5 and 12.6), 8.6 with 12.7,
    8.7 with 12.8, 8.8 with 12.9, 9.N with 13.N. Minor-version compatibility does not cover it: an older driver answers
    cudaErrorUnsupportedPtxVersion (222).
    """
    major, minor = isa
    if major == 8:
        return 12, minor if minor < 6 else minor + 1
    return {7: (11, minor), 9: (13, minor)}.get(major)


def parse_cuda(text: str | None) -> CudaVersion | None:
    """ "13.3" as (13, 3); None for anything else."""
    found = re.fullmatch(r"(\d{1,3})\.(\d{1,3})(?:\.\d+)?", text or "")
    return (int(found[1]), int(found[2])) if found else None


def dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")) if re.fullmatch(r"\d+(\.\d+)*", text) else ()
