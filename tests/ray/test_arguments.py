"""`--nccl-guard` of a script with argparse becomes the config; rule packs and the environment's flags become settings."""

from __future__ import annotations

import argparse
import pickle

import pytest

pytest.importorskip("ray", reason="ray is not installed")
from ray.train.torch import TorchConfig

from ray_nccl_guard import GuardedTorchConfig, add_argument, from_args
from ray_nccl_guard.errors import UsageError
from ray_nccl_guard.probe.spec import ProbeSpec
from ray_nccl_guard.rulebook import load_rules, shipped_rules

RULE = 'failure = "p2p_or_acs"\nrole = "cause"\nsummary = "s"\npatterns = ["the words of a vendor"]\n'


@pytest.fixture
def pack(tmp_path):
    (tmp_path / "of-a-vendor.toml").write_text(RULE)
    return tmp_path


def config(*line, **options):
    parser = argparse.ArgumentParser()
    add_argument(parser)
    return from_args(parser.parse_args(line), **options)


def test_the_flag_decides_between_rays_config_and_the_guarded_one():
    assert type(config(timeout_s=60, collectives="fsdp")) is TorchConfig and config(timeout_s=60).timeout_s == 60
    assert type(config("--nccl-guard=off")) is TorchConfig
    guarded = config("--nccl-guard=strict", backend="gloo", collectives="fsdp")
    assert type(guarded) is GuardedTorchConfig and guarded.guard.policy.name == "strict"
    assert guarded.guard.policy.sources == {"name": "argument"} and "reduce_scatter" in guarded.guard.collectives


def test_the_flag_without_a_value_leaves_the_policy_to_the_environment(monkeypatch):
    monkeypatch.setenv("RAY_NCCL_GUARD_POLICY", "fallback")
    assert config("--nccl-guard").guard.policy.sources == {"name": "environment"}


def test_a_rule_pack_is_loaded_in_the_driver_and_travels_by_value(pack, monkeypatch):
    for made in (
        lambda: GuardedTorchConfig(rules=[pack]),
        lambda: GuardedTorchConfig(rules=str(pack)),
        lambda: GuardedTorchConfig(rules=load_rules(pack)),
        lambda: (monkeypatch.setenv("RAY_NCCL_GUARD_RULES", str(pack)), GuardedTorchConfig())[1],
    ):
        rules = pickle.loads(pickle.dumps(made())).guard.rules
        assert len(rules) == len(shipped_rules()) + 1 and rules[-1].id == "of-a-vendor"
        assert rules[-1].matches("here are the words of a vendor")


def test_without_a_pack_the_shipped_rules_hold_and_a_wrong_pack_is_refused(pack):
    assert GuardedTorchConfig().guard.rules is None
    with pytest.raises(UsageError, match="is not a directory"):
        GuardedTorchConfig(rules=["/nowhere"])
    (pack / "broken.toml").write_text("role = 'cause'")
    with pytest.raises(UsageError, match=r"broken\.toml is not valid"):
        GuardedTorchConfig(rules=[pack])


def test_deadline_and_collectives_of_the_environment_fill_in_what_the_code_leaves_unsaid(monkeypatch):
    monkeypatch.setenv("RAY_NCCL_GUARD_DEADLINE", "7.5")
    monkeypatch.setenv("RAY_NCCL_GUARD_COLLECTIVES", "pp, all_gather")
    assert GuardedTorchConfig().guard.probe == ProbeSpec(comm_init_s=7.5)
    assert set(GuardedTorchConfig().guard.collectives) == {"send_recv", "broadcast", "all_reduce", "barrier", "all_gather"}
    said = GuardedTorchConfig(probe=ProbeSpec(comm_init_s=3), collectives="ddp").guard
    assert said.probe.comm_init_s == 3 and "send_recv" not in said.collectives
    assert GuardedTorchConfig(probe=None).guard.probe is None
    monkeypatch.setenv("RAY_NCCL_GUARD_DEADLINE", "soon")
    with pytest.raises(ValueError, match="RAY_NCCL_GUARD_DEADLINE is a number"):
        GuardedTorchConfig()
