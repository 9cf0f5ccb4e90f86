"""The report in a bucket: an object is there once its upload is complete; an upload that fails or hangs is said, in time."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

pytest.importorskip("pyarrow", reason="pyarrow is not installed")
from fsspec.implementations.memory import MemoryFileSystem
from pyarrow import fs

from ray_nccl_guard.ray_train import storage

FOLDER = "/runs/a/nccl_guard"


class Bucket(MemoryFileSystem):
    """A bucket in memory: `finish` is called when an upload is to be completed, which is where S3 says no."""

    store: dict = {}  # noqa: RUF012 - fsspec's own way: one store per class
    pseudo_dirs: list = [""]  # noqa: RUF012
    finish = staticmethod(lambda path: None)

    def _open(self, path, mode="rb", **options):
        file = super()._open(path, mode, **options)
        if "w" in mode:
            complete = file.close

            def close() -> None:
                if not file.closed:
                    type(self).finish(path)
                complete()

            file.close = close
        return file


@pytest.fixture
def bucket() -> Iterator[fs.PyFileSystem]:
    yield fs.PyFileSystem(fs.FSSpecHandler(Bucket()))
    Bucket.store.clear()
    Bucket.finish = staticmethod(lambda path: None)


def names(bucket: fs.PyFileSystem) -> list[str]:
    return sorted(info.base_name for info in bucket.get_file_info(fs.FileSelector(FOLDER)))


def content(bucket: fs.PyFileSystem) -> bytes:
    with bucket.open_input_stream(f"{FOLDER}/report.json") as stream:
        return stream.read()


def write(bucket: fs.FileSystem, text: bytes, within_s: float = 5.0) -> str:
    return storage.write(bucket, FOLDER, lambda: {"report.json": text, "report.html": b"<html>"}, within_s=within_s)


def test_objects_have_their_names_at_once_and_no_parts_lie_beside_them(bucket):
    uploaded: list[str] = []
    Bucket.finish = staticmethod(lambda path: uploaded.append(path.rpartition("/")[2]))
    assert write(bucket, b'{"action": "proceed"}') == ""
    assert uploaded == ["report.json", "report.html"], "a bucket cannot rename: it would copy"
    assert write(bucket, b'{"action": "refuse"}') == ""
    assert content(bucket) == b'{"action": "refuse"}' and names(bucket) == ["report.html", "report.json"]


def test_an_upload_that_is_refused_at_its_end_is_said_with_the_storages_words(bucket):
    def refuse(path: str) -> None:
        raise PermissionError("AccessDenied: not authorized to perform s3:PutObject")

    Bucket.finish = staticmethod(refuse)
    assert "AccessDenied" in write(bucket, b"{}")


def test_an_upload_that_hangs_costs_its_deadline_and_the_next_one_less(bucket):
    go = threading.Event()
    Bucket.finish = staticmethod(lambda path: go.wait(30))
    try:
        started_s = time.monotonic()
        assert "did not answer within 1.5 s" in write(bucket, b"{}", within_s=1.5)
        assert "did not answer within 1 s" in write(bucket, b"{}", within_s=1.5), "it has hung before"
        assert time.monotonic() - started_s < 5
    finally:
        go.set()


def test_pyarrows_own_s3_without_a_server_is_said_within_the_deadline():
    with socket.socket() as taken:  # bound and not listening: whoever connects is refused
        taken.bind(("127.0.0.1", 0))
        s3 = fs.S3FileSystem(
            endpoint_override=f"127.0.0.1:{taken.getsockname()[1]}",
            scheme="http", access_key="a", secret_key="b", region="us-east-1",
        )  # fmt: skip
        started_s = time.monotonic()
        problem = storage.write(s3, "bucket/a/nccl_guard", lambda: {"report.json": b"{}"})
    assert "NETWORK_CONNECTION" in problem or "did not answer" in problem
    assert time.monotonic() - started_s < storage.WRITE_S + 2
