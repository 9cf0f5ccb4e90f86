"""One signature's regular expression: refused if it could backtrack badly, and the literal that every match must contain."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable
from functools import cached_property
from typing import Any

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    if hasattr(re, "_parser"):  # Python 3.11 moved the parser; the old name warns there.
        _parser: Any = re._parser
    else:
        import sre_parse as _parser

# A literal below three characters is found in nearly every line, so it would filter nothing.
_MIN_LITERAL = 3
# Words that stand in most lines of a healthy NCCL_DEBUG=INFO log: a literal found in here filters little, so another one
# of the same pattern is preferred.
COMMON = (
    " nccl info channel : via p2p/cumem/direct pointer shm ring tree trees connected all rings net/socket net/ib using "
    "comm rank nranks cudadev nvmldev busid commid init start complete bootstrap version cudadriverversion set by "
    "environment to setting affinity for gpu threadthresholds coll channels nvls channels per peer libnccl.so -> return returned remote "
    "allreduce: opcount sendbuff recvbuff count datatype op root stream broadcast allgather reduce gather"
)
_REPEATS = ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT")


class PatternError(ValueError):
    """A pattern that is no regular expression, could backtrack without bound, or matches everything."""


class Pattern:
    """A case-insensitive regular expression over one line; compiled at first use, parsed when it is made.

    Attributes:
        text: the expression.
        literals: lower-case strings without digits, of which every match contains at least one once its own digits are
            taken out. Without digits, because lines that differ in nothing else (ranks, pids, pointers) then need one look.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        try:
            tree = _parser.parse(text, re.IGNORECASE)
        except re.error as error:
            raise PatternError(f"{text!r} is not a regular expression: {error}") from error
        if _nested(tree, inside=False):
            raise PatternError(f"{text!r} repeats a repetition, which can take exponential time on a hostile line")
        self.literals = _best(tree)
        if not self.literals:
            raise PatternError(f"{text!r} has no fixed text of {_MIN_LITERAL} characters, digits aside, in every match")

    @cached_property
    def _compiled(self) -> re.Pattern[str]:
        return re.compile(self.text, re.IGNORECASE)

    def search(self, line: str) -> re.Match[str] | None:
        return self._compiled.search(line)


def _nested(tree: Iterable[Any], *, inside: bool) -> bool:
    """Whether a repetition of variable length stands inside another one."""
    for op, value in tree:
        name = str(op)
        if name in _REPEATS:
            low, high, body = value
            # `?` and `{3}` cannot multiply the ways to match a long line; `+`, `*` and `{2,50}` can.
            varies = high > 1 and low != high
            if (inside and varies) or _nested(body, inside=inside or varies):
                return True
        elif any(_nested(part, inside=inside) for part in _parts(name, value)):
            return True
    return False


def _parts(name: str, value: Any) -> list[Any]:
    if name == "SUBPATTERN":
        return [value[-1]]
    if name == "BRANCH":
        return list(value[1])
    if name in ("ASSERT", "ASSERT_NOT"):
        return [value[1]]
    if name == "ATOMIC_GROUP":
        return [value]
    return []


def _best(tree: Iterable[Any]) -> tuple[str, ...]:
    """The most selective set of literals: the one whose shortest member is longest."""
    options = [option for option in _options(tree) if min(map(len, option)) >= _MIN_LITERAL]
    return max(options, key=_selectivity, default=())


def _selectivity(option: tuple[str, ...]) -> tuple[bool, int, int]:
    return not any(literal in COMMON for literal in option), min(map(len, option)), -len(option)


def _options(tree: Iterable[Any]) -> list[tuple[str, ...]]:
    """Sets of literals; a match contains at least one member of each set."""
    options: list[tuple[str, ...]] = []
    run: list[str] = []

    def close() -> None:
        literal = "".join(c for c in run if not c.isdigit()).lower()
        if literal:
            options.append((literal,))
        run.clear()

    for op, value in tree:
        name = str(op)
        if name == "LITERAL" and value < 128:
            run.append(chr(value))
            continue
        if name == "AT":
            continue
        close()
        if name == "BRANCH":
            best = [_best(branch) for branch in value[1]]
            if all(best):
                options.append(tuple(dict.fromkeys(literal for option in best for literal in option)))
        elif name in _REPEATS and value[0] >= 1:
            options.extend(_options(value[2]))
        elif name == "SUBPATTERN" and not value[2]:
            options.extend(_options(value[-1]))
    close()
    return options
