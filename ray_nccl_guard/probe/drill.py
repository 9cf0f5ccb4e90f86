"""The language of a drill: which fault the probe acts out, where, and on whom. A part of the fake GPUs' (tests/fakegpu)."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

# The points that a probe passes: its own steps up to the device, then NCCL's calls by the names that the fake NCCL has.
STEPS = ("import", "store", "device", "init", "destroy")
# Which of NCCL's operations each of the probe's stands for (torch 2.15: a barrier is an all_reduce, objects are gathered).
OPERATIONS = {
    "all_reduce": "allreduce",
    "broadcast": "broadcast",
    "all_gather": "allgather",
    "all_gather_into_tensor": "allgather",
    "reduce_scatter": "reducescatter",
    "reduce": "reduce",
    "all_to_all": "alltoall",
    "send_recv": "p2p",
    "barrier": "allreduce",
    "object_gather": "allgather",
    "coalesced": "allreduce",
    "coalesced_all_gather": "allgather",
}
ANY_COLLECTIVE = "coll"
POINTS = (*STEPS, ANY_COLLECTIVE, *dict.fromkeys(OPERATIONS.values()))
ACTIONS = ("hang", "hang-gil", "abort", "segv", "kill", "wrong", "oom", "error", "cuda", "preset", "delay", "exit")
_NUMBERED = ("error", "delay", "exit")
# It stands in the worker's launcher, which must not be harmed.
_AT_THE_STORE = ("hang", "delay")

# ncclResult_t (nccl.h) in the words of ncclGetErrorString.
RESULTS = {
    1: "unhandled cuda error",
    2: "unhandled system error",
    3: "internal error",
    4: "invalid argument",
    5: "invalid usage",
    6: "remote process exited or there was a network error",
}
# cudaError_t (driver_types.h) in the words of cudaGetErrorString; those that a probe meets.
CUDA_ERRORS = {
    2: "out of memory",
    46: "CUDA-capable device(s) is/are busy or unavailable",
    209: "no kernel image is available for execution on the device",
    214: "uncorrectable ECC error encountered",
    700: "an illegal memory access was encountered",
    719: "unspecified launch failure",
    802: "system not yet initialized",
}
# What NCCL logged in public reports of a known failure, and the result that it returned: the fake NCCL's presets.
PRESETS: dict[str, tuple[int, str]] = {
    "p2p": (1, "transport/p2p.cc:275 NCCL WARN Cuda failure 217 'peer access is not supported between these two devices'"),
    "nvls": (
        1,
        "transport/nvls.cc:254 NCCL WARN Failed to bind NVLink SHARP (NVLS) Multicast memory of size 2097152 : "
        "CUDA error 401 'the operation cannot be performed in the present state'",
    ),
    "fabric": (1, "init.cc:204 NCCL WARN Cuda failure 802 'system not yet initialized'"),
    "ib": (2, "misc/ibvwrap.cc:278 NCCL WARN Call to ibv_modify_qp failed with error Connection timed out"),
    "shm": (
        2,
        "misc/shmutils.cc:88 NCCL WARN Error: failed to extend /dev/shm/nccl-XXXXXX to 9637892 bytes, "
        "error: No space left on device (28)",
    ),
    "cumem-host": (
        1,
        "transport/shm.cc:590 NCCL WARN Cuda failure 217 'peer access is not supported between these two devices'",
    ),
    "bootstrap": (3, "bootstrap.cc:110 NCCL WARN Bootstrap : no socket interface found"),
    "refused": (
        2,
        "misc/socket.cc:484 NCCL WARN socketStartConnect: Connect to 10.0.0.112<21724> failed : Connection refused",
    ),
    "kernel": (1, "enqueue.cc:58 NCCL WARN Cuda failure 'named symbol not found'"),
    "illegal": (1, "enqueue.cc:1556 NCCL WARN Cuda failure 700 'an illegal memory access was encountered'"),
    "ecc": (1, "enqueue.cc:1556 NCCL WARN Cuda failure 214 'uncorrectable ECC error encountered'"),
    "topology": (
        2,
        "graph/xml.cc:332 NCCL WARN Could not find real path of /sys/class/pci_bus/0000:01/../../0000:01:00.0",
    ),
    "version": (3, "bootstrap.cc:120 NCCL WARN Message truncated : received 1024 bytes instead of 256"),
}

_CONDITIONS = ("rank", "notrank", "world", "bytes", "with=", "without=")
_RANGE = re.compile(r"(rank|world|bytes)(>=|<=|=)?(\d+)([KM]?)")
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20}


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """One condition on a number: `name` is rank, world or bytes, the ends are included, None is open."""

    name: str
    low: int | None
    high: int | None

    def holds(self, value: int) -> bool:
        return (self.low is None or value >= self.low) and (self.high is None or value <= self.high)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A condition on a variable: set (to `value`, if one is given), or with `wanted` False just not so."""

    name: str
    value: str | None
    wanted: bool

    def holds(self, environ: Mapping[str, str]) -> bool:
        found = self.name in environ and (self.value is None or environ[self.name] == self.value)
        return found is self.wanted


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault: at `point` do `action`, where every condition holds.

    Attributes:
        text: as it was written.
        number: of `error=N` (ncclResult_t), `cudaN` (cudaError_t), `delay=MS` (milliseconds) and `exit=N`.
        not_rank: a rank that is spared.
    """

    text: str
    point: str
    action: str
    number: int = 0
    preset: str = ""
    not_rank: int | None = None
    limits: tuple[Limit, ...] = ()
    settings: tuple[Setting, ...] = ()

    @property
    def of_nccl(self) -> bool:
        """Whether it speaks in the words of NCCL and CUDA, which no gloo would say."""
        return self.action in ("error", "cuda", "preset", "oom")

    def strikes(self, rank: int, world_size: int, environ: Mapping[str, str]) -> bool:
        """Whether it may strike `rank` of the job in a world of `world_size` ranks under these settings."""
        known = {"rank": rank, "world": world_size}
        return (
            rank != self.not_rank
            and all(limit.holds(known[limit.name]) for limit in self.limits if limit.name in known)
            and all(setting.holds(environ) for setting in self.settings)
        )

    def is_at(self, point: str, size_bytes: int | None = None) -> bool:
        """Whether it strikes at a point that is passed with a payload of `size_bytes` (None: there is none)."""
        if self.point != point and not (self.point == ANY_COLLECTIVE and point in OPERATIONS.values()):
            return False
        sizes = [limit for limit in self.limits if limit.name == "bytes"]
        return not sizes or (size_bytes is not None and all(limit.holds(size_bytes) for limit in sizes))


def parse(faults: str | Iterable[str]) -> tuple[Fault, ...]:
    """Faults of the form `point:action[@condition]...`: several in one text, separated by commas, or several texts.

    Raises:
        ValueError: what is no fault, with the nearest name that is one.
    """
    texts = [faults] if isinstance(faults, str) else list(faults)
    found = tuple(_fault(word) for text in texts for word in re.split(r"[,\s]+", text.strip()) if word)
    if not found:
        raise ValueError("a drill names no fault: write point:action[@condition]..., e.g. init:hang@rank1")
    return found


def text_of(faults: Iterable[Fault]) -> str:
    """The faults as they were written, empty for none."""
    return ",".join(fault.text for fault in faults)


def _fault(text: str) -> Fault:
    point, colon, rest = text.partition(":")
    if not colon or not rest:
        raise ValueError(f"drill {text!r}: a fault is point:action[@condition]..., e.g. init:hang@rank1")
    if point not in POINTS:
        raise ValueError(f"drill {text!r}: {_unknown('point', point, POINTS)}")
    word, *conditions = rest.split("@")
    action, number, preset = _action(text, word)
    if point == "store" and action not in _AT_THE_STORE:
        raise ValueError(
            f"drill {text!r}: at the store, where the worker itself stands, only hang and delay=MS are acted out"
        )
    if action == "wrong" and point in STEPS:
        raise ValueError(f"drill {text!r}: only a collective can return wrong numbers, e.g. allreduce:wrong")
    limits, settings, spared = [], [], None
    for condition in conditions:
        if match := re.fullmatch(r"notrank=?(\d+)", condition):
            spared = int(match[1])
        elif match := _RANGE.fullmatch(condition):
            limits.append(_limit(match))
        elif match := re.fullmatch(r"(with|without)=(\w+)(?:=(.*))?", condition):
            settings.append(Setting(name=match[2], value=match[3], wanted=match[1] == "with"))
        else:
            raise ValueError(f"drill {text!r}: {_unknown('condition', condition, _CONDITIONS)}")
    return Fault(
        text=text, point=point, action=action, number=number, preset=preset, not_rank=spared, limits=tuple(limits),
        settings=tuple(settings),
    )  # fmt: skip


def _action(text: str, word: str) -> tuple[str, int, str]:
    """The action's name, its number and its preset."""
    name, equals, value = word.partition("=")
    if match := re.fullmatch(r"cuda(\d+)", word):
        number = int(match[1])
        if number not in CUDA_ERRORS:
            raise ValueError(
                f"drill {text!r}: of CUDA's errors a drill knows {', '.join(map(str, CUDA_ERRORS))}, not {number}"
            )
        return "cuda", number, ""
    if name == "preset":
        if value not in PRESETS:
            raise ValueError(f"drill {text!r}: {_unknown('preset', value, tuple(PRESETS))}")
        return name, 0, value
    if name == "cuda" or name not in ACTIONS:
        shown = tuple({"cuda": "cuda700", "error": "error=2", "delay": "delay=500", "exit": "exit=1",
                       "preset": "preset=p2p"}.get(one, one) for one in ACTIONS)  # fmt: skip
        raise ValueError(f"drill {text!r}: {_unknown('action', word, shown)}")
    if bool(equals) != (name in _NUMBERED) or (equals and not value.isdigit()):
        needs = "takes a whole number, e.g. " + f"{name}=2" if name in _NUMBERED else "takes no number"
        raise ValueError(f"drill {text!r}: {name} {needs}")
    number = int(value) if value else 0
    if name == "error" and number not in RESULTS:
        raise ValueError(f"drill {text!r}: NCCL's results that are errors go from 1 to {max(RESULTS)}, not {number}")
    return name, number, ""


def _limit(match: re.Match[str]) -> Limit:
    name, how, digits, unit = match.groups()
    number = int(digits) * _UNITS[unit]
    return Limit(name=name, low=None if how == "<=" else number, high=None if how == ">=" else number)


def _unknown(kind: str, word: str, known: tuple[str, ...]) -> str:
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"there is no {kind} {word!r}" + (f"; did you mean {near[0]}?" if near else f" (there are {', '.join(known)})")
