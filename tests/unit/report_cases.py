"""Reports of every kind, made by the real pipeline from what ranks answered: for the text, the page, and the saved file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from ray_nccl_guard.facts import Finding, Gpu, RankFacts, findings
from ray_nccl_guard.guard import GroupLost, Preflight, Proof
from ray_nccl_guard.ladder import Ladder
from ray_nccl_guard.network.grid import Matrix
from ray_nccl_guard.policy import Action, Policy
from ray_nccl_guard.probe.spec import MIB, Outcome, ProbeResult, Step, StepRecord
from ray_nccl_guard.report import Report
from ray_nccl_guard.rung import Decision, Rung, Wanted
from tests.unit.builders import gpu_rank, lines

ILLEGAL = "gpu-02:41873:41990 [3] enqueue.cc:1556 NCCL WARN Cuda failure 700 'an illegal memory access was encountered'"
P2P = "gpu-01:10:20 [0] transport/p2p.cc:275 NCCL WARN Cuda failure 217 'peer access is not supported between these two devices'"
GLOO_S = {4: 0.00021, MIB: 0.0019, 25 * MIB: 0.0412}
NCCL_S = {4: 0.00003, MIB: 0.0002, 25 * MIB: 0.0021}
PASSED = (
    ("store", 0.02),
    ("import", 0.001),
    ("device", 0.31),
    ("comm_init", 0.84),
    ("collective", 0.12),
    ("teardown", 0.01),
)


def facts(world_size: int, per_host: int = 8, **of_rank: dict[str, object]) -> tuple[RankFacts, ...]:
    """Facts of GPU ranks; `r3={...}` changes rank 3's."""
    made = []
    for rank in range(world_size):
        gpu = Gpu(uuid=f"GPU-{rank:08x}", name="NVIDIA H100 80GB HBM3", capability=(9, 0), total_bytes=85 << 30)
        known: dict[str, object] = {
            "host": f"gpu-{rank // per_host + 1:02d}",
            "local_rank": rank % per_host,
            "device_index": rank % per_host,
            "gpu": gpu,
            "driver_version": "580.95.05",
            "torch_version": "2.15.0",
            "python_version": "3.11.7",
            "libnccl": {"version": "2.30.7", "cuda": "13.3", "fingerprint": "5b1c"},
            "settings": {"NCCL_DEBUG": "WARN"},
            **of_rank.get(f"r{rank}", {}),
        }
        made.append(gpu_rank(rank, **known))
    return tuple(made)


def passed(rank: int, all_reduce_s: dict[int, float] | None = None) -> ProbeResult:
    return ProbeResult(
        rank=rank, outcome=Outcome.OK, step=Step.TEARDOWN, seconds=1.3 + rank / 1000, device=f"cuda:{rank % 8}",
        proved=("all_reduce", "broadcast", "all_gather", "barrier"), all_reduce_s=all_reduce_s or {},
        steps=tuple(StepRecord(step=Step(n), outcome=Outcome.OK, seconds=s + rank / 5000) for n, s in PASSED),
    )  # fmt: skip


def ended(rank: int, outcome: Outcome, step: Step, *log: str, **fields: object) -> ProbeResult:
    """A rank whose steps before `step` passed."""
    before = [(n, s) for n, s in PASSED if Step(n).position < step.position]
    steps = [StepRecord(step=Step(n), outcome=Outcome.OK, seconds=s) for n, s in before]
    steps.append(StepRecord(step=step, outcome=outcome, seconds=2.0, detail=str(fields.get("detail", ""))))
    error = "" if outcome is Outcome.WAITING else (log[-1] if log else "")
    return ProbeResult(
        rank=rank, outcome=outcome, step=step, error=error, lines=lines(*log), steps=tuple(steps), device=f"cuda:{rank % 8}",
        killed_by_guard=outcome in (Outcome.WAITING, Outcome.TIMED_OUT), seconds=3.1, **fields,
    )  # fmt: skip


def preflight(ranks: Sequence[RankFacts], policy: Policy | None = None, found: Sequence[Finding] = ()) -> Preflight:
    wanted = Wanted(backend="nccl", world_size=len(ranks), asked_gpus=1.0)
    known = (*findings(ranks, backend="nccl", asked_gpus=1.0), *found)
    return Preflight(facts=tuple(ranks), ladder=Ladder(wanted, policy or Policy()), findings=known)


def settled(report: Report) -> Report:
    """The same without what differs from run to run."""
    attempts = tuple(replace(a, seconds=1.5 + number) for number, a in enumerate(report.attempts))
    return report.with_changes(
        attempts=attempts, timings_s={"probe": 4.5, "guard": 4.62}, run_name="exp7", path="/runs/exp7/nccl_guard/report.json"
    )


