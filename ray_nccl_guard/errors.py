"""The guard's own exceptions: each says one thing, survives pickling, and carries its help apart from its text."""

from __future__ import annotations

from typing import Any


class GuardError(Exception):
    """Base of every exception this project raises on purpose.

    Args:
        message: one sentence that stands alone.
        help: what to do next, one entry a line; never part of `str(error)`.
    """

    def __init__(self, message: str, *, help: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.help = help

    def __reduce__(self) -> tuple[Any, ...]:
        # Keyword-only arguments are lost by the default reduce, and Ray carries exceptions by pickle: the user would
        # see a RaySystemError in place of ours (ray 2.60, measured).
        return (_rebuild, (type(self), self.args[0], self.__dict__))


def _rebuild(cls: type[GuardError], message: str, state: dict[str, Any]) -> GuardError:
    error = cls.__new__(cls, message)
    Exception.__init__(error, message)
    error.__dict__.update(state)
    return error


class UsageError(GuardError):
    """The caller asked for something that cannot be: the command line exits 2 on it, and nothing is lost."""
