"""Who says what of a policy: argument, file, environment, default; and what a wrong file is told."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from ray_nccl_guard.classes import FailureClass
from ray_nccl_guard.errors import UsageError
from ray_nccl_guard.policy import Action, Policy
from ray_nccl_guard.policy_file import KEYS, POLICY_VARIABLE, carry, read, resolve

UNKNOWN, CRASH = FailureClass.UNKNOWN, FailureClass.PROCESS_CRASHED


@pytest.fixture
def write(tmp_path):
    def write(text, name="policy.toml"):
        path = tmp_path / name
        path.write_text(text)
        return str(path)

    return write


def environment(value):
    return {POLICY_VARIABLE: value}


def test_a_file_can_say_every_key_of_a_policy():
    assert {f.name for f in dataclasses.fields(Policy)} - {"name", "sources", "file"} == set(KEYS) - {"preset"}


@pytest.mark.parametrize(
    "given, environ, name, source",
    [
        (None, {}, "default", None),
        (None, environment("strict"), "strict", "environment"),
        ("fallback", environment("strict"), "fallback", "argument"),
        (Policy.fallback(), environment("strict"), "fallback", "argument"),
        (Policy(), environment("strict"), "default", "argument"),
        ({"preset": "observe"}, environment("strict"), "observe", "argument"),
        ({"budget_s": 60}, environment("strict"), "strict", "environment"),
        ("default", environment("strict"), "default", "argument"),
    ],
)
def test_argument_comes_before_environment_before_default(given, environ, name, source):
    policy = resolve(given, environ)
    assert policy.name == name and policy.sources.get("name") == source
    assert policy == dataclasses.replace(Policy.from_name(name), budget_s=policy.budget_s)


def test_a_file_comes_between_argument_and_environment_key_by_key(write):
    file = write('budget_s = 60\nattempts = 2\n[actions]\nunknown = "refuse"\nprocess_crashed = "refuse"\n')
    policy = resolve({"attempts": 5, "actions": {"unknown": "proceed"}}, environment(file))
    assert (policy.attempts, policy.budget_s) == (5, 60) and policy.gloo is True
    assert policy.action_for(UNKNOWN) is Action.PROCEED and policy.action_for(CRASH) is Action.REFUSE
    shown = policy.to_json()
    assert shown["sources"] == {
        "attempts": "argument", "actions.unknown": "argument", "budget_s": "file", "actions.process_crashed": "file",
    }  # fmt: skip
    assert shown["file"] == file and shown["actions"] == {"unknown": "proceed", "process_crashed": "refuse"}


def test_the_environment_fills_in_only_what_a_file_of_the_code_leaves_unsaid(write):
    policy = resolve(write("budget_s = 60"), environment("strict"))
    assert policy.name == "strict" and policy.gloo is False and policy.budget_s == 60
    assert policy.sources == {"name": "environment", "budget_s": "file"}
    assert resolve(write('preset = "fallback"'), environment("strict")).name == "fallback"


def test_what_a_preset_sets_is_not_undone_by_a_weaker_voice(write):
    assert resolve("strict", environment(write("gloo = true\nbudget_s = 9"))).gloo is False
    assert resolve("strict", environment(write("gloo = true\nbudget_s = 9"))).budget_s == 9
    assert resolve(write('preset = "strict"\ngloo = true'), {}).gloo is True, "the same voice may"


def test_a_policy_object_in_the_code_is_complete_and_shows_what_it_says():
    policy = resolve(Policy.strict(budget_s=60), environment("fallback"))
    assert policy == Policy.strict(budget_s=60) and policy.sources == {"name": "argument", "budget_s": "argument"}


@pytest.mark.parametrize(
    "text, words",
    [
        ("budget = 60", "'budget' is not a key of a policy; did you mean 'budget_s'"),
        ('[actions]\nunknwon = "refuse"', "'unknwon' is not a failure class; did you mean 'unknown'"),
        ('[actions]\nunknown = "refuze"', "'refuze' is not an action; did you mean 'refuse'"),
        ('preset = "strct"', "did you mean 'strict'"),
        ("budget_s = 0", "above 0"),
        ('budget_s = "60"', "budget_s is a number, not '60'"),
        ("attempts = true", "attempts is a whole number, not True"),
        ("gloo = 1", "gloo is true or false, not 1"),
        ("world_warn = 600", "world_warn <= world_ceiling"),
        ('on_guard_error = "panic"', "on_guard_error is one of"),
        ("actions = 3", "actions is a table"),
        ("budget_s 60", "not valid"),
    ],
)
def test_a_wrong_file_is_refused_with_its_path_and_the_nearest_name(write, text, words):
    path = write(text)
    with pytest.raises(UsageError, match=words) as caught:
        resolve(None, environment(path))
    assert path in str(caught.value)


def test_a_file_that_is_not_there_is_an_error_and_not_the_default_policy(tmp_path):
    with pytest.raises(UsageError, match=r"missing\.toml cannot be read: No such file"):
        resolve(None, environment(str(tmp_path / "missing.toml")))
    with pytest.raises(ValueError, match="did you mean 'strict'"):
        resolve(None, environment("stirct"))
    with pytest.raises(ValueError, match="did you mean 'budget_s'"):
        resolve({"budgets": 3}, {})


def test_a_policy_is_handed_on_by_value_with_who_said_what(write, tmp_path):
    file = write('preset = "strict"\nbudget_s = 60\n[actions]\nunknown = "proceed"')
    policy = resolve({"attempts": 7}, environment(file))
    value = carry(policy)
    (tmp_path / "policy.toml").unlink()
    there = resolve(None, environment(value))
    assert there == policy and there.sources == policy.sources and there.file == file
    assert resolve("fallback", environment(value)).name == "fallback", "code there still comes first"
    own = resolve(None, environment(carry(Policy(name="mine", budget_s=5))))
    assert own.budget_s == 5
    with pytest.raises(ValueError, match="is not JSON"):
        resolve(None, environment("{preset"))


def test_reading_keeps_only_what_the_file_says(write):
    assert read(write("budget_s = 60")) == {"budget_s": 60}


def test_the_file_of_the_documentation_is_valid_and_shows_the_default_of_every_key(write):
    text = (Path(__file__).resolve().parents[2] / "docs" / "policy.md").read_text()
    values = read(write(text.split("```toml\n")[1].split("```")[0]))
    assert set(values) == set(KEYS)
    for key in set(KEYS) - {"preset", "actions"}:
        assert values[key] == getattr(Policy(), key), key
