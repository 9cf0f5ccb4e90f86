"""What GuardedTorchConfig accepts, records and refuses; and the guard's own exceptions across pickling."""

from __future__ import annotations

import pickle

import pytest

pytest.importorskip("ray", reason="ray is not installed")
from ray.train.torch import TorchConfig

from ray_nccl_guard import GuardedTorchConfig, NcclInitRefused, Policy, ProbeSpec
from ray_nccl_guard.ray_train.errors import GuardRestart
from ray_nccl_guard.ray_train.resolve import policy_from
from ray_nccl_guard.ray_train.settings import Mode, mode_from, stricter


def test_every_argument_of_torch_config_keeps_its_meaning():
    config = GuardedTorchConfig("gloo", "tcp", 60)
    assert isinstance(config, TorchConfig)
    assert (config.backend, config.init_method, config.timeout_s) == ("gloo", "tcp", 60)
    assert GuardedTorchConfig().timeout_s == TorchConfig().timeout_s


def test_what_the_user_asked_for_survives_rays_overwriting():
    config = GuardedTorchConfig()
    config.backend = "nccl"  # as TorchTrainer does in place
    assert config.guard.asked_backend is None
    assert GuardedTorchConfig(backend="nccl").guard.asked_backend == "nccl"


@pytest.mark.parametrize(
    "options, words",
    [
        ({"policy": "stict"}, "did you mean 'strict'"),
        ({"policy": 3}, "policy is a Policy"),
        ({"probe": 5}, "probe is a ProbeSpec"),
        ({"eager_init": "yes"}, "eager_init is True or False"),
        ({"collectives": ["all_redcue"]}, "all_redcue"),
    ],
)
def test_a_wrong_argument_is_refused_at_construction(options, words):
    with pytest.raises(ValueError, match=words):
        GuardedTorchConfig(**options)


def test_the_environment_is_read_in_the_driver_and_carried(monkeypatch):
    monkeypatch.setenv("RAY_NCCL_GUARD", "observe")
    monkeypatch.setenv("RAY_NCCL_GUARD_POLICY", "fallback")
    settings = pickle.loads(pickle.dumps(GuardedTorchConfig(probe=ProbeSpec(store_s=3)))).guard
    assert settings.mode is Mode.OBSERVE and settings.policy.name == "fallback" and settings.probe.store_s == 3
    assert GuardedTorchConfig(policy=Policy.strict()).guard.policy.name == "strict", (
        "the argument comes before the environment"
    )
    monkeypatch.setenv("RAY_NCCL_GUARD", "of")
    with pytest.raises(ValueError, match="RAY_NCCL_GUARD is one of"):
        GuardedTorchConfig()


def test_off_in_either_place_wins():
    assert mode_from({}) is Mode.ON and mode_from({"RAY_NCCL_GUARD": "0"}) is Mode.OFF
    assert stricter(Mode.ON, Mode.OFF) is stricter(Mode.OFF, Mode.OBSERVE) is Mode.OFF
    assert stricter(Mode.ON, Mode.OBSERVE) is Mode.OBSERVE


def test_a_policy_by_name_or_by_value():
    assert policy_from(None, {}).name == "default" and policy_from("fallback", {}).whatever_class


def test_the_settings_are_exported_as_plain_values():
    exported = GuardedTorchConfig(policy="strict").to_dict()
    assert exported["nccl_guard_policy"] == "strict"
    assert all(isinstance(value, str | int | bool | None.__class__) for value in exported.values())


@pytest.mark.parametrize("kind", [NcclInitRefused, GuardRestart])
def test_own_exceptions_survive_pickling_with_their_attributes(kind):
    error = kind("one sentence", {"action": "refuse", "attempts": [1]}, help=("do this",))
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind and str(again) == "one sentence"
    assert again.report == error.report and again.help == ("do this",)
