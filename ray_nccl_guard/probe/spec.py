"""What a probe is asked to do, and what one rank's probe answers. Standard library only: everything here travels by pickle."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from enum import Enum

from ray_nccl_guard.probe.drill import Fault

KIB, MIB = 1 << 10, 1 << 20


class Step(Enum):
    """The steps of a probe, in order. Each has its own deadline and its own verdict (DESIGN D5)."""

    STORE = "store"
    PEERS = "peers"
    IMPORT = "import"
    DEVICE = "device"
    COMM_INIT = "comm_init"
    COLLECTIVE = "collective"
    TEARDOWN = "teardown"

    @property
    def position(self) -> int:
        """0 for the first step; ranks are compared by how far they got, never by two hosts' clocks."""
        return list(Step).index(self)


class Outcome(Enum):
    """How one rank's probe ended.

    `WAITING` is a rank that was cut short because another had failed: it accuses nobody and is accused of nothing.
    `MISSING` is a rank that gave no answer at all; `NOT_RUN` one that was never asked.
    """

    OK = "ok"
    FAILED = "failed"
    DIED = "died"
    TIMED_OUT = "timed_out"
    WAITING = "waiting"
    MISSING = "missing"
    NOT_RUN = "not_run"


class Start(Enum):
    """How the disposable child is started. `AUTO` forks, and spawns where a fork is not safe (DESIGN D3)."""

    AUTO = "auto"
    FORK = "fork"
    SPAWN = "spawn"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeSpec:
    """Deadlines and sizes of the probe. All durations are seconds, all sizes bytes.

    Attributes:
        store_s: TCP connect to the store and the barrier that tells who is absent.
        peers_s: TCP connections among the hosts.
        import_s: a spawned child's `import torch` (7 to 50 s were measured on a loaded box); a forked child has it already.
        device_s: CUDA initialisation on the worker's device.
        comm_init_s: unique id and `ncclCommInitRank`, plus `comm_init_per_rank_s` for each rank (rings and trees are built
            rank by rank) and 300 s once when libnccl has to be compiled for this GPU by the driver.
        collective_s: the warm-up collectives together.
        teardown_s: destroying the group and ending the child.
        sizes_bytes: the all_reduce sizes. NVIDIA/nccl#2418 faults from 512 KiB up only, one DDP bucket is 25 MiB, so
            a probe of one small size proves little. Sizes above 1 MiB are used on NCCL only.
        start: how the child is started.
    """

    store_s: float = 10.0
    peers_s: float = 5.0
    import_s: float = 120.0
    device_s: float = 30.0
    comm_init_s: float = 30.0
    comm_init_per_rank_s: float = 0.1
    collective_s: float = 10.0
    teardown_s: float = 5.0
    sizes_bytes: tuple[int, ...] = (4, MIB, 32 * MIB)
    start: Start = Start.AUTO

    def __post_init__(self) -> None:
        for name in ("store_s", "peers_s", "import_s", "device_s", "comm_init_s", "collective_s", "teardown_s"):
            if not getattr(self, name) > 0:
                raise ValueError(
                    f"ProbeSpec.{name} is a deadline in seconds and must be above 0, not {getattr(self, name)!r}"
                )
        if self.comm_init_per_rank_s < 0:
            raise ValueError("ProbeSpec.comm_init_per_rank_s must not be negative")
        if not self.sizes_bytes or any(size < 4 for size in self.sizes_bytes):
            raise ValueError(f"ProbeSpec.sizes_bytes needs at least one size of 4 bytes or more, not {self.sizes_bytes!r}")

    def deadline_s(self, step: Step, world_size: int) -> float:
        """Seconds that `step` may take in a world of `world_size` ranks."""
        if step is Step.COMM_INIT:
            return self.comm_init_s + self.comm_init_per_rank_s * world_size
        return float(getattr(self, f"{step.value}_s"))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One step of one rank: how it ended, after how many seconds, and what it says of itself."""

    step: Step
    outcome: Outcome
    seconds: float
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLine:
    """One line that a rank's child printed.

    Attributes:
        source: where it stood: `output` (the child's stdout and stderr), `nccl` (NCCL's debug log), or a file name.
        number: its line number there, from 1.
    """

    source: str
    number: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeResult:
    """What one rank's probe answered.

    Attributes:
        step: the step it ended in; None if it never began.
        detail: where inside the step, e.g. `all_reduce 1048576 B`.
        error: the exception as `Type: text`, empty if none was raised.
        exit_code: the child's own exit code; `signal` if a signal ended it instead.
        killed_by_guard: the signal was ours, after a deadline or another rank's failure.
        lines: the tail of what the child printed and of NCCL's debug log.
        silent_s: seconds since the child's Python last ran when the guard gave up on it. Large while the other
            ranks' are small: the process holds the GIL or is stopped.
        process_state: the child's state letter in /proc when the guard gave up on it, e.g. `T` for stopped.
        proved: the collectives that completed with right values.
        all_reduce_s: seconds of all_reduce by its size in bytes: what a fall-back costs is said from these. Of the first
            call, or of a warm one where the task asked for the price.
        nccl_s: seconds of the phases of NCCL's start, by NCCL's own words for them (`probe.nccl_timings`); empty if its log
            did not tell.
        device: the device it ran on, e.g. `cuda:1`, `cpu`.
        free_before_bytes, free_after_bytes: device memory free before and after the group was made.
        kernel_lines: what the kernel log and the cgroup counted against this rank since the child began.
        stuck: the child could not be reaped after SIGKILL; it sits in the driver.
        start: how the child was started.
        seconds: the whole probe on this rank.
    """

    rank: int
    outcome: Outcome
    step: Step | None = None
    detail: str = ""
    error: str = ""
    exit_code: int | None = None
    signal: int | None = None
    killed_by_guard: bool = False
    steps: tuple[StepRecord, ...] = ()
    lines: tuple[LogLine, ...] = ()
    silent_s: float = 0.0
    process_state: str = ""
    proved: tuple[str, ...] = ()
    all_reduce_s: dict[int, float] = field(default_factory=dict)
    nccl_s: dict[str, float] = field(default_factory=dict)
    device: str = ""
    free_before_bytes: int | None = None
    free_after_bytes: int | None = None
    kernel_lines: tuple[str, ...] = ()
    stuck: bool = False
    start: Start = Start.AUTO
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTask:
    """All that one rank's launcher has to know. `run_id` separates the keys of two probes in one store.

    Attributes:
        backend: the process group's backend name as torch takes it.
        device_index: index among the process's visible GPUs; None for the CPU.
        local_rank: index of the rank among those of its node.
        collectives: names of the operations to prove, see `probe.operations.OPERATIONS`.
        env: variables to set in the child before it touches NCCL; the same on every rank.
        unset_env: variables to take away in the child.
        price: measure all_reduce for the price of training on this backend as well; for what is fallen back to.
        jit_s: seconds to add to `comm_init` because the driver must compile libnccl for this GPU.
        accept_s: seconds that the store takes for one connection (`probe.store.Opened`): each rank's launcher connects, and
            then each rank's child.
        drill: the steps are acted out, without NCCL and the device, and these faults strike this rank; None for a real probe.
        within_s: seconds for the whole probe of this rank, whatever its steps may take: what is left of the ladder's budget.
    """

    run_id: str
    backend: str
    rank: int
    world_size: int
    store_host: str
    store_port: int
    device_index: int | None = None
    local_rank: int = 0
    collectives: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    unset_env: tuple[str, ...] = ()
    price: bool = False
    jit_s: float = 0.0
    accept_s: float = 0.0
    drill: tuple[Fault, ...] | None = None
    within_s: float = math.inf
    spec: ProbeSpec = ProbeSpec()

    def deadline_s(self, step: Step) -> float:
        extra_s = self.jit_s if step is Step.COMM_INIT else 0.0
        if step in (Step.STORE, Step.COMM_INIT):
            extra_s += self.accept_s * self.world_size
        return min(self.spec.deadline_s(step, self.world_size) + extra_s, self.within_s)

    def with_start(self, start: Start) -> RankTask:
        return replace(self, spec=replace(self.spec, start=start))
