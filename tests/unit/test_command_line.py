"""The command line as a stranger meets it: every verb explains itself, and a slip is answered with what was meant."""

from __future__ import annotations

import pytest

from ray_nccl_guard.cli import VERBS, main


def call(capsys, *arguments) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    out, err = capsys.readouterr()
    return int(ended.value.code), out, err


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_says_its_exit_codes(verb, capsys):
    code, out, _ = call(capsys, verb, "--help")
    assert code == 0 and "exit codes: " in out and "wrong usage" in out.replace("a wrong flag", "wrong usage")


def test_a_verb_that_does_not_exist_is_answered_with_the_nearest(capsys):
    code, _, err = call(capsys, "clasify", "x.log")
    assert code == 2 and "there is no verb 'clasify', did you mean 'classify'?" in err


@pytest.mark.parametrize("verb", VERBS)
def test_a_flag_that_does_not_exist_shows_the_usage_of_its_verb(verb, capsys):
    required = {"classify": ["x.log"], "drill": ["--fault", "init:hang"], "report": ["report.json"], "run": ["train.py"]}
    arguments = required.get(verb, [])
    code, _, err = call(capsys, verb, "--no-such-flag", *arguments)
    assert code == 2 and f"usage: ray-nccl-guard {verb}" in err and "--no-such-flag" in err


def test_without_a_verb_the_verbs_are_shown_and_where_to_begin(capsys):
    code, out, _ = call(capsys, "--help")
    assert code == 0 and all(f"\n    {verb} " in out for verb in VERBS) and "where to begin" in out
