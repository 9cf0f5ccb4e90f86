"""The message, as a person reads it. `UPDATE=1 python -m pytest tests/unit/test_render.py` writes the golden texts anew."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ray_nccl_guard.headline import headline, short
from ray_nccl_guard.policy import Action
from ray_nccl_guard.render import render
from ray_nccl_guard.rung import Decision
from tests.unit.report_cases import CASES, cured, fell_back, settled

GOLDEN = Path(__file__).parent / "golden"


@pytest.mark.parametrize("name", CASES)
def test_the_message_is_the_golden_one(name):
    text = render(settled(CASES[name]())) + "\n"
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("UPDATE") == "1":
        path.write_text(text)
    assert text == path.read_text(), f"if the change is meant: UPDATE=1 python -m pytest {Path(__file__).name}"


@pytest.mark.parametrize("name", CASES)
def test_the_message_is_ascii_and_fits_100_columns_apart_from_the_sentence_and_commands(name):
    text = render(settled(CASES[name]()))
    assert text.isascii()
    long = [line for line in text.splitlines()[1:] if len(line) > 100 and not line.startswith(("help:", "report:", "note:"))]
    assert not long or name == "guard_error", long


def test_the_first_line_ends_in_the_consequence_and_help_comes_last():
    text = render(settled(fell_back())).splitlines()
    assert text[0].startswith("warning[illegal_memory_access]: NCCL failed pre-flight on rank 3")
    assert text[0].endswith("training will use gloo")
    first_help = next(i for i, line in enumerate(text) if line.startswith("help:"))
    assert all(line.startswith(("help:", "report:", "more:")) for line in text[first_help:])


def test_a_refusal_is_an_error_and_says_because_and_where_the_report_lies():
    refused = settled(fell_back()).with_changes(decision=Decision(action=Action.REFUSE, backend=None, because="of a policy"))
    assert headline(refused).startswith("error[") and headline(refused).endswith("training refused")
    assert short(refused).splitlines()[1:] == ["because of a policy", "report: /runs/exp7/nccl_guard/report.json"]


def test_the_price_is_in_the_message_with_what_was_measured_and_no_ratio_without_two_measurements():
    text = " ".join(render(fell_back()).split())
    assert "all_reduce of 25 MiB takes 41.2 ms on gloo; nccl never finished one" in text
    assert "With 100 million float32 parameters about 629 ms a step" in text
    assert "NCCL_P2P_DISABLE=1" in render(cured()).splitlines()[0]
