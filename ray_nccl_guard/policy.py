"""The policy: what to do about each failure class. A table and its presets; no rule names an action, and no action a rule."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from ray_nccl_guard.classes import FailureClass


class Action(Enum):
    """What the guard does after a verdict (and what a report says it did)."""

    PROCEED = "proceed"
    RETRY = "retry"
    FALL_BACK = "fall_back"
    REFUSE = "refuse"


_F = FailureClass

# The default actions of DESIGN D6. FALL_BACK means: NCCL with the relief that the verdict names, then gloo, each only after
# the same probe has passed on every rank.
_DEFAULT: dict[FailureClass, Action] = {
    **dict.fromkeys(
        (
            _F.ILLEGAL_MEMORY_ACCESS,
            _F.SHM_TOO_SMALL,
            _F.IB_RDMA_ERROR,
            _F.P2P_OR_ACS,
            _F.NVLINK_FABRIC_ERROR,
            _F.CUMEM_CONTAINER_CAPS,
            _F.TOPOLOGY_DETECTION,
            _F.INIT_TIMEOUT_HANG,
            _F.WRONG_RESULT_CORRUPTION,
            _F.VERSION_MISMATCH,
            _F.UNSUPPORTED_OP_OR_CONFIG,
            _F.UNKNOWN,
            _F.NO_KERNEL_IMAGE,
            _F.NCCL_BOOTSTRAP_NETWORK,
            _F.DUPLICATE_GPU,
        ),
        Action.FALL_BACK,
    ),
    **dict.fromkeys(
        (_F.PORT_IN_USE, _F.MISSING_RANK, _F.PROCESS_CRASHED, _F.REMOTE_PEER_DIED, _F.GLOO_NETWORK), Action.RETRY
    ),
    **dict.fromkeys(
        (
            _F.DRIVER_TOO_OLD,
            _F.NO_GPU_VISIBLE,
            _F.DEVICE_BUSY_OR_EXCLUSIVE,
            _F.GPU_OUT_OF_MEMORY,
            _F.HOST_OOM_KILLED,
            _F.STORE_UNREACHABLE,
            _F.HARDWARE_XID_ECC,
            _F.COLLECTIVE_TIMEOUT_DESYNC,
            _F.SHAPE_OR_DTYPE_MISMATCH,
            _F.USER_CODE_NOT_INFRA,
        ),
        Action.REFUSE,
    ),
    _F.OK: Action.PROCEED,
}

_ON_GUARD_ERROR = ("proceed", "raise")


def _actions(given: Mapping[Any, Any]) -> dict[FailureClass, Action]:
    return {_named(FailureClass, name, "failure class"): _named(Action, action, "action") for name, action in given.items()}


def _named(kind: Any, name: Any, what: str) -> Any:
    if isinstance(name, kind):
        return name
    values = [member.value for member in kind]
    if name in values:
        return kind(name)
    hint = nearest(str(name), values) or f" (known: {', '.join(values)})"
    raise ValueError(f"Policy: {name!r} is not {'an' if what[0] in 'aeiou' else 'a'} {what}{hint}")


def nearest(name: str, known: Iterable[str]) -> str:
    """`; did you mean 'strict'?`, or nothing if no known name is near."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What to do about each failure class. `Policy()` is the table of the documentation.

    Attributes:
        actions: what differs from the table, by class name or `FailureClass`, e.g. `{"unknown": "refuse"}`.
        gloo: whether gloo may be chosen at all.
        whatever_class: fall back whenever gloo has passed its own probe on every rank, whatever the class says.
        relief: whether NCCL is tried with the setting that the verdict names before gloo.
        report_only: probe and report; training goes on as if the guard were not there.
        budget_s: seconds for all rungs of one attempt together; a rung that runs is ended with it.
        locate_s: seconds within `budget_s` to locate a failure of NCCL that names no rank by small worlds; 0 for never.
        attempts: consecutive attempts without a started `train_func` after which the guard refuses.
        world_warn, world_ceiling: gloo is warned about above the first number of ranks and refused above the second: its
            rings are serial over TCP, and every pair of ranks holds a connection.
        on_guard_error: `proceed` as plain TorchConfig would when the guard itself fails, or `raise`.
        name: the preset it began with.
        sources: who said what: a key -> `argument`, `file` or `environment` (see `policy_file.resolve`). A key that is not
            there has the preset's value.
        file: the policy file that had a say, empty if none.

    Raises:
        ValueError: an unknown class or action (with the nearest valid name), or a number out of range.
    """

    actions: Mapping[FailureClass | str, Action | str] = field(default_factory=dict)
    gloo: bool = True
    whatever_class: bool = False
    relief: bool = True
    report_only: bool = False
    budget_s: float = 180.0
    locate_s: float = 60.0
    attempts: int = 3
    world_warn: int = 128
    world_ceiling: int = 512
    on_guard_error: str = "proceed"
    name: str = "default"
    sources: Mapping[str, str] = field(default_factory=dict, compare=False)
    file: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "actions", _actions(self.actions))
        if not self.budget_s > 0:
            raise ValueError(f"Policy.budget_s is a number of seconds above 0, not {self.budget_s!r}")
        if not self.locate_s >= 0:
            raise ValueError(f"Policy.locate_s is a number of seconds, 0 for never, not {self.locate_s!r}")
        if self.attempts < 1:
            raise ValueError(f"Policy.attempts counts tries and must be 1 or more, not {self.attempts!r}")
        if not 1 <= self.world_warn <= self.world_ceiling:
            raise ValueError("Policy: 1 <= world_warn <= world_ceiling must hold")
        if self.on_guard_error not in _ON_GUARD_ERROR:
            raise ValueError(f"Policy.on_guard_error is one of {', '.join(_ON_GUARD_ERROR)}, not {self.on_guard_error!r}")

    @classmethod
    def fallback(cls, **changes: Any) -> Policy:
        """Fall back whenever gloo has passed its own probe on every rank, whatever the class."""
        return cls(**{"whatever_class": True, "name": "fallback", **changes})

    @classmethod
    def strict(cls, **changes: Any) -> Policy:
        """Never fall back: NCCL works as the job asked for it, or the job is refused."""
        return cls(**{"gloo": False, "relief": False, "name": "strict", **changes})

    @classmethod
    def observe(cls, **changes: Any) -> Policy:
        """Only report: nothing that is seen changes what happens."""
        return cls(**{"report_only": True, "name": "observe", **changes})

    @classmethod
    def from_name(cls, name: str) -> Policy:
        """A preset by its name: default, fallback, strict or observe."""
        presets: dict[str, Callable[[], Policy]] = {
            "default": cls,
            "fallback": cls.fallback,
            "strict": cls.strict,
            "observe": cls.observe,
        }
        if name not in presets:
            raise ValueError(f"policy {name!r} is not one of {', '.join(presets)}{nearest(name, presets)}")
        return presets[name]()

    def action_for(self, failure: FailureClass) -> Action:
        """The table's action for `failure`, before any condition is checked."""
        chosen = self.actions.get(failure)
        assert chosen is None or isinstance(chosen, Action)
        return chosen or _DEFAULT[failure]

    def to_json(self) -> dict[str, Any]:
        """What a report says of the policy: the preset and what differs from the table."""
        changed = {str(getattr(k, "value", k)): str(getattr(v, "value", v)) for k, v in self.actions.items()}
        return {
            "name": self.name,
            "actions": changed,
            "gloo": self.gloo,
            "whatever_class": self.whatever_class,
            "relief": self.relief,
            "report_only": self.report_only,
            "budget_s": self.budget_s,
            "locate_s": self.locate_s,
            "attempts": self.attempts,
            "world_warn": self.world_warn,
            "world_ceiling": self.world_ceiling,
            "on_guard_error": self.on_guard_error,
            "sources": dict(self.sources),
            "file": self.file,
        }
