"""Which rule claims which line: lines that differ only in digits are looked at once, then literals, then the expressions."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from ray_nccl_guard.diagnosis.patterns import COMMON
from ray_nccl_guard.rulebook import Rule

# Longer lines are cut: no line of NCCL or torch that carries a diagnosis is near this long, and a hostile line must not
# cost more than its first 8 KiB.
MAX_LINE = 8 << 10
# Shapes of lines known to interest no rule. A healthy log of 256 ranks has a few thousand; the bound keeps a hostile
# log's memory below about 20 MB.
_MAX_SHAPES, _MAX_WANTED = 100_000, 2_000
_DIGITS = b"0123456789"
# What is left of `0x7fa4740a14d0` without its digits; no English word begins with x and goes on with a to f alone.
_POINTER = re.compile(rb"(?<![a-z])x[a-f]+(?![a-z])")
_DROP_DIGITS = {ord(digit): None for digit in "0123456789"}
# Literals containing one of these share its search: one search for `fail` instead of one for each text it stands in.
# None of them stands in a line of a healthy log often.
_GENERIC = (
    "fail", "error", "warn", "timed", "timeout", "memory", "refused", "kill", "mismatch", "abort", "invalid", "unable",
    "could", "not supported", "is not ", "cannot", "watchdog", "unhandled", "closed", "reset by peer", "route to host",
    "no space", "address", "illegal", "cuda error", "wrong", "operation", "store",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Hit:
    """A rule that claims a line, with the fields (named groups) the pattern took out of it."""

    rule: Rule
    fields: dict[str, str]


class Scanner:
    """The rules' patterns, ready to run over lines. Make one per rule book and keep it."""

    def __init__(self, rules: Sequence[Rule]) -> None:
        self.rules = tuple(rules)
        by_literal: dict[str, set[int]] = {}
        for index, rule in enumerate(self.rules):
            for pattern in rule.patterns:
                for literal in pattern.literals:
                    by_literal.setdefault(literal, set()).add(index)
        self._triggers = _cover(by_literal)
        self._searches = [trigger.encode() for trigger in self._triggers]
        self._boring: set[bytes] = set()
        self._wanted: dict[str, list[int]] = {}

    def suspects(self, lines: Sequence[str]) -> list[int]:
        """Indices of the lines that some rule could claim. No line may contain a line feed."""
        shapes = "\n".join(lines).encode("utf-8", "replace").translate(None, _DIGITS).lower().split(b"\n")
        boring = self._boring
        fresh = [index for index, shape in enumerate(shapes) if shape not in boring]
        if not fresh:
            return []
        # Pointers are what makes most of the remaining lines differ; without them they are looked up once more.
        shorter = _POINTER.sub(b"x", b"\n".join([shapes[index] for index in fresh])).split(b"\n")
        open_: dict[bytes, list[int]] = {}
        for index, shape in zip(fresh, shorter, strict=True):
            if shape not in boring:
                open_.setdefault(shape, []).append(index)
        if not open_:
            return []
        hot = self._hot(list(open_))
        if len(boring) > _MAX_SHAPES:
            boring.clear()
        boring.update(open_.keys() - hot)
        return sorted(index for shape in hot for index in open_[shape])

    def _hot(self, shapes: Sequence[bytes]) -> set[bytes]:
        """The shapes that contain a trigger."""
        text = b"\n".join(shapes)
        found: set[bytes] = set()
        for trigger in self._searches:
            at = text.find(trigger)
            while at >= 0:
                end = text.find(b"\n", at)
                end = len(text) if end < 0 else end
                found.add(text[text.rfind(b"\n", 0, at) + 1 : end])
                at = text.find(trigger, end)
        return found

    def hits(self, line: str) -> tuple[Hit, ...]:
        """The rules that claim `line`, in rule order."""
        line = plain(line)
        shape = line.lower().translate(_DROP_DIGITS)
        wanted = self._wanted.get(shape)
        if wanted is None:
            if len(self._wanted) > _MAX_WANTED:
                self._wanted.clear()
            wanted = sorted({index for trigger, claims in self._triggers.items() if trigger in shape for index in claims})
            self._wanted[shape] = wanted
        found = []
        for index in wanted:
            rule = self.rules[index]
            match = rule.search(line)
            if match:
                found.append(Hit(rule, {key: value for key, value in match.groupdict().items() if value is not None}))
        return tuple(found)


def _cover(by_literal: dict[str, set[int]]) -> dict[str, tuple[int, ...]]:
    """Fewer searches for the same rules: a literal that contains another needs none of its own."""
    kept: dict[str, set[int]] = {word: set() for word in _GENERIC}
    for literal in sorted(by_literal, key=lambda text: (len(text), text)):
        inside = next((short for short in kept if short in literal and short not in COMMON), literal)
        kept.setdefault(inside, set()).update(by_literal[literal])
    return {trigger: tuple(sorted(indices)) for trigger, indices in kept.items() if indices}


_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def plain(line: str) -> str:
    """The line without terminal colours, cut at `MAX_LINE`."""
    line = line[:MAX_LINE]
    return _ANSI.sub("", line) if "\x1b" in line else line