def all_well() -> Report:
    ranks = facts(4)
    return preflight(ranks).run(lambda rung, within_s: Proof(results=tuple(passed(r.rank, NCCL_S) for r in ranks)))


def fell_back(world_size: int = 4, culprit: int = 3) -> Report:
    """Rank 3 meets CUDA 700, and gloo passes; one host differs in its driver."""
    ranks = facts(world_size, r1={"driver_version": "570.86.10"}, r2={"settings": {"NCCL_DEBUG": "INFO"}})

    def prove(rung: Rung, within_s: float) -> Proof:
        if rung.backend == "gloo":
            return Proof(results=tuple(passed(r.rank, GLOO_S) for r in ranks))
        at = "all_reduce 1048576 B"
        results = [ended(r.rank, Outcome.WAITING, Step.COLLECTIVE, detail=at) for r in ranks]
        results[culprit] = ended(culprit, Outcome.DIED, Step.COLLECTIVE, ILLEGAL, signal=6, detail=at)
        return Proof(results=tuple(results))

    return preflight(ranks).run(prove)


def cured() -> Report:
    """One setting cures it: training stays on NCCL."""
    ranks = facts(4)

    def prove(rung: Rung, within_s: float) -> Proof:
        if rung.env:
            return Proof(results=tuple(passed(r.rank, NCCL_S) for r in ranks))
        return Proof(results=tuple(ended(r.rank, Outcome.FAILED, Step.COMM_INIT, P2P) for r in ranks))

    return preflight(ranks).run(prove)


def refused() -> Report:
    """A host that nobody reaches: the network stage decides, with its matrix."""
    ranks = facts(6, per_host=2)
    blocked = Finding(
        failure="store_unreachable", text="host gpu-03 cannot reach the store on host gpu-01: packets are dropped",
        decides=True, culprit_ranks=(4, 5),
    )  # fmt: skip
    rows = (("-", "ok", "SYN"), ("ok", "-", "SYN"), ("SYN", "SYN", "-"))
    matrix = Matrix(hosts=("gpu-01", "gpu-02", "gpu-03"), rows=rows, of=3, failed=3)

    def prove(rung: Rung, within_s: float) -> Proof:
        results = [ended(r.rank, Outcome.NOT_RUN, Step.STORE) for r in ranks]
        for rank in (4, 5):
            results[rank] = ended(rank, Outcome.FAILED, Step.STORE, "no answer to connect within 10 s", detail="connect")
        return Proof(results=tuple(results), findings=(blocked,), matrix=matrix)

    return preflight(ranks).run(prove)


def lost() -> Report:
    """A worker died: fresh workers are asked for."""
    ranks = facts(2)
    flight = preflight(ranks)

    def prove(rung: Rung, within_s: float) -> Proof:
        gone = ProbeResult(rank=1, outcome=Outcome.DIED, error="the worker process died: killed")
        raise GroupLost([ended(0, Outcome.WAITING, Step.COMM_INIT), gone])

    try:
        return flight.run(prove)
    except GroupLost:
        why = "the workers are spent, and the next rung needs fresh ones"
        return flight.report(Decision(action=Action.RETRY, backend=flight.ladder.rung.backend, because=why))


def drilled() -> Report:
    """A rehearsal: nccl is acted out with rank 3 meeting CUDA 700, gloo is proved."""
    ranks = facts(4)
    flight = preflight(ranks)
    flight.drill = "allreduce:cuda700@rank3"

    def prove(rung: Rung, within_s: float) -> Proof:
        if rung.backend == "gloo":
            return Proof(results=tuple(passed(r.rank, GLOO_S) for r in ranks))
        results = [ended(r.rank, Outcome.WAITING, Step.COLLECTIVE, detail="all_reduce 4 B") for r in ranks]
        said = "Drilled: CUDA error: an illegal memory access was encountered (drill)"
        results[3] = ended(3, Outcome.FAILED, Step.COLLECTIVE, said, detail="all_reduce 4 B")
        return Proof(results=tuple(results), drill=flight.drill)

    return flight.run(prove)


def own_failure() -> Report:
    decision = Decision(action=Action.PROCEED, backend="nccl", because="the guard failed, and training goes on without it")
    trace = 'Traceback (most recent call last):\n  File "guard.py", line 1, in run\nKeyError: 3\n'
    return Report(world_size=2, backend_wanted="nccl", decision=decision, facts=facts(2), guard_error=trace)


CASES: dict[str, Callable[[], Report]] = {
    "passed": all_well,
    "fell_back": fell_back,
    "cured": cured,
    "refused": refused,
    "lost": lost,
    "guard_error": own_failure,
    "drill": drilled,
    "fell_back_64": lambda: fell_back(64, culprit=21),
}
