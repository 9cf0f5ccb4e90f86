"""Known combinations that fault or are refused although an image exists, with mechanism, source, and how sure that is.

A hazard is not a verdict: the guard probes with sizes past its threshold, and only a failure gets the mechanism as cause.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from ray_nccl_guard.classes import FailureClass
from ray_nccl_guard.compat.arch import Arch, Capability

Version = tuple[int, int, int]


class Effect(Enum):
    """What happens when the hazard strikes."""

    ILLEGAL_ACCESS_700 = "illegal_access_700"
    INIT_REFUSED = "init_refused"
    LAUNCH_FAILS = "launch_fails"
    DRIVER_TOO_OLD = "driver_too_old"
    MAY_HANG = "may_hang"
    SLOW_START = "slow_start"

    @property
    def fatal(self) -> bool:
        """True where the run is known to fault or to be refused; False where it may pass, slowly or by luck."""
        return self not in (Effect.MAY_HANG, Effect.SLOW_START)

    @property
    def failure(self) -> FailureClass:
        """The class of the failure that this effect causes; OK where it only costs time."""
        return _CLASS[self]


_CLASS = {
    Effect.ILLEGAL_ACCESS_700: FailureClass.ILLEGAL_MEMORY_ACCESS,
    # Both are cured by what cures a missing image: a libnccl built for the GPU.
    Effect.INIT_REFUSED: FailureClass.NO_KERNEL_IMAGE,
    Effect.LAUNCH_FAILS: FailureClass.NO_KERNEL_IMAGE,
    Effect.DRIVER_TOO_OLD: FailureClass.DRIVER_TOO_OLD,
    Effect.MAY_HANG: FailureClass.INIT_TIMEOUT_HANG,
    Effect.SLOW_START: FailureClass.OK,
}


class Known(Enum):
    """How a hazard is known. None of them was run on a GPU by this project."""

    READ = "read in NCCL's source and disassembled from the shipped binary; it agrees with the public reports named"
    QUOTED = "stated by the maintainers or the vendor's documentation"
    INFERRED = "inferred from the source; no report seen"


@dataclass(frozen=True, slots=True, kw_only=True)
class Hazard:
    """One known hazard.

    Attributes:
        id: stable name. effect: what happens.
        mechanism: why, one sentence. source: where that is established. known: how sure it is.
        min_bytes: message size from which it strikes, None if at any.
        fix: what to do.
        capabilities: GPUs, as (major, minor); a minor of None means every minor. Empty: every GPU.
        since, before: NCCL versions, `before` excluded; None: no bound.
        images: lowest and highest architecture number of the image that would run; None: any.
        env: settings that must be present for it to strike.
        jit_only: strikes only where the driver must compile PTX.
    """

    id: str
    effect: Effect
    mechanism: str
    source: str
    known: Known
    fix: str
    min_bytes: int | None = None
    capabilities: tuple[tuple[int, int | None], ...] = ()
    since: Version | None = None
    before: Version | None = None
    images: tuple[int, int] | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    jit_only: bool = False

    def applies(
        self, *, capability: Capability, version: Version | None, image: Arch | None, jit: bool, env: Mapping[str, str]
    ) -> bool:
        """True if this NCCL, running this image on this GPU, meets it. An unknown version meets no versioned hazard."""
        if self.capabilities and not any(
            major == capability[0] and minor in (None, capability[1]) for major, minor in self.capabilities
        ):
            return False
        if (self.since or self.before) and version is None:
            return False
        if version is not None and not ((self.since or version) <= version and (not self.before or version < self.before)):
            return False
        if self.images and (image is None or not self.images[0] <= image.number <= self.images[1]):
            return False
        return (jit or not self.jit_only) and all(env.get(name) == value for name, value in self.env.items())


_SHARED_MEMORY = (
    "the host sizes NCCL's dynamic shared memory by the GPU (12.0: 61760 bytes), the kernel strides it by the architecture"
    " it was compiled for (compute_90: 4112 bytes a warp, not 3088), so from warp 15 up it leaves its allocation"
)
_TOO_MUCH_SHARED_MEMORY = (
    "this NCCL asks for 82240 bytes of dynamic shared memory beside about 21520 static ones,"
    " and compute capability 12.x has 101376"
)

# The first that applies is reported: faults before refusals, fatal before the rest.
HAZARDS: tuple[Hazard, ...] = (
    Hazard(
        id="nccl-cc120-shared-memory-stride",
        effect=Effect.ILLEGAL_ACCESS_700,
        mechanism=_SHARED_MEMORY,
        source="NCCL v2.26.2 src/include/device.h (ncclCollUnroll); NVIDIA/nccl#2418, NVIDIA/nccl#1852, pytorch#152302",
        known=Known.READ,
        min_bytes=524_288,  # nccl#2418: passes below, fails at 524288 bytes; nccl#1852: from 512K
        fix="use an NCCL whose images include sm_120",
        capabilities=((12, 0),),
        since=(2, 26, 2),
        images=(80, 119),
    ),
    Hazard(
        id="nccl-cc121-shared-memory-stride",
        effect=Effect.ILLEGAL_ACCESS_700,
        mechanism=_SHARED_MEMORY,
        source="NCCL v2.27.3 src/include/device.h (ncclCollUnroll treats every 12.x like 12.0)",
        known=Known.INFERRED,
        min_bytes=524_288,  # as on 12.0
        fix="use an NCCL whose images include sm_120",
        capabilities=((12, None),),
        since=(2, 27, 3),
        images=(80, 119),
    ),
    Hazard(
        id="nccl-cc12x-init-refused",
        effect=Effect.INIT_REFUSED,
        mechanism=_TOO_MUCH_SHARED_MEMORY + "; 2.25.1 checks this at init and refuses",
        source="NVIDIA/nccl#1637 (maintainers, of 2.25.1); 2.25.1.post1's compute_120 PTX has the same stride and sizes",
        known=Known.QUOTED,
        fix="use NCCL 2.26.2 or newer whose images include sm_120",
        capabilities=((12, None),),
        since=(2, 25, 1),
        before=(2, 26, 2),
        images=(90, 121),
    ),
    Hazard(
        id="nccl-cc121-init-refused",
        effect=Effect.INIT_REFUSED,
        mechanism=_TOO_MUCH_SHARED_MEMORY + "; NCCL 2.26 makes an exception for 12.0 alone",
        source="NCCL v2.26.2 src/include/device.h (compares with 1200); 2.27.3 adds DGX Spark in its release notes",
        known=Known.INFERRED,
        fix="use NCCL 2.27.3 or newer whose images include sm_120",
        capabilities=((12, 1),),
        since=(2, 26, 2),
        before=(2, 27, 3),
        images=(90, 121),
    ),
    Hazard(
        id="nccl-cc12x-launch-fails",
        effect=Effect.LAUNCH_FAILS,
        mechanism=_TOO_MUCH_SHARED_MEMORY + "; versions before 2.25.1 do not check, so the launch itself must fail",
        source="NCCL v2.21.5 to v2.24.3 sources; the arithmetic of NVIDIA/nccl#1637",
        known=Known.INFERRED,
        fix="use an NCCL whose images include sm_120",
        capabilities=((12, None),),
        since=(2, 21, 5),
        before=(2, 25, 1),
        images=(90, 121),
    ),
    Hazard(
        id="nccl-226-nonblocking-init-hang",
        effect=Effect.MAY_HANG,
        mechanism="NCCL 2.26 can hang at random when a communicator is made in non-blocking mode",
        source="pytorch#153960 and PR pytorch#154055 (NCCL 2.26, 8x H100, init with device_id)",
        known=Known.QUOTED,
        fix="unset TORCH_NCCL_USE_COMM_NONBLOCKING (torch 2.7.0 turns it on by default with device_id: set it to 0 there)",
        since=(2, 26, 0),
        before=(2, 27, 0),
        env={"TORCH_NCCL_USE_COMM_NONBLOCKING": "1"},
    ),
    Hazard(
        id="cuda-jit-without-cache",
        effect=Effect.SLOW_START,
        mechanism="CUDA_CACHE_DISABLE=1 makes the driver compile the library's PTX again at every start of every process",
        source="CUDA programming guide, environment variables",
        known=Known.QUOTED,
        fix="unset CUDA_CACHE_DISABLE, or use an NCCL with compiled code for this GPU",
        env={"CUDA_CACHE_DISABLE": "1"},
        jit_only=True,
    ),
)


def known_hazard(
    *, capability: Capability, version: Version | None, image: Arch | None, jit: bool, env: Mapping[str, str]
) -> Hazard | None:
    """The first known hazard that this combination meets, None if none is known."""
    return next(
        (h for h in HAZARDS if h.applies(capability=capability, version=version, image=image, jit=jit, env=env)), None
    )
