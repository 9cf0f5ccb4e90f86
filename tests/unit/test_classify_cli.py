"""The verbs classify, explain and rules as a user calls them."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest

from ray_nccl_guard.classes import FailureClass
from ray_nccl_guard.cli import main
from ray_nccl_guard.cli.explain import markdown
from ray_nccl_guard.rulebook import shipped_rules

OOM = "[rank3]: include/alloc.h:178 NCCL WARN Cuda failure 'out of memory'\n"
CONTRACT = {"failure", "certainty", "candidates", "culprit_ranks", "scope", "gloo_can_help", "evidence", "next"}
REPOSITORY = Path(__file__).parents[2]
RULE = """failure = "port_in_use"
role = "cause"
summary = "our launcher found its port taken"
patterns = ["FabricLauncher: port \\\\d+ is busy"]
near_misses = ["FabricLauncher: port 1 is free"]
"""


def call(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(list(words))
    out, err = capsys.readouterr()
    return code, out, err


def test_a_named_failure_exits_0_and_prints_one_object(tmp_path: Path, capsys):
    path = tmp_path / "a.log"
    path.write_text(OOM)
    code, out, _ = call(capsys, "classify", str(path), "--json")
    told = json.loads(out)
    assert code == 0
    assert set(told) >= CONTRACT
    assert (told["failure"], told["culprit_ranks"], told["scope"]) == ("gpu_out_of_memory", [3], "gpu")
    assert set(told["evidence"][0]) >= {"rank", "line", "text", "role"}


def test_the_text_says_what_where_how_sure_and_what_next(tmp_path: Path, capsys):
    path = tmp_path / "a.log"
    path.write_text(OOM + "[rank0]: misc/socket.cc:49 NCCL WARN socketProgress: Connection closed by remote peer h<5>\n")
    code, out, _ = call(capsys, "classify", str(path))
    assert code == 0
    first, *rest = out.splitlines()
    assert first == "gpu_out_of_memory: NCCL could not get device memory"
    text = " ".join(" ".join(rest).split())  # a long path is wrapped
    for part in ("look at rank 3", "evidence", "a.log:1 (rank 3)", "echoes", "certainty established", "help: try next"):
        assert part in text
    assert out.isascii()


def test_a_log_without_a_name_exits_1(tmp_path: Path, capsys):
    path = tmp_path / "a.log"
    path.write_text("epoch 3 done\n")
    code, out, _ = call(capsys, "classify", str(path), "--json")
    assert (code, json.loads(out)["failure"]) == (1, "unknown")


def test_standard_input_is_read(monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(OOM.encode())))
    code, out, _ = call(capsys, "classify", "-", "--json")
    assert (code, json.loads(out)["evidence"][0]["source"]) == (0, "stdin")


def test_a_missing_file_exits_2_without_a_traceback(capsys, tmp_path: Path):
    code, out, err = call(capsys, "classify", str(tmp_path / "no.log"))
    assert (code, out) == (2, "")
    assert "cannot be read" in err
    assert "Traceback" not in err


def test_a_rule_pack_of_ones_own_is_used_and_checked(tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch):
    pack, log = tmp_path / "pack", tmp_path / "a.log"
    pack.mkdir()
    (pack / "fabric-port.toml").write_text(RULE)
    log.write_text("FabricLauncher: port 77 is busy\n")
    assert call(capsys, "classify", str(log))[0] == 1
    assert call(capsys, "classify", str(log), "--rules", str(pack))[0] == 0
    monkeypatch.setenv("RAY_NCCL_GUARD_RULES", str(pack))
    assert call(capsys, "classify", str(log))[0] == 0
    monkeypatch.delenv("RAY_NCCL_GUARD_RULES")

    code, out, _ = call(capsys, "rules", "--check", str(pack))
    assert code == 1
    assert "fabric-port: has no log" in out
    (pack / "fabric-port.log").write_text("# our launcher 1.0\nFabricLauncher: port 77 is busy\n")
    assert call(capsys, "rules", "--check", str(pack))[0] == 0
    (pack / "fabric-port.toml").write_text(RULE.replace("port 1 is free", "port 1 is busy"))
    code, out, _ = call(capsys, "rules", "--check", str(pack), "--json")
    assert code == 1
    assert "near miss" in json.loads(out)["faults"][0]["fault"]


def test_a_folder_without_rules_is_no_pack_that_passes(tmp_path: Path, capsys):
    code, _, err = call(capsys, "rules", "--check", str(tmp_path))
    assert code == 2 and "There is no rule in" in err


def test_a_broken_pack_exits_2(tmp_path: Path, capsys):
    (tmp_path / "bad.toml").write_text("not toml")
    code, _, err = call(capsys, "rules", "--check", str(tmp_path))
    assert code == 2
    assert "bad.toml" in err


@pytest.mark.parametrize("name", [failure.value for failure in FailureClass] + [rule.id for rule in shipped_rules()])
def test_every_class_and_rule_can_be_looked_up(name: str, capsys):
    code, out, _ = call(capsys, "explain", name)
    assert code == 0
    assert out.startswith(f"{name}: ")
    code, out, _ = call(capsys, "explain", name, "--json")
    assert name in json.loads(out).values()


@pytest.mark.parametrize("failure", [failure for failure in FailureClass if failure is not FailureClass.OK])
def test_a_class_is_explained_with_the_command_that_decides_and_what_the_guard_does(failure: FailureClass, capsys):
    _, out, _ = call(capsys, "explain", failure.value)
    for part in ("scope", "gloo helps", "remedy", "to be sure", "the guard"):
        assert f"\n  {part}" in out


def test_a_misspelt_name_exits_2_and_offers_the_nearest(capsys):
    code, _, err = call(capsys, "explain", "shm_to_small")
    assert code == 2
    assert "shm_too_small" in err


def test_rules_lists_every_rule(capsys):
    code, out, _ = call(capsys, "rules")
    assert code == 0
    assert len(out.splitlines()) == len(shipped_rules())


def test_the_docs_page_is_what_the_rules_say():
    page = REPOSITORY / "docs" / "classes.md"
    now = "\n".join(markdown(shipped_rules())) + "\n"
    assert page.read_text(encoding="utf-8") == now, "run: ray-nccl-guard explain --all --markdown > docs/classes.md"


def test_the_text_names_the_host_where_no_line_says_a_rank(tmp_path: Path, capsys):
    path = tmp_path / "a.log"
    closed = "misc/socket.cc:49 NCCL WARN socketProgress: Connection closed by remote peer node-1<5>"
    path.write_text(
        f"node-0:8:9 [0] {closed}\nnode-1:8:9 [3] include/alloc.h:178 NCCL WARN Cuda failure 2 'out of memory'\n"
        f"node-2:8:9 [0] {closed}\n"
    )
    _, out, _ = call(capsys, "classify", str(path))
    assert "  look at    host node-1\n" in out
    _, out, _ = call(capsys, "classify", str(path), "--json")
    assert (json.loads(out)["culprit_ranks"], json.loads(out)["culprit_hosts"]) == ([], ["node-1"])


def test_one_of_many_lines_that_differ_only_in_numbers_is_shown(tmp_path: Path, capsys):
    path = tmp_path / "a.log"
    path.write_text("".join(f"[rank{r}]: node-{r}: NCCL WARN Cuda failure 2 'out of memory'\n" for r in range(4)))
    _, out, _ = call(capsys, "classify", str(path))
    assert out.count("Cuda failure 2") == 1
    assert "the like on ranks 1, 2, 3" in " ".join(out.split())


SAME = "WorkNCCL(SeqNum=9, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600010 milliseconds"
WATCHDOG = f"[rank0]:[E1 ProcessGroupNCCL.cpp:6] [Rank 0] Watchdog caught collective operation timeout: {SAME}"


@pytest.mark.parametrize(("remark", "side"), [
    ("The same script runs fine on another cluster.", "infrastructure"),
    ("We see random hangs; sometimes fails, sometimes not", "infrastructure"),
    ("It works with 2 nodes but hangs with 4", "infrastructure"),
    ("The job hangs since we upgraded the NVIDIA driver", "infrastructure"),
    ("There is a firewall between the two nodes", "infrastructure"),
    ("It always stops at the same step", "program"),
    ("With gloo it also hangs; it even fails with gloo", "program"),
])  # fmt: skip
def test_what_people_write_beside_a_log_says_which_side_to_look_at_and_moves_no_class(
    remark: str, side: str, tmp_path: Path, capsys
):
    path = tmp_path / "a.log"
    told = {}
    for text in ("", f"{remark}\n"):
        path.write_text(f"{text}{WATCHDOG}\n")
        _, out, _ = call(capsys, "classify", str(path), "--json")
        told[text] = json.loads(out)
    plain, beside = told.values()
    assert plain["signals"] == []
    assert [signal.rsplit(" ", 1)[1] for signal in beside["signals"]] == [side]
    assert beside["failure"] == plain["failure"]
    _, out, _ = call(capsys, "classify", str(path))
    assert f"that speaks for the {side}" in " ".join(out.split())


def test_an_open_verdict_says_on_which_sides_its_candidates_are(tmp_path: Path, capsys):
    path = tmp_path / "a.log"
    path.write_text(WATCHDOG.replace("SeqNum=9", "SeqNum=1") + "\n")
    _, out, _ = call(capsys, "classify", str(path))
    assert "scope      nccl; program if it is collective_timeout_desync" in out
