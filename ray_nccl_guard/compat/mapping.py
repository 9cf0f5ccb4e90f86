"""A file mapped read-only, of which only the pages in use stay in memory."""

from __future__ import annotations

import mmap
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager

from ray_nccl_guard.compat.errors import LibraryUnreadable

# How much of the file is looked at before its pages are let go. The kernel maps more pages around every header that is
# read: without this `compat` takes three times as much memory at its peak for torch 2.15.0 (benchmarks/arch_scan.py).
PIECE_BYTES = 8 << 20
_STRIP_BYTES = 4096  # padding is a few bytes; stripping copies beats a regular expression tenfold where it is not


@contextmanager
def mapped(path: str) -> Iterator[mmap.mmap]:
    """Map a regular file read-only.

    Raises:
        LibraryUnreadable: no such file, a directory, a FIFO or device, no permission, or empty.
    """
    try:
        # Non-blocking, since opening a FIFO waits for its writer; the flag does nothing to a regular file.
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise LibraryUnreadable(f"cannot open {path}: {reason}") from error
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise LibraryUnreadable(f"{path} is {_kind(status.st_mode)}, not a library file")
        if status.st_size == 0:
            raise LibraryUnreadable(f"{path} is empty")
        data = mmap.mmap(fd, 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise LibraryUnreadable(f"cannot map {path}: {error.strerror}") from error
    finally:
        os.close(fd)
    with data:
        if hasattr(mmap, "MADV_RANDOM"):
            data.madvise(mmap.MADV_RANDOM)  # headers lie far apart: reading ahead would fetch the whole file
        yield data


def _kind(mode: int) -> str:
    names = ((stat.S_ISDIR, "a directory"), (stat.S_ISFIFO, "a FIFO"), (stat.S_ISSOCK, "a socket"))
    return next((name for test, name in names if test(mode)), "a device")


def let_go(data: mmap.mmap, upto: int) -> None:
    """Give back the pages before an offset; they are read again from the page cache if they are looked at again."""
    length = upto - upto % mmap.PAGESIZE
    if length and hasattr(mmap, "MADV_DONTNEED"):
        data.madvise(mmap.MADV_DONTNEED, 0, length)


def search(data: mmap.mmap, pattern: re.Pattern[bytes], start: int, end: int, *, longest: int) -> re.Match[bytes] | None:
    """The first match in a range, looked for piece by piece; `longest` bounds the bytes of a match, as it may lie across."""
    for at in range(start, end, PIECE_BYTES):
        found = pattern.search(data, at, min(end, at + PIECE_BYTES + longest - 1))
        if found:
            return found
        let_go(data, at + PIECE_BYTES if at + PIECE_BYTES < end else at)
    return None


def first_nonzero(data: mmap.mmap, start: int, end: int) -> int | None:
    """Where the first byte other than zero lies in a range, None if there is none."""
    for at in range(start, end, _STRIP_BYTES):
        piece = data[at : min(end, at + _STRIP_BYTES)]
        rest = piece.lstrip(b"\0")
        if rest:
            return at + len(piece) - len(rest)
        if (at - start) % PIECE_BYTES == 0:
            let_go(data, at)
    return None
