"""`make bench`: every benchmark is in it and speaks through the harness; a failed one costs its time limit and no result."""

from __future__ import annotations

import importlib.util
import json
import time
from pathlib import Path

import pytest

from benchmarks import all as runner

FOLDER = runner.HERE
SCRIPTS = sorted(path for path in FOLDER.glob("*.py") if 'if __name__ == "__main__"' in path.read_text())


@pytest.mark.parametrize("script", [path for path in SCRIPTS if path.name != "all.py"], ids=lambda path: path.stem)
def test_every_benchmark_is_run_and_speaks_through_the_harness(script):
    assert script.name in {one.command.split()[0] for one in runner.BENCHMARKS}
    text = script.read_text()
    assert "harness.arguments(" in text and "harness.show(" in text


def test_the_readmes_table_is_that_of_the_kept_results():
    assert runner.table() in runner.README.read_text(), "python benchmarks/all.py --table"


def script(folder: Path, text: str, limit_s: float = 60.0) -> runner.Benchmark:
    path = folder / "one.py"
    path.write_text(text)
    return runner.Benchmark("one", "a question", str(path), limit_s)


def kept(folder: Path) -> dict[str, str]:
    return {path.name.replace(path.stem, "one"): path.read_text() for path in folder.glob("one_*cores_*")}


def test_a_result_is_kept_as_table_numbers_and_drawing(tmp_path):
    program = (
        "import sys; from pathlib import Path; words = sys.argv\n"
        "Path(words[words.index('--out') + 1]).write_text('# one')\n"
        "Path(words[words.index('--plot') + 1]).write_text('drawn')\n"
        'print(\'{"found": ["it is so"]}\')\n'
    )
    assert runner.run(script(tmp_path, program), tmp_path)
    found = kept(tmp_path)
    assert (
        found["one.md"] == "# one" and found["one.png"] == "drawn" and json.loads(found["one.json"])["found"] == ["it is so"]
    )


@pytest.mark.parametrize("program", ["raise SystemExit(3)", "print('no JSON')"])
def test_a_benchmark_that_fails_leaves_the_older_result(tmp_path, program, capsys):
    assert not runner.run(script(tmp_path, program), tmp_path)
    assert kept(tmp_path) == {} and "FAILED" in capsys.readouterr().out


def test_a_benchmark_that_does_not_end_is_ended_with_its_children(tmp_path):
    program = (
        "import subprocess, time\n"
        "child = subprocess.Popen(['sleep', '60'])\n"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid))\n"
        "time.sleep(60)\n"
    )
    # Long enough for an interpreter to start on a busy machine.
    assert not runner.run(script(tmp_path, program, limit_s=6.0), tmp_path)
    stat, end_s = Path("/proc", (tmp_path / "pid").read_text(), "stat"), time.monotonic() + 10
    while stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < end_s, "its child lives on"
        time.sleep(0.05)


def test_each_kind_of_fault_is_played_for_its_time_to_the_verdict():
    if importlib.util.find_spec("torch") is None:
        pytest.skip("the double's matrix asks which torch is installed, and none is")
    from benchmarks import time_to_verdict, without_guard
    from tests.fakegpu.matrix import CASES

    quick = {case.name for case in time_to_verdict.representatives(quick=True)}
    whole = {case.name for case in time_to_verdict.representatives(quick=False)}
    assert quick <= whole and {"hang", "segv", "kill", "wrong"} <= {
        c.fault.partition(":")[2].partition("@")[0] for c in CASES if c.name in quick
    }
    assert {case.failure for case in CASES if case.name in whole} == {case.failure for case in CASES}
    hang = {case.name for case in CASES if ":hang" in case.fault and case.policy == "default"}
    assert {case.name for case in CASES if time_to_verdict.waits(case)} >= hang and not time_to_verdict.waits(CASES[0])
    assert set(without_guard.PLAIN) <= {case.name for case in CASES}
