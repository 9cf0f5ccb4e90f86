"""Files under a run's storage, within a deadline: a bucket or a mount that hangs costs a warning, not a run."""

from __future__ import annotations

import itertools
import threading
import uuid
from collections.abc import Callable, Mapping
from typing import Any

# Long enough for a bucket's slow first answer; a healthy one takes under a second.
WRITE_S = 10.0
# A storage that has hung once gets this long afterwards: a run may write four or five reports.
AGAIN_S = 1.0

_hung: set[str] = set()
_serial = itertools.count(1)
_newest: dict[str, int] = {}
_placing = threading.Lock()


def write(filesystem: Any, folder: str, make: Callable[[], Mapping[str, bytes]], *, within_s: float = WRITE_S) -> str:
    """Write the files that `make` returns into `folder`; returns why that did not go, empty if it did.

    The work is done in a thread that nobody waits for beyond the deadline. Should it go on later all the same, it does not
    replace what was written after it.

    Args:
        filesystem: a `pyarrow.fs.FileSystem`.
        make: called in the thread, since making the files takes time as well.
    """
    allowed_s = min(within_s, AGAIN_S) if folder in _hung else within_s
    serial = next(_serial)
    _newest[folder] = serial
    problems: list[str] = []

    def work() -> None:
        try:
            filesystem.create_dir(folder, recursive=True)
            for name, content in make().items():
                _put(filesystem, f"{folder}/{name}", content, lambda: _newest[folder] == serial)
        except Exception as error:  # every filesystem raises its own kind; the caller says it in a warning
            problems.append(f"{type(error).__name__}: {error}")

    thread = threading.Thread(target=work, daemon=True, name="nccl-guard-report")
    thread.start()
    thread.join(allowed_s)
    if thread.is_alive():
        _hung.add(folder)
        return f"the storage did not answer within {allowed_s:g} s"
    _hung.discard(folder)
    return problems[0] if problems else ""


def _put(filesystem: Any, path: str, content: bytes, is_newest: Callable[[], bool]) -> None:
    """Whole or not at all: buckets show an object once it is complete, on a disk it is moved into its place."""
    on_disk = any(word in filesystem.type_name for word in ("local", "file"))  # pyarrow's own, or `py::fsspec+...`
    target = f"{path}.{uuid.uuid4().hex[:8]}.part" if on_disk else path
    if not is_newest():
        return
    try:
        with filesystem.open_output_stream(target) as stream:
            stream.write(content)
        if on_disk:
            with _placing:
                if is_newest():
                    filesystem.move(target, path)
                    return
                filesystem.delete_file(target)
    except Exception:
        if on_disk:
            _forget(filesystem, target)
        raise


def _forget(filesystem: Any, path: str) -> None:
    try:
        filesystem.delete_file(path)
    except OSError:
        pass  # it was never made, or the disk does not let go of it: the first error is the one to tell
