"""`run` and `--nccl-guard`: what reaches the job, and that a script ends as it would without us."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ray_nccl_guard.arguments import add_argument
from ray_nccl_guard.cli.after_import import after_import
from ray_nccl_guard.cli.run import CALLBACK, CALLBACKS_VARIABLE, JOB_VARIABLE, prepare
from ray_nccl_guard.errors import UsageError
from ray_nccl_guard.policy_file import POLICY_VARIABLE, resolve

ROOT = Path(__file__).resolve().parents[2]


def prepared(environ=None, **flags):
    environ = dict(environ or {})
    prepare(environ, **{"policy": None, "deadline": None, "collectives": None, **flags})
    return environ, json.loads(environ[JOB_VARIABLE])["runtime_env"]["env_vars"]


def test_flags_reach_the_driver_and_the_job_by_value(tmp_path):
    file = tmp_path / "policy.toml"
    file.write_text("budget_s = 50")
    environ, of_job = prepared(policy=str(file), deadline="9", collectives="ddp, fsdp")
    file.unlink()
    for variables in (environ, of_job):
        assert resolve(None, variables).budget_s == 50 and resolve(None, variables).sources == {"budget_s": "file"}
        assert variables["RAY_NCCL_GUARD_DEADLINE"] == "9" and variables["RAY_NCCL_GUARD_COLLECTIVES"] == "ddp, fsdp"
        assert variables[CALLBACKS_VARIABLE] == CALLBACK


def test_where_nobody_says_anything_no_policy_is_made_up():
    environ, of_job = prepared()
    assert POLICY_VARIABLE not in environ and set(of_job) == {CALLBACKS_VARIABLE}


def test_callbacks_of_others_are_appended_to_and_the_jobs_own_environment_is_kept():
    environ, of_job = prepared({CALLBACKS_VARIABLE: "team.Watch"})
    assert environ[CALLBACKS_VARIABLE] == of_job[CALLBACKS_VARIABLE] == f"team.Watch,{CALLBACK}"
    assert prepared(environ)[0][CALLBACKS_VARIABLE] == f"team.Watch,{CALLBACK}", "twice is once"
    submitted = {
        "runtime_env": {"working_dir": "gcs://x.zip", "env_vars": {"A": "1", CALLBACKS_VARIABLE: "team.Other"}},
        "metadata": {"m": "1"},
    }
    environ, of_job = prepared({JOB_VARIABLE: json.dumps(submitted)})
    job = json.loads(environ[JOB_VARIABLE])
    assert job["runtime_env"]["working_dir"] == "gcs://x.zip" and job["metadata"] == {"m": "1"} and of_job["A"] == "1"
    assert of_job[CALLBACKS_VARIABLE] == f"team.Other,{CALLBACK}"


def test_what_belongs_to_a_node_is_not_sent_to_the_job():
    _, of_job = prepared({"RAY_NCCL_GUARD_COMPAT_RECORD": "/guard/compat.json", "RAY_NCCL_GUARD": "observe"})
    assert of_job["RAY_NCCL_GUARD"] == "observe" and "RAY_NCCL_GUARD_COMPAT_RECORD" not in of_job


def test_a_job_description_that_is_not_understood_is_left_alone(capsys):
    environ = {JOB_VARIABLE: "not json"}
    prepare(environ, policy=None, deadline=None, collectives=None)
    assert environ[JOB_VARIABLE] == "not json" and "left alone" in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags, words",
    [
        ({"policy": "stict"}, "did you mean 'strict'"),
        ({"policy": "missing.toml"}, "cannot be read"),
        ({"deadline": "soon"}, "soon"),
        ({"deadline": "0"}, "above 0"),
        ({"collectives": "dpp"}, "dpp"),
    ],
)
def test_a_wrong_flag_is_a_usage_error_before_anything_runs(flags, words):
    with pytest.raises(UsageError, match=words):
        prepared(**flags)


def run(*arguments, cwd, **variables):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    return subprocess.run(
        [sys.executable, "-m", "ray_nccl_guard", "run", *arguments],
        capture_output=True, text=True, timeout=60, check=False, cwd=cwd, env=environment,
    )  # fmt: skip


SCRIPT = """
import sys, beside
print([sys.argv, __name__, __file__, sys.path[0], beside.here, 'ray' in sys.modules, 'torch' in sys.modules])
if 'exit' in sys.argv: sys.exit(7)
if 'die' in sys.argv: raise KeyError('of the script')
"""


@pytest.fixture
def script(tmp_path):
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "train.py").write_text(SCRIPT)
    (tmp_path / "jobs" / "beside.py").write_text("here = True")
    return tmp_path


def test_a_script_sees_what_it_would_see_under_python_and_no_import_is_made_for_it(script):
    done = run("--policy", "strict", "jobs/train.py", "--policy", "mine", "-x", cwd=script)
    assert done.returncode == 0, done.stderr
    folder = str((script / "jobs").resolve())
    assert eval(done.stdout) == [
        ["jobs/train.py", "--policy", "mine", "-x"],
        "__main__",
        "jobs/train.py",
        folder,
        True,
        False,
        False,
    ]
    module = run("-m", "train", "a", cwd=script / "jobs")
    assert module.returncode == 0 and "'a'" in module.stdout, module.stderr


def test_its_exit_code_and_its_traceback_are_its_own(script):
    assert run("jobs/train.py", "exit", cwd=script).returncode == 7
    died = run("jobs/train.py", "die", cwd=script)
    assert died.returncode == 1 and "KeyError: 'of the script'" in died.stderr
    assert "ray_nccl_guard" not in died.stderr, "the traceback begins in the script"


def test_wrong_usage_exits_2(script):
    assert run("--policy", "stict", "jobs/train.py", cwd=script).returncode == 2
    assert run("nothing.py", cwd=script).returncode == 2


def test_after_import_calls_once_the_module_is_there_and_leaves_no_trace(tmp_path, monkeypatch, capsys):
    (tmp_path / "nccl_guard_listened.py").write_text("value = 5")
    monkeypatch.syspath_prepend(str(tmp_path))
    finders, seen = list(sys.meta_path), []
    after_import("nccl_guard_listened", lambda: seen.append(sys.modules["nccl_guard_listened"].value))
    assert seen == []
    import nccl_guard_listened

    assert seen == [5] and sys.meta_path == finders
    assert (
        type(nccl_guard_listened.__loader__).__name__
        == "SourceFileLoader"
        == type(nccl_guard_listened.__spec__.loader).__name__
    )
    after_import("nccl_guard_listened", lambda: 1 / 0)
    assert "NOT guarded" in capsys.readouterr().err, "an error of the call is said and not raised"
    del sys.modules["nccl_guard_listened"]


def test_the_flag_takes_a_policy_only_with_an_equals_sign_and_refuses_a_wrong_one(capsys):
    parser = argparse.ArgumentParser()
    add_argument(parser)
    assert [parser.parse_args(line).nccl_guard for line in ([], ["--nccl-guard"], ["--nccl-guard=strict"])] == [
        "off",
        "",
        "strict",
    ]
    with pytest.raises(SystemExit):
        parser.parse_args(["--nccl-guard=stict"])
    assert "did you mean 'strict'" in capsys.readouterr().err
