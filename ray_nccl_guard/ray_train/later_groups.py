"""Warns once, in a worker that fell back, when the program makes a group on the backend that failed; nothing else would say so."""

from __future__ import annotations

import functools
import inspect
import logging
import os
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any

from ray_nccl_guard.facts import RankFacts
from ray_nccl_guard.policy import Action
from ray_nccl_guard.ray_train.workers import Workers
from ray_nccl_guard.report import Report

log = logging.getLogger("ray.train.nccl_guard")

_ASK_S = 10.0  # one small function in each worker
# torch's names of NCCL; 2.15 has two implementations, and falling back to the old one says nothing against the old one.
_NCCL = frozenset({"nccl", "nccl2", "nccl-legacy"})


def watch_workers(workers: Workers, facts: Sequence[RankFacts], report: Report) -> None:
    """`watch` on every worker, if this run fell back to another backend. What cannot be watched is said: the group stands."""
    decision = report.decision
    if decision.action is not Action.FALL_BACK or decision.backend in (None, report.backend_wanted):
        return
    asked = [(decision.backend, report.verdict.failure.value, fact.device_index is not None) for fact in facts]
    answers = workers.ask(watch, asked, deadline_s=_ASK_S)
    missing = [answer for answer in answers if not answer.value]
    if missing:
        log.warning("nccl_guard: later NCCL groups are not watched on %d workers: %s", len(missing), missing[0])


def watch(chosen: str, failure: str, on_gpu: bool) -> bool:
    """Watch this process for groups on the backend that failed, after a fall-back to `chosen` because of `failure` (a class).

    Every way to a group (`init_process_group`, `new_group`, `init_device_mesh`, ...) passes through one function of torch,
    the same from 2.4 to 2.15, which is wrapped. False if this torch has it no more: then nothing is watched.
    """
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    original = getattr(c10d, "_new_process_group_helper", None)
    if original is None:
        return False
    original = getattr(original, "__wrapped__", original) if getattr(original, "_nccl_guard", False) else original
    suspect = _NCCL - {chosen}
    parameters = inspect.signature(original)
    said = False

    @functools.wraps(original)
    def watched(*args: Any, **kwargs: Any) -> Any:
        nonlocal said
        if not said:
            given = parameters.bind_partial(*args, **kwargs).arguments.get("backend", "")
            if _backends(str(given), on_gpu) & suspect:
                said = True
                function, where = _caller(sys._getframe(1), os.path.dirname(dist.__file__))
                log.warning(
                    "nccl_guard: %s makes a group on %r at %s, but this run fell back to %s because NCCL failed its "
                    "pre-flight (%s): expect the same failure there. Leave the backend out and the new group is on %s, or "
                    "ask torch.distributed.get_backend().",
                    function, str(given), where, chosen, failure, chosen,
                )  # fmt: skip
        return original(*args, **kwargs)

    watched._nccl_guard = True  # type: ignore[attr-defined]
    c10d._new_process_group_helper = watched
    return True


def _backends(given: str, on_gpu: bool) -> set[str]:
    """The backends in `nccl`, `cpu:gloo,cuda:nccl` or, for a call that named none, `undefined`: NCCL for CUDA tensors."""
    given = given.lower()
    if given in ("undefined", "none", ""):
        return {"nccl"} if on_gpu else set()
    return {part.split(":")[-1].strip() for part in given.split(",")}


def _caller(frame: FrameType | None, torch_folder: str) -> tuple[str, str]:
    """The function of torch.distributed that the program called, and the program's own `file:line`."""
    function = "torch.distributed"
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(torch_folder) and not name.endswith(("contextlib.py", "functools.py")):
            return function, f"{name}:{frame.f_lineno}"
        if frame.f_code.co_name not in ("wrapper", "decorate_context", "inner"):  # torch's logging decorators
            function = f"{frame.f_code.co_name}()"
        frame = frame.f_back
    return function, "an unknown line"
