"""The ladder: which rung comes next after a verdict, and the decision when there is none. Pure: it asks nobody and runs nothing."""

from __future__ import annotations

from ray_nccl_guard.classes import CLASSES, FailureClass
from ray_nccl_guard.policy import Action, Policy
from ray_nccl_guard.probe.operations import GLOO_LACKS_ON_CUDA
from ray_nccl_guard.probe.spec import Step
from ray_nccl_guard.rung import GLOO, Decision, Rung, Wanted
from ray_nccl_guard.verdict import Verdict

# The classes that torch 2.15's new `nccl` backend may cause by itself: the old one is worth a try. The others name something
# that both meet.
_MAY_BE_BACKEND = frozenset(
    {
        FailureClass.ILLEGAL_MEMORY_ACCESS,
        FailureClass.INIT_TIMEOUT_HANG,
        FailureClass.WRONG_RESULT_CORRUPTION,
        FailureClass.VERSION_MISMATCH,
        FailureClass.UNSUPPORTED_OP_OR_CONFIG,
        FailureClass.PROCESS_CRASHED,
        FailureClass.UNKNOWN,
    }
)
_BEFORE_NCCL = (Step.STORE, Step.PEERS, Step.IMPORT, Step.DEVICE)
_RELIEF_TRIES = 2  # DESIGN D6: at most two, then the next rung


