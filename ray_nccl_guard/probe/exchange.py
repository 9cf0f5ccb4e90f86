"""What the speaking ranks tell each other through the probe's store: one of them gathers, the others read one answer.

If everybody read everybody, N hosts would ask the store N x N times: 2 million requests for one exchange of 1,024 hosts,
where the gathered one takes five a host.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from ray_nccl_guard.probe import parcel

# Beyond an exchange's deadline, for the gathered answer to be made and read: N values of a few bytes, and one answer.
_GATHERED_S = 1.0


class Exchange:
    """An exchange among `speakers`, in the same order on all of them. Who did not come once is not waited for again."""

    def __init__(self, store: Any, rank: int, speakers: Sequence[int]) -> None:
        self._store, self._rank, self._speakers = store, rank, sorted(speakers)

    def __call__(self, name: str, mine: bytes, deadline_s: float) -> Mapping[int, bytes]:
        """What each speaker gave under `name`, without those that did not come within `deadline_s`."""
        end_s = time.monotonic() + deadline_s
        try:
            self._give(name, mine)
            said = self._gather(name, end_s) if self._rank == self._speakers[0] else self._read(name, end_s)
        except (RuntimeError, IndexError):  # torch's DistError family: the store is gone; or nobody speaks any more
            said = {}
        self._speakers = sorted(said)
        return said

    def _give(self, name: str, mine: bytes) -> None:
        self._store.set(f"{name}/{self._rank}", b"=" + mine)  # the store takes no empty value
        # Who was given up is not counted, or the count would be full while one of the others is still missing.
        if self._rank in self._speakers and self._store.add(f"{name}/came", 1) == len(self._speakers):
            self._store.set(f"{name}/all", b"=")

    def _gather(self, name: str, end_s: float) -> dict[int, bytes]:
        """Everything that came by then, for all."""
        came = self._speakers if self._wait(f"{name}/all", end_s) else self._present(name)
        said = self._values(name, came)
        self._store.set(f"{name}/said", parcel.pack(said))
        return said

    def _read(self, name: str, end_s: float) -> dict[int, bytes]:
        """What was gathered; if whoever should gather is the one that does not come, what is there."""
        if not self._wait(f"{name}/said", end_s + _GATHERED_S):
            return self._values(name, self._present(name))
        try:
            return dict(parcel.unpack(self._store.get(f"{name}/said")))
        except (pickle.UnpicklingError, ValueError, TypeError, EOFError):
            return {}  # somebody else writes to this store

    def _wait(self, key: str, end_s: float) -> bool:
        try:
            self._store.wait([key], timedelta(seconds=max(0.001, end_s - time.monotonic())))
        except RuntimeError:  # DistStoreError on timeout; a broken store raises again at its next request
            return False
        return True

    def _values(self, name: str, peers: Sequence[int]) -> dict[int, bytes]:
        found = self._store.multi_get([f"{name}/{peer}" for peer in peers]) if peers else []
        return {peer: value[1:] for peer, value in zip(peers, found, strict=True)}

    def _present(self, name: str) -> list[int]:
        return [peer for peer in self._speakers if self._store.check([f"{name}/{peer}"])]
