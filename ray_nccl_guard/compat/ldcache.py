"""Where the dynamic loader finds a library that nobody gave a path for: its cache and its default directories."""

from __future__ import annotations

import os
import struct

_CACHE = "/etc/ld.so.cache"
_NEW_MAGIC = b"glibc-ld.so.cache1.1"
_HEADER = struct.Struct("<20sIIB3xI12x")
_ENTRY = struct.Struct("<iIIIQ")
# ld.so(8), "default path", with the multiarch directories of Debian and its kin.
_DEFAULT_DIRECTORIES = (
    "/lib/x86_64-linux-gnu", "/usr/lib/x86_64-linux-gnu", "/lib/aarch64-linux-gnu", "/usr/lib/aarch64-linux-gnu",
    "/lib64", "/usr/lib64", "/lib", "/usr/lib",
)  # fmt: skip
_MAX_CACHE_BYTES = 64 << 20  # a large host has 0.2 MB; this only bounds a forged file


def system_library(soname: str) -> str | None:
    """The path that ld.so's cache or default directories give for a name such as "libnccl.so.2", None if there is none."""
    for path in (*_cached(soname), *(os.path.join(directory, soname) for directory in _DEFAULT_DIRECTORIES)):
        if os.path.isfile(path):
            return path
    return None


def _cached(soname: str) -> list[str]:
    try:
        with open(_CACHE, "rb") as file:
            data = file.read(_MAX_CACHE_BYTES)
    except OSError:
        return []  # musl and distroless images have none
    return lookup(data, soname)


def lookup(data: bytes, soname: str) -> list[str]:
    """Paths of a name in the bytes of an ld.so.cache (format 1.1: dl-cache.h in glibc); empty if not found."""
    start = data.find(_NEW_MAGIC)  # older caches carry a table of the previous format before it
    if start < 0 or start + _HEADER.size > len(data):
        return []
    _, count, *_ = _HEADER.unpack_from(data, start)
    wanted, found = soname.encode() + b"\0", []
    for i in range(min(count, (len(data) - start - _HEADER.size) // _ENTRY.size)):
        _, key, value, _, _ = _ENTRY.unpack_from(data, start + _HEADER.size + i * _ENTRY.size)
        if data[start + key : start + key + len(wanted)] == wanted:
            end = data.find(b"\0", start + value)
            found.append(data[start + value : end].decode("utf-8", "replace"))
    return found
