"""The page: one file that needs nothing else, shows every rank, and lets nothing that ranks printed become markup."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

pytest.importorskip("jinja2", reason="jinja2 is not installed")

from ray_nccl_guard import flight, html, saved
from ray_nccl_guard.cli import main
from tests.unit.report_cases import CASES, fell_back, refused, settled

ROOT = Path(__file__).resolve().parents[2]
DUMPS = Path(__file__).parent / "data" / "flight" / "skips"
VOID = {"meta", "br", "hr", "img", "input", "link"}


class Tags(HTMLParser):
    """The tags of a page; complains about what is not closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.names: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        assert not self.open, f"not closed: {self.open}"

    def handle_starttag(self, tag, attrs):
        self.names.append(tag)
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag, f"</{tag}> closes something else"


@pytest.mark.parametrize("name", CASES)
def test_a_page_is_well_formed_and_fetches_nothing(name):
    text = html.page(settled(CASES[name]()))
    names = Tags(text).names
    assert not {"script", "link", "img", "iframe", "object"} & set(names)
    assert not re.search(r"(https?:|//)[a-z]|@import|url\(", text), "something would be fetched"


def test_the_sentence_comes_first_and_every_rank_has_a_cell_in_every_stage():
    text = html.page(CASES["fell_back_64"]())
    assert "NCCL failed pre-flight on rank 21" in text and text.index("<h1>") < text.index("What was decided")
    failed, passed = text.split("<details", 1)
    assert len(re.findall(r'<b class="c-\w+" title="rank \d+, ', failed)) == 64 * 5, "five stages were reached"
    assert len(re.findall(r'<b class="c-ok" title="rank \d+, ', passed)) == 64 * 6
    assert failed.count('<b class="c-died"') == 1 and 'class="r culprit">21<' in failed


def test_what_ranks_printed_never_becomes_markup():
    evil = '<script>alert("x")</script>'
    data = json.loads(json.dumps(fell_back().to_json()).replace("an illegal memory access", f"x {evil}".replace('"', '\\"')))
    data["ranks"][0]["host"] = data["ranks"][1]["torch_version"] = data["because"] = data["run_name"] = evil
    data["attempts"][0]["outcomes"][3]["detail"] = evil
    data["notes"].append(evil)
    text = html.page(saved.from_json(data))
    assert "<script" not in text and "&lt;script&gt;" in text
    Tags(text)


def test_the_matrix_of_hosts_and_the_meaning_of_its_words_are_there():
    text = html.page(refused())
    assert "Network: who reached whom" in text and text.count(">SYN<") == 4 + 1
    assert "no answer to a connection" in text and "16 bytes pass" not in text, "only what is in it is explained"


def test_a_verdict_over_dumps_is_a_part_of_the_page():
    verdict = flight.diagnose(flight.load([str(DUMPS)]))
    text = html.page(fell_back().with_changes(flight=verdict.to_json() | {"sheet": "run       exp7 <script>"}))
    assert "Flight Recorder: missing_rank" in text and '<tr class="odd"><td>2</td>' in text
    assert "Record sheet" in text and "<script>" not in text
    Tags(text)


def test_a_run_that_ended_badly_says_so_first_and_shows_where_each_rank_stood(tmp_path, capsys):
    verdict = flight.diagnose(flight.load([str(DUMPS)]))
    ends = [{"rank": r, "how": "stuck", "what": "all_reduce", "place": "train.py:12", "own": False} for r in (0, 2, 3)]
    ends.append({"rank": 1, "how": "gone", "what": "<exit>", "place": "", "own": True})
    found = verdict.to_json() | {"ranks_ended": ends, "folder": "/runs/exp7/nccl_guard/flight/1"}
    report = CASES["passed"]().with_changes(flight=found)
    text = html.page(report)
    Tags(text)
    assert text.index("training ended badly") < text.index("at its start: ok: nccl passed pre-flight")
    assert '<header class="error">' in text and "<td>0, 2-3</td>" in text and "&lt;exit&gt;" in text
    file = tmp_path / "report.json"
    file.write_text(json.dumps(report.to_json()))
    assert main(["report", str(file), "--html", str(tmp_path / "again.html")]) == 0
    assert (tmp_path / "again.html").read_text() == text, "the saved report gives the same page"
    assert verdict.summary in capsys.readouterr().out


def test_a_page_of_4096_ranks_stays_usable():
    from tests.unit.report_cases import fell_back as big

    text = html.page(big(4096, culprit=77))
    assert len(text) < 8 << 20 and "and 0 more" not in text


def test_the_verb_writes_the_page(tmp_path, capsys):
    file, page = tmp_path / "report.json", tmp_path / "page.html"
    file.write_text(json.dumps(fell_back().to_json()))
    assert main(["report", str(file), "--html", str(page)]) == 10
    assert page.read_text() == html.page(saved.load(str(file)))
    assert main(["report", str(file), "--html", str(tmp_path / "no" / "such" / "folder.html")]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_without_jinja2_the_verb_says_what_to_install(tmp_path):
    file = tmp_path / "report.json"
    file.write_text(json.dumps(fell_back().to_json()))
    program = "import sys; sys.modules['jinja2'] = None; from ray_nccl_guard.cli import main; sys.exit(main(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", program, "report", str(file), "--html", str(tmp_path / "page.html")],
        capture_output=True, text=True, timeout=60, cwd=ROOT, check=False,
    )  # fmt: skip
    assert done.returncode == 2 and "pip install 'ray-nccl-guard[html]'" in done.stderr
