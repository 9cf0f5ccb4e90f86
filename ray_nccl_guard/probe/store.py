"""The probe's store: kept in rank 0's worker, where it outlives dying children; a link from each launcher tells who got how far."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from ray_nccl_guard.probe.spec import RankTask, Step

# How often a link asks in a small world: at once after news, which come in bursts (a probe of two healthy ranks takes 0.2 s in
# all), and soon no more often than costs its worker nothing.
_SOONEST_S, _ASK_S = 0.002, 0.01
_STORE_REQUESTS_PER_S = 10_000.0  # all links together stay below this, so that rank 0's worker is not kept busy by them

# A store is up in 2 ms; a busy machine takes its time, but a name server that is waited for takes seconds.
_WORTH_COUNTING_S = 0.9

_kept: dict[str, Any] = {}


@dataclass(frozen=True, slots=True)
class Opened:
    """A store that serves.

    Attributes:
        port: chosen by the kernel.
        accept_s: seconds that it takes for each connection, if they are worth counting.
    """

    port: int
    accept_s: float = 0.0


def open_store(run_id: str, address: str) -> Opened:
    """Serve a store from this process for `run_id`."""
    import torch.distributed as dist

    close_store()
    started_s = time.monotonic()
    # It connects to itself first: torch's server asks the name server for whoever connects, one after the other, and one
    # that does not answer holds it for glibc's 5 s and more each time (measured with torch 2.15.0).
    store = dist.TCPStore(address, 0, None, True, timeout=timedelta(seconds=30), wait_for_workers=False)
    took_s = time.monotonic() - started_s
    _kept[run_id] = store
    return Opened(int(store.port), took_s if took_s >= _WORTH_COUNTING_S else 0.0)


def close_store() -> None:
    """End every store that this process serves."""
    _kept.clear()


class Link:
    """A launcher's line to the other launchers. All waiting is in one thread, so that a store whose host has stopped
    cannot stop the launcher; the thread is a daemon and ends with `close`."""

    def __init__(self, task: RankTask) -> None:
        self._task = task
        self._least_s = task.world_size * 2 / _STORE_REQUESTS_PER_S
        self._outbox: list[str] = []
        self._lock = threading.Lock()
        self._stop = False
        self._to_tell = threading.Event()
        self._thread: threading.Thread | None = None
        self.news = threading.Event()  # set with whatever changes below
        self.all_done: dict[Step, float] = {}
        self.failed_elsewhere_at_s: float | None = None
        self.still_going = False
        self.broken = ""  # why the store is lost; nothing more is heard then
        self._i_failed = False

    def connect(self, deadline_s: float, room: str = "link") -> Any:
        """A client of the store with keys of its own under `room`, or the store's own exception after `deadline_s`."""
        import torch.distributed as dist

        tcp = dist.TCPStore(
            self._task.store_host,
            self._task.store_port,
            None,
            False,
            timeout=timedelta(seconds=deadline_s),
            wait_for_workers=False,
        )
        self._store = dist.PrefixStore(f"{self._task.run_id}/{room}", tcp)
        return self._store

    def start(self) -> None:
        """Begin to exchange; call it after the fork, since a child must not inherit a thread's locks."""
        self._thread = threading.Thread(target=self._exchange, name="nccl-guard-link", daemon=True)
        self._thread.start()

    def done(self, step: Step) -> None:
        """Tell the others that this rank has finished `step`."""
        self._tell(f"done/{step.value}")

    def failed(self) -> None:
        """Tell the others that this rank has failed: they get a short grace instead of their whole deadline."""
        self._i_failed = True
        self._tell("failed")

    def going(self) -> None:
        """Tell the others that this rank's communicator is overdue and still under way: who waits for it waits with it."""
        self._tell("going")

    def _tell(self, key: str) -> None:
        with self._lock:
            self._outbox.append(key)
        self._to_tell.set()

    def close(self) -> None:
        self._stop = True
        self._to_tell.set()
        if self._thread is not None:
            self._thread.join(timeout=2.0)

    def _exchange(self) -> None:
        pause_s = _SOONEST_S
        try:
            while True:
                self._to_tell.clear()
                last = self._stop
                with self._lock:
                    outbox, self._outbox = self._outbox, []
                for key in outbox:
                    self._store.add(key, 1)
                if last:
                    return
                if self._look():
                    self.news.set()
                    pause_s = _SOONEST_S
                self._to_tell.wait(max(pause_s, self._least_s))
                pause_s = min(_ASK_S, pause_s * 1.3)
        except (
            RuntimeError
        ) as error:  # DistError: the store's host is gone or closed it; the launcher goes by its own deadlines
            self.broken = f"{type(error).__name__}: {error}"

    def _look(self) -> bool:
        """Ask how far the others are; whether there is news."""
        now_s = time.monotonic()
        known = (self.failed_elsewhere_at_s, self.still_going, len(self.all_done))
        if self.failed_elsewhere_at_s is None and not self._i_failed and self._store.add("failed", 0) > 0:
            self.failed_elsewhere_at_s = now_s
        if not self.still_going and Step.DEVICE in self.all_done:
            self.still_going = self._store.add("going", 0) > 0
        step = next((s for s in Step if s not in self.all_done), None)
        while step is not None and self._store.add(f"done/{step.value}", 0) >= self._task.world_size:
            self.all_done[step] = now_s
            step = next((s for s in Step if s not in self.all_done), None)
        return known != (self.failed_elsewhere_at_s, self.still_going, len(self.all_done))


def arrive(store: Any, task: RankTask, deadline_s: float) -> list[int]:
    """Meet all ranks at the store; returns the ranks that had not come by the deadline."""
    store.set(f"here/{task.rank}", "1")
    if store.add("here", 1) == task.world_size:
        store.set("all_here", "1")
    try:
        store.wait(["all_here"], timedelta(seconds=deadline_s))
        return []
    except RuntimeError:  # DistStoreError on timeout; who is absent is asked below, and a broken store raises there again
        return [rank for rank in range(task.world_size) if not store.check([f"here/{rank}"])]
