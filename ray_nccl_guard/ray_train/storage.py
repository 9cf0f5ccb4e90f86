"""Files under a run's storage, within a deadline: a bucket or a mount that hangs costs a warning, not a run."""

from __future__ import annotations

import itertools
import threading
import time
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


class Writing:
    """Files on their way into a folder, in a thread that nobody waits for beyond a deadline. The later made one is the newer."""

    def __init__(self, filesystem: Any, folder: str, make: Callable[[], Mapping[str, bytes]]) -> None:
        self.filesystem, self.folder, self.make = filesystem, folder, make
        self.serial = _newest[folder] = next(_serial)
        self.began_s = 0.0
        self.problem = ""
        self.thread = threading.Thread(target=self._work, daemon=True, name="nccl-guard-report")

    def begin(self) -> None:
        self.began_s = time.monotonic()
        self.thread.start()

    def _work(self) -> None:
        try:
            self.filesystem.create_dir(self.folder, recursive=True)
            for name, content in self.make().items():
                _put(self.filesystem, f"{self.folder}/{name}", content, lambda: _newest[self.folder] == self.serial)
        except Exception as error:  # every filesystem raises its own kind; the caller says it in a warning
            self.problem = f"{type(error).__name__}: {error}"

    def wait(self, within_s: float) -> str:
        """Why the files were not written within `within_s` of the beginning, empty if they were."""
        allowed_s = min(within_s, AGAIN_S) if self.folder in _hung else within_s
        self.thread.join(max(0.0, self.began_s + allowed_s - time.monotonic()))
        if self.thread.is_alive():
            _hung.add(self.folder)
            return f"the storage did not answer within {allowed_s:g} s"
        _hung.discard(self.folder)
        return self.problem


def write(filesystem: Any, folder: str, make: Callable[[], Mapping[str, bytes]], *, within_s: float = WRITE_S) -> str:
    """Write the files that `make` returns into `folder`; returns why that did not go, empty if it did.

    What hangs and goes on later all the same does not replace what was written after it.

    Args:
        filesystem: a `pyarrow.fs.FileSystem`.
        make: called in the thread, since making the files takes time as well.
    """
    writing = Writing(filesystem, folder, make)
    writing.begin()
    return writing.wait(within_s)


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
