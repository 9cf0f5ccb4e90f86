"""Runs functions as ranks: imports torch once, then forks one process per rank and request. Driven by ranks.py.

A request and its answer are one line of JSON each, on stdin and on a descriptor of its own (argv[1]), so that nothing a
library prints can be taken for an answer. The rank's function, "module:function", gets (rank, world, **arguments).
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import resource
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG = 1


def be_a_rank(request: dict[str, Any], rank: int, folder: Path) -> None:
    """In the forked child: becomes the rank, and ends with exit code 0 (returned) or 1 (raised)."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # writing one of a process that maps torch takes seconds
    output = os.open(folder / f"{rank}.out", os.O_CREAT | os.O_WRONLY)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(request["world"])})
    os.environ.update({name: value.replace("{rank}", str(rank)) for name, value in request["env"].items()})
    code = 1
    result: dict[str, Any] = {}
    try:
        module, _, function = request["body"].partition(":")
        body = getattr(importlib.import_module(module), function)
        result["value"] = body(rank, request["world"], **request["arguments"])
        code = 0
    except BaseException as error:  # whatever it is, it is the result
        traceback.print_exc()
        result.update(error_type=type(error).__name__, error_text=str(error))
    (folder / f"{rank}.json").write_text(json.dumps(result))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def collect(pids: dict[int, int], deadline_s: float) -> dict[int, dict[str, Any]]:
    """Waits for the ranks; what is left at the deadline is killed and called hung."""
    ended: dict[int, dict[str, Any]] = {}
    start_s = time.monotonic()
    hung: set[int] = set()
    while len(ended) < len(pids):
        for pid, rank in pids.items():
            if rank in ended:
                continue
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
                code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else None
                seconds = time.monotonic() - start_s
                ended[rank] = {"exit_code": code, "signal": number, "hung": rank in hung, "seconds": seconds}
            elif time.monotonic() - start_s > deadline_s and rank not in hung:
                hung.add(rank)
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    return ended


def serve(answers: int) -> None:
    for line in sys.stdin:
        request = json.loads(line)
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            pids: dict[int, int] = {}
            for rank in range(request["world"]):
                pid = os.fork()
                if pid == 0:
                    os.close(answers)
                    be_a_rank(request, rank, folder)
                pids[pid] = rank
            outcomes = collect(pids, request["deadline_s"])
            for pid, rank in pids.items():
                outcomes[rank].update(pid=pid, rank=rank, output=(folder / f"{rank}.out").read_text(errors="replace"))
                result = folder / f"{rank}.json"
                outcomes[rank].update(json.loads(result.read_text()) if result.exists() else {})
        os.write(answers, (json.dumps([outcomes[rank] for rank in sorted(outcomes)]) + "\n").encode())


if __name__ == "__main__":
    import torch
    import torch.distributed  # imported here so that every rank has it

    torch.set_num_threads(1)  # an OpenMP pool does not survive a fork
    serve(int(sys.argv[1]))
