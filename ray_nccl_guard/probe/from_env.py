"""One process per rank as a launcher starts it: who this process is by its environment, and where the store is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ray_nccl_guard.errors import UsageError

# torchrun and the PyTorch operator set the first; Open MPI, MPICH and Intel MPI (hydra), Slurm the others.
_RANK = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
_WORLD_SIZE = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS")
_LOCAL_RANK = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")
_DEFAULT_PORT = 29500  # torch's own (torch.distributed.run)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchedRank:
    """What a launcher told this process.

    Attributes:
        local_rank: 0 where the launcher sets none: then one process per pod is meant.
        serves_store: this process has to serve the store at `host`:`port`; False where another rank or the launcher does.
        room: prefix for keys in a store that may outlive this run.
    """

    rank: int
    world_size: int
    local_rank: int
    host: str
    port: int
    serves_store: bool
    room: str


def read(environ: Mapping[str, str]) -> LaunchedRank:
    """This process's rank by its environment.

    Raises:
        UsageError: a variable is missing, is no number, or contradicts another.
    """
    world_size = _number(environ, _WORLD_SIZE)
    rank = _number(environ, _RANK)
    if world_size < 1:
        raise UsageError(f"a world of {world_size} ranks proves nothing: WORLD_SIZE has to be 1 or more")
    if not 0 <= rank < world_size:
        raise UsageError(f"rank {rank} does not exist in a world of {world_size}: ranks count from 0 to {world_size - 1}")
    local = next((environ[name] for name in _LOCAL_RANK if environ.get(name)), "0")
    host = environ.get("MASTER_ADDR", "")
    if not host and world_size > 1:
        raise UsageError("MASTER_ADDR is not set: it is the address of rank 0, where the ranks meet", help=_HELP)
    # torchrun's agent serves the store of c10d rendezvous itself, at the same address (TORCHELASTIC_USE_AGENT_STORE).
    agent = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    run, restart = environ.get("TORCHELASTIC_RUN_ID", ""), environ.get("TORCHELASTIC_RESTART_COUNT", "")
    return LaunchedRank(
        rank=rank,
        world_size=world_size,
        local_rank=_int("LOCAL_RANK", local),
        host=host or "127.0.0.1",
        port=_int("MASTER_PORT", environ.get("MASTER_PORT") or str(_DEFAULT_PORT if world_size > 1 else 0)),
        serves_store=rank == 0 and not agent,
        room=f"ray_nccl_guard_probe/{run}/{restart}",
    )


_HELP = (
    "torchrun, PyTorchJob and mpirun set it; in a plain pod set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT",
    "without a launcher, on one host: ray-nccl-guard probe --ranks N",
)


def _number(environ: Mapping[str, str], names: tuple[str, ...]) -> int:
    for name in names:
        if environ.get(name):
            return _int(name, environ[name])
    raise UsageError(f"--from-env: {names[0]} is not set (nor {', '.join(names[1:])})", help=_HELP)


def _int(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"{name} is a whole number, not {text!r}") from None
