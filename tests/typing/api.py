"""The public API as users write it; checked by mypy (`make check`), never run."""

from ray_nccl_guard import Action, FailureClass, GuardedTorchConfig, NcclInitRefused, Policy, ProbeSpec, current_report

plain = GuardedTorchConfig()
full = GuardedTorchConfig(
    backend="nccl",
    init_method="tcp",
    timeout_s=600,
    policy=Policy(actions={"unknown": "refuse", FailureClass.P2P_OR_ACS: Action.REFUSE}, budget_s=60.0),
    probe=ProbeSpec(comm_init_s=60.0, sizes_bytes=(4, 1 << 20)),
    collectives=["ddp", "all_to_all"],
    eager_init=False,
)
by_name = GuardedTorchConfig(policy="fallback", probe=None)
rehearsed = [GuardedTorchConfig(drill="init:hang@rank1"), GuardedTorchConfig(drill=["init:hang@rank1", "coll:abort@rank0"])]
presets: list[Policy] = [Policy(), Policy.fallback(), Policy.strict(), Policy.observe(), Policy.from_name("strict")]


def train_func() -> None:
    report = current_report()
    if report is not None:
        print(report["backend_chosen"])


def catch(error: NcclInitRefused) -> str:
    return f"{error} {error.report['verdict']} {error.help}"
