"""The benchmarks' harness: alternation, spread, no ratio out of noise, and a head that says where a figure comes from."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import harness

ROOT = Path(__file__).resolve().parents[2]


def test_cases_are_run_in_turn_and_warm_up_rounds_do_not_count():
    order: list[str] = []

    def case(name: str):
        def run() -> float:
            order.append(name)
            return float(len(order))

        return run

    taken = harness.alternate({"a": case("a"), "b": case("b")}, rounds=2, warm_up=1)
    assert order == ["a", "b"] * 3
    assert taken == {"a": [3.0, 5.0], "b": [4.0, 6.0]}


def test_a_single_outlier_moves_neither_the_median_nor_the_spread_far():
    calm = harness.summary([1.0, 1.1, 0.9, 1.0, 1.05, 0.95, 1.0])
    hit = harness.summary([1.0, 1.1, 0.9, 1.0, 1.05, 0.95, 50.0])
    assert calm["median"] == 1.0 and calm["n"] == 7 and hit["median"] == pytest.approx(1.0, abs=0.05)
    assert hit["spread"] < 0.3
    assert harness.summary([3.0]) == {"median": 3.0, "spread": 0.0, "n": 1}


def test_a_ratio_is_refused_where_the_spread_is_larger_than_the_difference():
    assert harness.ratio([4.0, 4.1, 3.9], [2.0, 2.1, 1.9]) == pytest.approx(2.0)
    assert harness.ratio([2.0, 3.0, 1.0, 2.1], [2.0, 2.1, 1.9, 2.0]) is None
    assert harness.ratio([2.0, 2.4, 1.6, 2.2], [2.0, 2.1, 1.9, 2.0]) is None, "spread 0.35, difference 0.1"
    assert harness.ratio([1.0, 1.0], [1.0, 1.0]) is None
    assert harness.ratio([4.0], [2.0]) is None, "one value each has no spread to tell"
    assert harness.times(None) == "not told from the noise" and harness.times(2.0) == "2 x"


def test_the_head_says_where_when_and_with_what():
    top = harness.head("what is measured")
    assert top["what"] == "what is measured" and top["command"].startswith("python ")
    assert "cores" in top["machine"] and top["versions"]["python"] and top["load"] >= 0


def test_the_command_is_told_without_where_its_result_goes(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["x.py", "--json", "--rounds", "3", "--out", "a.md", "--plot", "a.png", "timing"])
    assert harness.head("x")["command"] == "python x.py --rounds 3 timing"


def test_markdown_has_the_union_of_all_rows_columns_and_a_dash_for_what_is_not_known():
    top = {**harness.head("x"), "command": "python benchmarks/x.py"}
    text = harness.markdown(top, [{"case": "a", "median": 0.12345}, {"case": "b", "times": None}], ["a note"])
    assert "| case | median | times |" in text and "| a | 0.123 | - |" in text and "| b | - | - |" in text
    assert text.endswith("a note\n") and "    python benchmarks/x.py" in text


def test_rows_of_several_tables_are_shown_apart_and_what_was_found_comes_first():
    top = {**harness.head("x"), "command": "python benchmarks/x.py"}
    rows = [
        {"table": "first", "case": "a", "s": 1.0},
        {"table": "second", "size": 4, "mb": 2.0},
        {"table": "first", "case": "b"},
    ]
    text = harness.markdown(top, rows, found=["it is so"])
    assert "## first\n\n| case | s |\n| --- | --- |\n| a | 1 |\n| b | - |\n\n## second\n\n| size | mb |" in text
    assert text.index("- it is so") < text.index("## first")


def test_a_measured_process_is_not_charged_with_its_parents_memory():
    held = bytearray(b"x") * (200 << 20)
    used = harness.measured("import sys; print('said', sys.argv[1:]); sys.exit(3)", "a", "b")
    assert used.output.strip() == "said ['a', 'b']" and used.code == 3
    assert 4 < used.peak_mib < 100 and 0 < used.cpu_s < 5, len(held)


def test_a_measured_process_ends_at_its_deadline():
    used = harness.measured("import time; time.sleep(60)", deadline_s=0.5)
    assert used.code is None and used.wall_s < 30


def test_show_prints_json_and_writes_markdown(tmp_path, capsys):
    args = harness.arguments("a benchmark").parse_args(["--json", "--out", str(tmp_path / "x.md")])
    harness.show(args, harness.head("x"), [{"case": "a", "median": 1.0, "spread": 0.1}])
    assert json.loads(capsys.readouterr().out)["rows"] == [{"case": "a", "median": 1.0, "spread": 0.1}]
    assert (tmp_path / "x.md").read_text().startswith("# x\n")


def test_a_plot_is_drawn_where_matplotlib_is_and_noted_where_it_is_not(tmp_path):
    program = (
        "import sys\n{}\nfrom benchmarks import bars, harness\nfrom pathlib import Path\n"
        "bars.draw(Path(sys.argv[1]), harness.head('x'), [{{'case': 'a', 'median': 1.0}}, {{'table': 'b', 'n': 1, 'median': 2}}])"
    )
    without = subprocess.run(
        [sys.executable, "-c", program.format("sys.modules['matplotlib'] = None"), str(tmp_path / "a.png")],
        capture_output=True, text=True, timeout=60, cwd=ROOT, check=True,
    )  # fmt: skip
    assert "matplotlib is not installed" in without.stderr and not (tmp_path / "a.png").exists()
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    subprocess.run([sys.executable, "-c", program.format(""), str(tmp_path / "b.png")], timeout=120, cwd=ROOT, check=True)
    assert (tmp_path / "b.png").stat().st_size > 1000


def test_every_benchmark_takes_the_same_arguments():
    parser = harness.arguments("x")
    assert isinstance(parser, argparse.ArgumentParser)
    assert {"json", "out", "plot"} <= set(vars(parser.parse_args([])))
