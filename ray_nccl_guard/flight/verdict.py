"""What a set of dumps says: the kind of hang, the culprits, how sure that is, and what the dumps cannot say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ray_nccl_guard.classes import CLASSES, FailureClass
from ray_nccl_guard.flight.dump import Frame
from ray_nccl_guard.flight.load import Skipped
from ray_nccl_guard.flight.mismatch import Kind
from ray_nccl_guard.verdict import Candidate, Certainty, Quote, Role, Verdict

__all__ = ["CallStack", "FlightVerdict", "GroupRow", "GroupTable", "Kind"]

_CLASSES = {
    Kind.MISSING_RANK: FailureClass.COLLECTIVE_TIMEOUT_DESYNC,
    Kind.OP_MISMATCH: FailureClass.SHAPE_OR_DTYPE_MISMATCH,
    Kind.SIZE_MISMATCH: FailureClass.SHAPE_OR_DTYPE_MISMATCH,
    Kind.DTYPE_MISMATCH: FailureClass.SHAPE_OR_DTYPE_MISMATCH,
    Kind.STALLED: FailureClass.COLLECTIVE_TIMEOUT_DESYNC,
    Kind.NONE: FailureClass.OK,
}
# Only their order means something: a report sorts candidates by score.
_SCORES = {Certainty.ESTABLISHED: 1.0, Certainty.LIKELY: 0.7, Certainty.OPEN: 0.4}


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRow:
    """One rank in the table of a group.

    Attributes:
        has_dump: False for a member that left none; the rest is then unknown.
        last_completed: sequence number, None if none was seen to complete or the backend does not tell.
        last_requested: sequence number, None if there is no record.
        next_op: the first call it has not completed, or its last where the backend does not tell.
        call: `next_op` with sizes and types, as a person reads it.
        odd: this cell speaks against the rank.
    """

    rank: int
    has_dump: bool = True
    last_completed: int | None = None
    last_requested: int | None = None
    next_op: str = ""
    next_seq: int | None = None
    state: str = ""
    call: str = ""
    odd: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupTable:
    """One process group: who is in it and how far each got."""

    name: str
    desc: str
    members_known: bool
    rows: tuple[GroupRow, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallStack:
    """Where ranks were in a call: the culprit's last, or the one that the others are in. Frames are innermost first."""

    ranks: tuple[int, ...]
    culprit: bool
    group: str
    seq: int
    op: str
    frames: tuple[Frame, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FlightVerdict:
    """The verdict over a set of dumps.

    Attributes:
        ranks: how many ranks the job has, as far as the dumps or the caller tell.
        summary: one sentence that stands alone.
        because: what the verdict rests on.
        against: what speaks against it.
        cannot_say: what these dumps leave open.
        next: the one experiment that would decide.
        versions: schema, library and backends, as `name value`.
        skipped: files that were not used.
    """

    kind: Kind
    culprit_ranks: tuple[int, ...]
    certainty: Certainty
    ranks: int
    missing_dumps: tuple[int, ...]
    groups: tuple[GroupTable, ...]
    summary: str
    because: tuple[str, ...] = ()
    against: tuple[str, ...] = ()
    cannot_say: tuple[str, ...] = ()
    next: str = ""
    stacks: tuple[CallStack, ...] = ()
    versions: tuple[str, ...] = ()
    skipped: tuple[Skipped, ...] = ()

    @property
    def failure(self) -> FailureClass:
        """The class that a policy knows this by."""
        return _CLASSES[self.kind]

    def as_verdict(self) -> Verdict:
        """The same in the form that reports and policies take. gloo would meet what the program or a rank does, too."""
        quotes = [Quote(rank=None, line=0, text=line, role=Role.CAUSE, source="flight recorder") for line in self.because]
        return Verdict(
            failure=self.failure,
            summary=self.summary,
            certainty=self.certainty,
            candidates=(Candidate(failure=self.failure, score=_SCORES[self.certainty]),),
            culprit_ranks=self.culprit_ranks,
            gloo_can_help=CLASSES[self.failure].gloo_can_help,
            evidence=tuple(quotes),
            against=(*self.against, *(f"the dumps cannot say {line}" for line in self.cannot_say)),
            next=self.next,
        )

    def to_json(self) -> dict[str, Any]:
        """The contract of `flight --json` (keys are added, never renamed)."""
        return {
            "ranks": self.ranks,
            "missing_dumps": list(self.missing_dumps),
            "groups": [
                {
                    "name": group.name,
                    "desc": group.desc,
                    "members_known": group.members_known,
                    "ranks": [{name: getattr(row, name) for name in GroupRow.__dataclass_fields__} for row in group.rows],
                }
                for group in self.groups
            ],
            "culprit_ranks": list(self.culprit_ranks),
            "kind": self.kind.value,
            "certainty": self.certainty.value,
            "failure": self.failure.value,
            "summary": self.summary,
            "because": list(self.because),
            "against": list(self.against),
            "cannot_say": list(self.cannot_say),
            "next": self.next,
            "stacks": [
                {
                    "ranks": list(stack.ranks),
                    "culprit": stack.culprit,
                    "group": stack.group,
                    "seq": stack.seq,
                    "op": stack.op,
                    "frames": [frame._asdict() for frame in stack.frames],
                }
                for stack in self.stacks
            ],
            "versions": list(self.versions),
            "skipped": [skipped._asdict() for skipped in self.skipped],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> FlightVerdict:
        """What `to_json` gave, from a saved report.

        Raises:
            KeyError, TypeError, ValueError: it is none.
        """
        plain = {
            name: tuple(data[name])
            for name in ("culprit_ranks", "missing_dumps", "because", "against", "cannot_say", "versions")
        }
        return cls(
            kind=Kind(data["kind"]),
            certainty=Certainty(data["certainty"]),
            ranks=data["ranks"],
            groups=tuple(
                GroupTable(
                    name=group["name"], desc=group["desc"], members_known=group["members_known"],
                    rows=tuple(GroupRow(**row) for row in group["ranks"]),
                )
                for group in data["groups"]
            ),
            summary=data["summary"],
            next=data["next"],
            stacks=tuple(
                CallStack(
                    **{**stack, "ranks": tuple(stack["ranks"]), "frames": tuple(Frame(**frame) for frame in stack["frames"])}
                )
                for stack in data["stacks"]
            ),
            skipped=tuple(Skipped(**skipped) for skipped in data["skipped"]),
            **plain,
        )  # fmt: skip
