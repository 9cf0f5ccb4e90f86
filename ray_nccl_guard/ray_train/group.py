"""The training group itself: Ray's own way to form it, with the device, the warm-up and the deadline that Ray leaves out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from ray_nccl_guard import eager
from ray_nccl_guard.facts import RankFacts
from ray_nccl_guard.probe.launch import GRACE_S
from ray_nccl_guard.probe.spec import Outcome, ProbeResult, ProbeSpec
from ray_nccl_guard.prove.lost import without_answer
from ray_nccl_guard.ray_train import on_worker
from ray_nccl_guard.ray_train.settings import GuardSettings
from ray_nccl_guard.ray_train.workers import Answer, Workers, values
from ray_nccl_guard.rung import has_legacy

_UNLINK_S = 5.0  # a look into /proc; what cannot answer by then hangs, and is killed


class TrainingGroup:
    """Forms the default process group on every worker, within a deadline."""

    def __init__(
        self,
        workers: Workers,
        facts: Sequence[RankFacts],
        config: Any,
        settings: GuardSettings,
        spec: ProbeSpec,
        *,
        accept_s: float = 0.0,
    ) -> None:
        self.workers, self.facts, self.config, self.settings, self.spec = workers, facts, config, settings, spec
        self.accept_s = accept_s

    def join(self, backend: str, env: dict[str, str], first: Answer) -> list[ProbeResult]:
        """One result per rank; anything but OK on any of them means that these workers are spent.

        Args:
            first: what rank 0 answered to `on_worker.get_ready`: it has a free port for the group's store.
        """
        values([first])
        if not first.ok:
            return [ProbeResult(rank=0, outcome=Outcome.MISSING, error="rank 0's worker gave no answer")]
        port = first.value[1]
        tasks = [self._task(fact, backend, env, port) for fact in self.facts]
        longest_s = tasks[0].init_deadline_s() + self.spec.collective_s + GRACE_S
        if not tasks[0].warm_up:
            longest_s = self.config.timeout_s + 90.0  # as plain TorchConfig: torch's own timeout bounds it
        answers = self.workers.ask(eager.join, [(task,) for task in tasks], deadline_s=longest_s, patience_s=_patience_s)
        values(answers)
        # NCCL does not tell the others: they wait in its initialisation for the one that failed.
        failed = any(a.died is not None or (a.ok and a.value.outcome is Outcome.FAILED) for a in answers)
        results = [a.value if a.ok else without_answer(a, cut_short=failed) for a in answers]
        if any(r.outcome is not Outcome.OK for r in results):
            self._unlink_shared_memory()
        return results

    def _unlink_shared_memory(self) -> None:
        """NCCL unlinks its files once all ranks have met; workers that are killed before leave them behind. Any worker of a
        node can do it for all of that node: those that still wait for the group do not answer."""
        pids = {fact.node: tuple(f.pid for f in self.facts if f.node == fact.node) for fact in self.facts}
        self.workers.ask(
            on_worker.unlink_shared_memory,
            [(pids[fact.node],) for fact in self.facts],
            deadline_s=_UNLINK_S,
            patience_s=lambda answer: _UNLINK_S / 5,
        )

    def _url(self, port: int) -> str:
        if self.config.init_method not in ("env", "tcp"):
            raise ValueError(f"TorchConfig.init_method is 'env' or 'tcp', not {self.config.init_method!r}")
        address = self.facts[0].address
        host = f"[{address}]" if ":" in address else address
        return "env://" if self.config.init_method == "env" else f"tcp://{host}:{port}"

    def _variables(self, fact: RankFacts, port: int) -> dict[str, str]:
        per_node = Counter(f.node for f in self.facts)
        nodes = list(dict.fromkeys(f.node for f in self.facts))
        variables = {
            "RANK": str(fact.rank),
            "WORLD_SIZE": str(len(self.facts)),
            "LOCAL_RANK": str(fact.local_rank),
            "LOCAL_WORLD_SIZE": str(per_node[fact.node]),
            "NODE_RANK": str(nodes.index(fact.node)),
            "ACCELERATE_TORCH_DEVICE": "cpu" if fact.device_index is None else f"cuda:{fact.device_index}",
        }
        if self.config.init_method == "env":
            variables |= {"MASTER_ADDR": self.facts[0].address, "MASTER_PORT": str(port)}
        return variables

    def _task(self, fact: RankFacts, backend: str, env: dict[str, str], port: int) -> eager.GroupTask:
        on_gpu = "nccl" in backend and fact.device_index is not None
        # torch 2.15's nccl binds a device whether told or not, and guesses LOCAL_RANK: it is always told.
        bind = on_gpu and (self.settings.eager_init or has_legacy(fact.torch_version))
        return eager.GroupTask(
            backend=backend,
            rank=fact.rank,
            world_size=len(self.facts),
            init_method=self._url(port),
            timeout_s=float(self.config.timeout_s),
            device_index=fact.device_index if bind else None,
            warm_up_device=fact.device_index,
            warm_up=self.settings.eager_init,
            variables=self._variables(fact, port),
            env=env,
            accept_s=self.accept_s,
            spec=self.spec,
        )


def _patience_s(answer: Answer) -> float | None:
    ok = isinstance(answer.value, ProbeResult) and answer.value.outcome is Outcome.OK
    return None if ok else GRACE_S
