"""A saved report is the same value again, whatever kind it is, and what is no report is a usage error."""

from __future__ import annotations

import json

import pytest

from ray_nccl_guard import saved
from ray_nccl_guard.cli import main
from ray_nccl_guard.errors import UsageError
from ray_nccl_guard.render import render
from tests.unit.report_cases import CASES, fell_back, refused, settled


def through_json(report):
    return saved.from_json(json.loads(json.dumps(report.to_json())))


@pytest.fixture
def file(tmp_path):
    def write(report) -> str:
        path = tmp_path / "report.json"
        path.write_text(json.dumps(report.to_json()))
        return str(path)

    return write


@pytest.mark.parametrize("name", CASES)
def test_a_report_survives_its_file_and_says_the_same(name):
    report = settled(CASES[name]()).with_changes(path="", notes=("a note of the run",))
    again = through_json(report)
    assert render(again) == render(report)
    assert json.loads(json.dumps(again.to_json())) == json.loads(json.dumps(report.to_json()))


def test_quoted_lines_come_back_with_their_neighbours():
    report = fell_back()
    assert report.context and through_json(report).context == report.context


@pytest.mark.parametrize("name, code", [("passed", 0), ("fell_back", 10), ("cured", 10), ("lost", 10), ("refused", 20)])
def test_the_verb_prints_the_message_and_exits_as_probe_does(file, capsys, name, code):
    report = settled(CASES[name]()).with_changes(path="")
    assert main(["report", file(report)]) == code
    assert capsys.readouterr().out == render(report) + "\n"


def test_the_verb_prints_json_of_the_same_schema(file, capsys):
    report = settled(refused())
    assert main(["report", "--json", file(report)]) == 20
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(report.to_json()))


def test_a_report_of_a_first_version_without_later_keys_is_still_read():
    data = json.loads(json.dumps(fell_back().to_json()))
    for key in ("run_name", "all_reduce_s", "skew", "context", "verdict_attempt", "located", "because"):
        data.pop(key)
    for attempt in data["attempts"]:
        for key in ("all_reduce_s", "network", "located", "group_attempt", "origin"):
            attempt.pop(key)
        for outcome in attempt["outcomes"]:
            for key in ("detail", "error", "signal", "process_state", "proved", "steps"):
                outcome.pop(key)
    assert render(saved.from_json(data)).startswith("warning[illegal_memory_access]: NCCL failed pre-flight on rank 3")


def test_a_report_of_a_later_version_is_read_as_far_as_this_one_knows_it():
    data = {**json.loads(json.dumps(refused().to_json())), "schema_version": 99, "new_key": {"a": 1}}
    assert render(saved.from_json(data)) == render(refused())


@pytest.mark.parametrize(
    "text, says",
    [
        ("{", "not a JSON file"),
        ("[]", "no schema_version"),
        ('{"schema_version": 1}', "not a whole report"),
        ('{"schema_version": 1, "world_size": "x", "verdict": 3}', "not a whole report"),
    ],
)
def test_what_is_no_report_is_a_usage_error(tmp_path, capsys, text, says):
    path = tmp_path / "x.json"
    path.write_text(text)
    assert main(["report", str(path)]) == 2
    assert says in capsys.readouterr().err


def test_a_missing_file_is_a_usage_error(tmp_path):
    with pytest.raises(UsageError, match="No such file"):
        saved.load(str(tmp_path / "none.json"))
