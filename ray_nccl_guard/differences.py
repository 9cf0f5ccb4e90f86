"""What differs between the ranks before any collective: another library, driver, card, setting or interface than most have."""

from __future__ import annotations

from collections.abc import Sequence

from ray_nccl_guard.classes import FailureClass
from ray_nccl_guard.compat import skew
from ray_nccl_guard.compat.skew import Difference
from ray_nccl_guard.facts import Finding, RankFacts

# Each rank has its own: Ray and launchers set them so, and nothing follows from it.
_OWN = ("CUDA_VISIBLE_DEVICES",)
# NCCL's users meet mixed libraries as a hang without an error (nccl#1634), so a difference explains a failure that nothing
# else does.
_MUST_AGREE = ("torch", "libnccl.version")


def between(facts: Sequence[RankFacts]) -> tuple[Difference, ...]:
    """The facts on which ranks differ, by name; each with the value most have and who has another."""
    return skew.differences({fact.rank: _comparable(fact) for fact in facts})


def sentences(found: Sequence[Difference]) -> tuple[str, ...]:
    """One line for each difference, for the report's notes."""
    lines = []
    for one in found:
        others = "; ".join(f"rank{'s' * (len(r) > 1)} {skew.ranges(r)}: {value}" for value, r in one.others.items())
        lines.append(f"{one.name} differs: {others}; {'as many have' if one.tied else 'the others have'} {one.majority}")
    return tuple(lines)


def findings(facts: Sequence[RankFacts], *, backend: str) -> tuple[Finding, ...]:
    """The differences that may explain a failure of NCCL. None decides: many a mixed job runs."""
    if "nccl" not in backend:
        return ()
    return tuple(
        Finding(failure=FailureClass.VERSION_MISMATCH.value, text=line, culprit_ranks=() if one.tied else one.ranks)
        for one in between(facts)
        if one.name in _MUST_AGREE
        for line in sentences([one])
    )


def _comparable(fact: RankFacts) -> dict[str, object]:
    """What should be the same on every rank. What is each rank's own (address, GPU, process) is left out."""
    gpu, chosen = fact.gpu, fact.addresses
    return {
        "torch": fact.torch_version or None,
        "python": fact.python_version or None,
        "driver": fact.driver_version or None,
        "gpu": None if gpu is None else {"name": gpu.name, "capability": gpu.capability, "total_bytes": gpu.total_bytes},
        # The same bytes at another place are the same library.
        "libnccl": {k: v for k, v in fact.libnccl.items() if v and k in ("version", "cuda", "fingerprint")},
        "env": {k: v for k, v in fact.settings.items() if k not in _OWN},
        "limit": dict(fact.limits),
        "shm_total_bytes": fact.shm_total_bytes,
        # Of the interfaces in use: what else a node has differs without harm.
        "mtu": None
        if chosen is None
        else {n: fact.mtu[n] for n in {chosen.nccl.interface, chosen.gloo.interface} if n in fact.mtu},
        "interface": None if chosen is None else {"nccl": chosen.nccl.interface, "gloo": chosen.gloo.interface},
    }
