"""`ray-nccl-guard flight`: exit codes, the JSON contract, and text that is safe to show."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from ray_nccl_guard import flight
from ray_nccl_guard.cli import main
from ray_nccl_guard.flight import html, render
from ray_nccl_guard.flight.sheet import About, sheet
from tests.unit.flight_builders import DATA, diagnose, dump, record

SKIPS = str(DATA / "skips")


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ([SKIPS], 10), ([str(DATA / "healthy")], 0), ([__file__], 20), (["/no/such/folder"], 2),
        ([SKIPS, "--world-size", "0"], 2), ([], 2), (["--run", "a", SKIPS], 2), ([SKIPS, "--out", "/tmp"], 2), ([str(DATA / "nccl2_hangs")], 10), ([str(DATA / "skips" / "fr_rank_0")], 10),
    ],
)  # fmt: skip
def test_the_exit_code_tells_the_answer(arguments, code, capsys):
    assert main(["flight", *arguments]) == code


def test_json_is_one_object_with_the_keys_of_the_contract(capsys):
    assert main(["flight", "--json", SKIPS]) == 10
    found = json.loads(capsys.readouterr().out)
    assert {"ranks", "missing_dumps", "groups", "culprit_ranks", "kind", "certainty"} <= found.keys()
    assert (found["ranks"], found["missing_dumps"], found["culprit_ranks"]) == (4, [], [2])
    assert (found["kind"], found["certainty"]) == ("missing_rank", "established")
    rows = {row["rank"]: (row["last_requested"], row["odd"]) for row in found["groups"][0]["ranks"]}
    assert rows == {0: (7, False), 1: (7, False), 2: (6, True), 3: (7, False)}


def test_json_of_unreadable_files_is_an_object_too(capsys):
    assert main(["flight", "--json", __file__]) == 20
    found = json.loads(capsys.readouterr().out)
    assert found["kind"] == "none" and "neither a pickle" in found["skipped"][0]["reason"]


def test_the_table_marks_the_odd_rank_and_no_other(capsys):
    main(["flight", SKIPS])
    out = capsys.readouterr().out
    marked = [line.split()[0] for line in out.splitlines() if line.endswith("<--")]
    assert marked == ["2"]
    assert out.startswith("error[missing_rank]: rank 2 never asked for all_reduce [16] Float")
    assert "/tmp/jobs/train.py" in out and "distributed_c10d" not in out


def test_no_line_is_wider_than_a_hundred_columns(capsys):
    main(["flight", str(DATA / "mesh_skips"), "--all-groups"])
    frames = ("    /", "  the", "  where")
    assert all(len(line) <= 100 for line in capsys.readouterr().out.splitlines() if not line.startswith(frames))


def test_what_a_dump_says_cannot_drive_the_terminal_or_the_page():
    evil = "\x1b[2J<script>\u202e"
    groups = {("0", "default_pg"): (0, 1), ("1", evil): (0, 1)}
    calls = [record(evil, 1, "scheduled", group=("1", evil))]
    verdict = diagnose(dump(calls, groups), dump([], groups))
    for text in (render.text(verdict, all_groups=True), sheet(verdict)):
        assert text.isascii() and "\x1b" not in text
    assert "<script>" not in html.fragment(verdict)


def test_the_sheet_leaves_no_line_blank(capsys):
    main(["flight", "--sheet", str(DATA / "healthy")])
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line.rstrip()) > 18 for line in lines)
    assert {"hypothesis", "cannot say", "missing records", "devices"} <= {line[:18].strip() for line in lines}


def test_the_sheet_of_a_run_says_what_its_dumps_do_not(capsys):
    about = About(
        identifiers=("run exp7, worker group 1",), versions=("torch 2.15.0 (ranks 0-3)",),
        devices=tuple(f"rank {rank}: NVIDIA H100 GPU-{rank}" for rank in range(4)), earlier=("rank 2 raised ValueError: bad",),
    )  # fmt: skip
    text = sheet(flight.diagnose(flight.load([SKIPS])), about)
    assert all(len(line.rstrip()) > 18 for line in text.splitlines())
    for words in ("run exp7", "torch 2.15.0", "rank 3: NVIDIA H100 GPU-3", "rank 2 raised ValueError"):
        assert words in text
    assert "not recorded in Flight Recorder dumps" not in text
    for places in ("ranks 0-1, 3: completion not recorded, requested 7", "rank 2: completion not recorded, requested 6"):
        assert f"group 0 (default_pg), {places}" in text


def test_the_html_fragment_marks_the_odd_rank():
    page = html.fragment(flight.diagnose(flight.load([SKIPS])))
    assert '<tr class="odd"><td>2</td>' in page and page.count('class="odd"') == 1


def test_a_thousand_ranks_take_a_few_lines():
    same = [record("all_reduce", 1, "scheduled")]
    groups = {("0", "default_pg"): range(1000)}
    verdict = diagnose(*(dump([] if rank == 777 else same, groups) for rank in range(1000)))
    assert verdict.culprit_ranks == (777,)
    assert len(render.text(verdict).splitlines()) < 40


def test_neither_torch_nor_ray_is_imported():
    code = (
        "import sys; from ray_nccl_guard.cli import main; main(['flight', sys.argv[1], '--json']);"
        "print([name for name in ('torch', 'ray', 'numpy', 'rich', 'pickle') if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code, SKIPS], capture_output=True, text=True, timeout=60, env=os.environ)
    assert done.stderr.strip() == "[]"
