"""Which rule claims which line: one pass over text of any size, with a literal filter before the regular expressions."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ray_nccl_guard.rulebook import Rule

# Longer lines are cut: no diagnostic of NCCL or torch that carries a diagnosis is near this long, and a hostile line must
# not cost more than its first 8 KiB.
MAX_LINE = 8 << 10


@dataclass(frozen=True, slots=True)
class Hit:
    """A rule that claims a line, with the fields (named groups) the pattern took out of it."""

    rule: Rule
    fields: dict[str, str]


class Scanner:
    """The rules' patterns, ready to run over lines. Make one per rule book and keep it."""

    def __init__(self, rules: Sequence[Rule]) -> None:
        self.rules = tuple(rules)
        by_literal: dict[str, list[int]] = {}
        for index, rule in enumerate(self.rules):
            for pattern in rule.patterns:
                for literal in pattern.literals:
                    claimed = by_literal.setdefault(literal, [])
                    if index not in claimed:
                        claimed.append(index)
        self._triggers = _cover(by_literal)

    def suspects(self, text: str) -> Iterator[tuple[int, int]]:
        """Spans (start, end) of the lines in `text` that some rule could claim, in order, each once."""
        lowered = text.lower()
        if len(lowered) != len(text):  # a few non-ASCII letters change length when lowered; positions must not move
            lowered = text
        starts: set[int] = set()
        spans: list[tuple[int, int]] = []
        for trigger in self._triggers:
            at = lowered.find(trigger)
            while at >= 0:
                start = lowered.rfind("\n", 0, at) + 1
                end = lowered.find("\n", at)
                end = len(text) if end < 0 else end
                if start not in starts:
                    starts.add(start)
                    spans.append((start, end))
                at = lowered.find(trigger, end)
        spans.sort()
        return iter(spans)

    def hits(self, line: str) -> tuple[Hit, ...]:
        """The rules that claim `line`, in rule order."""
        line = line[:MAX_LINE]
        lowered = line.lower()
        wanted = {i for trigger, indices in self._triggers.items() if trigger in lowered for i in indices}
        found = []
        for index in sorted(wanted):
            rule = self.rules[index]
            for pattern in rule.patterns:
                match = pattern.search(line)
                if match:
                    fields = {key: value for key, value in match.groupdict().items() if value is not None}
                    found.append(Hit(rule, fields))
                    break
        return tuple(found)


def _cover(by_literal: dict[str, list[int]]) -> dict[str, tuple[int, ...]]:
    """Fewer triggers for the same rules: a literal that contains another needs no search of its own."""
    kept: dict[str, set[int]] = {}
    for literal in sorted(by_literal, key=lambda text: (len(text), text)):
        inside = next((short for short in kept if short in literal), None)
        kept.setdefault(inside or literal, set()).update(by_literal[literal])
    return {trigger: tuple(sorted(indices)) for trigger, indices in kept.items()}


_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def plain(line: str) -> str:
    """The line without terminal colours and control characters, cut at `MAX_LINE`."""
    line = line[:MAX_LINE]
    if "\x1b" in line:
        line = _ANSI.sub("", line)
    return line.rstrip("\r\n")


def lines_of(texts: Iterable[str]) -> Iterator[str]:
    """Every line of several texts, cleaned."""
    for text in texts:
        for line in text.splitlines():
            yield plain(line)
