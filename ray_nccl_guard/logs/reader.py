"""The lines of a file of any size, plain or gzip, in batches: bounded memory, no assumption about encoding or line ends."""

from __future__ import annotations

import gzip
import re
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from ray_nccl_guard.diagnosis.scan import MAX_LINE
from ray_nccl_guard.errors import UsageError

CHUNK = 1 << 22
_GZIP = b"\x1f\x8b"
_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
STDIN = "-"


def batches(path: str) -> Iterator[tuple[int, list[str]]]:
    """(number of the first line, lines) until the file ends; `-` reads standard input.

    Lines end at a line feed; what is longer than 8 KiB is cut there. A damaged gzip file ends where the damage begins.
    Raises `UsageError` if the file cannot be read at all.
    """
    try:
        with _open(path) as stream:
            yield from _batches(stream)
    except (OSError, EOFError, zlib.error) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise UsageError(f"{path} cannot be read: {why}") from error


def _open(path: str) -> IO[bytes]:
    if path == STDIN:
        return _ungzip(sys.stdin.buffer)
    if Path(path).is_dir():
        raise UsageError(f"{path} is a directory.", help=(f"name the log files in it: ray-nccl-guard classify {path}/*",))
    return _ungzip(open(path, "rb", buffering=CHUNK))


def _ungzip(stream: IO[bytes]) -> IO[bytes]:
    head = stream.peek(2)[:2] if hasattr(stream, "peek") else b""
    return gzip.open(stream) if head == _GZIP else stream  # type: ignore[return-value]


def _batches(stream: IO[bytes]) -> Iterator[tuple[int, list[str]]]:
    number, rest = 1, b""
    while True:
        try:
            chunk = stream.read(CHUNK)
        except (EOFError, zlib.error, gzip.BadGzipFile):
            chunk = b""  # cut or damaged: what came before is still evidence
        if not chunk:
            break
        cut = chunk.rfind(b"\n")
        if cut < 0:
            # One line longer than a chunk: its head was kept, nobody reads the rest.
            rest = (rest + chunk[:MAX_LINE])[: 2 * MAX_LINE]
            continue
        lines = _lines(rest + chunk[:cut])
        yield number, lines
        number += len(lines)
        rest = chunk[cut + 1 :]
    if rest:
        yield number, _lines(rest)


def _lines(data: bytes) -> list[str]:
    text = data.decode("utf-8", "replace")
    if "\x1b" in text:
        text = _ANSI.sub("", text)
    return text.split("\n")