class Ladder:
    """The rungs of one run on one set of workers. It lives across attempts: a rung that failed is not tried again."""

    def __init__(self, wanted: Wanted, policy: Policy) -> None:
        self.wanted, self.policy = wanted, policy
        self.first = Rung(backend=wanted.backend, why="it is what the job asked for")
        self.rung = self.first
        self.notes: list[str] = []
        self._tried: list[Rung] = [self.first]
        self._needed: set[str] = set()
        self.primary: Verdict | None = None

    def after_pass(self) -> Decision:
        """The current rung was proved on every rank."""
        if self.rung.backend == self.first.backend and not self.rung.env:
            because = "the probe passed on every rank" if self.primary is None else "it passed when it was tried again"
            return Decision(action=Action.PROCEED, backend=self.rung.backend, because=because, notes=tuple(self.notes))
        failure = self.primary.failure.value if self.primary else "failure"
        return Decision(
            action=Action.FALL_BACK,
            backend=self.rung.backend,
            relief=dict(self.rung.env),
            because=f"policy {self.policy.name}: {failure} = {self._rule()}, and {self.rung.name} passed the same probe "
            f"on {self.wanted.world_size}/{self.wanted.world_size} ranks",
            notes=tuple(self.notes),
        )

    def after_failure(self, verdict: Verdict, *, budget_left_s: float = float("inf"), during: str = "") -> Rung | Decision:
        """The current rung failed with `verdict`, `during` an operation: the next rung to prove, or the decision if there is none."""
        if self.primary is None or (self.rung.retry and not self.rung.env):
            self.primary = verdict
        if self.policy.report_only:
            return Decision(
                action=Action.PROCEED,
                backend=self.wanted.backend,
                because="policy observe only reports: training goes on as if the guard were not there",
                notes=tuple(self.notes),
            )
        following = self._next(verdict, during)
        used_up = f"the time for all rungs (Policy.budget_s = {self.policy.budget_s:g} s) was used up"
        if isinstance(following, Decision):
            # A later rung that the budget cut short has not failed: nothing may be concluded from it.
            cut = budget_left_s <= 0 and self.rung is not self.first and following.action is Action.REFUSE
            return self.refuse(f"{used_up} while {self.rung.name} was being proved") if cut else following
        if budget_left_s <= 0:
            return self.refuse(f"{used_up} before {following.name}")
        self.rung = following
        self._tried.append(following)
        return following

    def would_retry(self, verdict: Verdict) -> bool:
        """Whether the same rung is tried once more after `verdict`: what goes away by itself need not be located."""
        primary = self.primary or verdict
        return self.policy.action_for(primary.failure) is Action.RETRY and not any(r.retry for r in self._tried)

    def smaller(self) -> Rung | None:
        """After a pass with several settings: the same without one of them, None once each is known to be needed.

        The users are to learn the one setting that matters. Such a probe is no try of its own: it costs only time.
        """
        env = self.rung.env
        for name in env if len(env) > 1 else ():
            rest = {k: v for k, v in env.items() if k != name}
            if name not in self._needed and not any(r.backend == self.rung.backend and r.env == rest for r in self._tried):
                return Rung(backend=self.rung.backend, env=rest, why=f"is {name} needed?", trial=True, price=True)
        return None

    def after_smaller(self, trial: Rung, passed: bool) -> None:
        """The rung of `smaller` passed, and is the current one from now on, or what it left out is needed."""
        (dropped,) = set(self.rung.env) - set(trial.env)
        self._tried.append(trial)
        if passed:
            self.rung = trial
            self.notes.append(f"{dropped} is not needed: the same probe passed without it")
        else:
            self._needed.add(dropped)

    def refuse(self, because: str) -> Decision:
        return Decision(action=Action.REFUSE, backend=None, because=because, notes=tuple(self.notes))

    def _rule(self) -> str:
        if self.policy.whatever_class:
            return "fall back whatever the class"
        assert self.primary is not None
        return self.policy.action_for(self.primary.failure).value

    def _next(self, verdict: Verdict, during: str) -> Rung | Decision:
        primary = self.primary or verdict
        if self.rung.backend == GLOO:
            return self._after_gloo(verdict, during)
        action = self.policy.action_for(primary.failure)
        if action is Action.RETRY and not any(r.retry for r in self._tried):
            return Rung(backend=self.rung.backend, env=self.rung.env, retry=True, why="this class is tried once more")
        if action is Action.PROCEED:
            return Decision(
                action=Action.PROCEED, backend=self.wanted.backend, because=f"policy: {primary.failure.value} = proceed"
            )
        if action is not Action.FALL_BACK and not self.policy.whatever_class:
            how = (
                "it failed again when it was tried once more"
                if action is Action.RETRY
                else CLASSES[primary.failure].gloo_why
            )
            return self.refuse(f"policy {self.policy.name}: {primary.failure.value} = refuse; {how}")
        if (
            primary.failure is FailureClass.DUPLICATE_GPU
            and not 0 < self.wanted.asked_gpus < 1
            and not self.policy.whatever_class
        ):
            return self.refuse("two ranks share a GPU although whole GPUs were asked for; gloo would hide that")
        if self._device_hangs(verdict) and not self.policy.whatever_class:
            return self.refuse(
                "CUDA itself hangs there before NCCL has any part in it, and gloo moves a GPU's tensors by CUDA too"
            )
        if verdict.step in _BEFORE_NCCL:
            return self._gloo(primary)  # no setting of NCCL and no other backend of it changes what failed without NCCL
        return self._relief(verdict) or self._legacy(primary) or self._gloo(primary)

    def _device_hangs(self, verdict: Verdict) -> bool:
        """Whether a GPU did not answer its first work: the same work comes before gloo's turn, and takes its deadlines again."""
        hung = verdict.failure is FailureClass.INIT_TIMEOUT_HANG and verdict.step is Step.DEVICE
        return hung and self.wanted.on_gpu

    def _relief(self, verdict: Verdict) -> Rung | None:
        if not self.policy.relief or not verdict.relief:
            return None
        tried = [r for r in self._tried if r.env and not r.trial]
        relief = dict(verdict.relief)
        kept = {k: self.wanted.user_settings[k] for k in relief if k in self.wanted.user_settings}
        if kept:
            already = all(kept.get(k) == v for k, v in relief.items())
            files = {k: f" in {path}" for k, path in self.wanted.settings_from.items()}
            set_by_user = ", ".join(f"{k}={v}{files.get(k, '')}" for k, v in kept.items())
            would = ", ".join(f"{k}={v}" for k, v in relief.items())
            note = f"{would} would have been tried, but you have set {set_by_user}"
            if not already and note not in self.notes:
                self.notes.append(note)
            return None
        if len(tried) >= _RELIEF_TRIES or any(dict(r.env) == relief for r in tried):
            return None
        backend = self.first.backend
        return Rung(
            backend=backend,
            env=relief,
            price=True,
            why=f"it is the smallest setting known to sidestep {verdict.failure.value}",
        )

    def _legacy(self, primary: Verdict) -> Rung | None:
        if primary.failure not in _MAY_BE_BACKEND or not (
            self.wanted.has_legacy and self.policy.relief and self.first.backend in ("nccl", "nccl2")
        ):
            return None
        if any(r.backend == "nccl-legacy" for r in self._tried):
            return None
        return Rung(
            backend="nccl-legacy", price=True, why="the fault may be of torch's new nccl backend; the old one will go away"
        )

    def _gloo(self, primary: Verdict) -> Rung | Decision:
        size, policy = self.wanted.world_size, self.policy
        if not policy.gloo:
            return self.refuse(f"policy {policy.name} never falls back to gloo")
        if size > policy.world_ceiling:
            return self.refuse(f"gloo is refused above {policy.world_ceiling} ranks, and this job has {size}")
        if lacking := [name for name in self.wanted.collectives if self.wanted.on_gpu and name in GLOO_LACKS_ON_CUDA]:
            named = ", ".join(f"{name} ({GLOO_LACKS_ON_CUDA[name]})" for name in lacking)
            return self.refuse(f"gloo has no {named} of CUDA tensors, which this job declares among its collectives")
        if size > policy.world_warn:
            self.notes.append(f"gloo with {size} ranks: above {policy.world_warn} every step pays for rings over TCP")
        return Rung(backend=GLOO, price=True, why="no way with NCCL is left")

    def _after_gloo(self, verdict: Verdict, during: str) -> Rung | Decision:
        relief = {k: v for k, v in verdict.relief.items() if k.startswith("GLOO_") and k not in self.wanted.user_settings}
        if relief and self.policy.relief and not any(r.backend == GLOO and r.env for r in self._tried):
            return Rung(backend=GLOO, env=relief, price=True, why="gloo took an interface that does not connect the hosts")
        if self.first.backend == GLOO:
            # There is no other rung, and a busy machine must not cost a healthy job its start: once more, whatever was seen.
            if self.policy.action_for(verdict.failure) is not Action.REFUSE and not any(r.retry for r in self._tried):
                return Rung(backend=GLOO, retry=True, why="there is nothing below gloo, so it is tried once more")
            return self.refuse(f"the job asked for gloo, and {CLASSES[verdict.failure].summary}")
        where = f" in {during}" if during else ""
        return self.refuse(f"gloo failed its own probe{where}: {verdict.summary or CLASSES[verdict.failure].summary}")
