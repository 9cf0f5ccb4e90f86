"""The ladder through guarded fit() calls on fake GPUs: what is tried in which order, who may say no, and what ends it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fakegpu.fits import Fit, Fits, refused, trained_on, verdict

pytestmark = pytest.mark.timeout(600)  # of which a fit() of two workers takes 12 s on an idle machine

P2P = "init:preset=p2p@world>=2"  # and no setting cures it


def rungs(run: Fit) -> list[tuple[str, dict[str, str], str]]:
    return [(a["backend"], a["env"], a["failure"]) for a in run.report["attempts"]]


@pytest.mark.slow
@pytest.mark.torch_versions  # in the gate on both
def test_a_fault_that_nothing_cures_ends_on_gloo_where_a_later_group_on_nccl_is_warned_about(fits: Fits) -> None:
    run = fits.guarded(P2P, train="makes_a_group_on_nccl")
    trained_on(run, "gloo")
    off = {"NCCL_P2P_DISABLE": "1"}
    assert rungs(run) == [("nccl", {}, "p2p_or_acs"), ("nccl", off, "p2p_or_acs"), ("gloo", {}, "ok")]
    assert run.report["all_reduce_s"], "what the fall-back costs was measured"
    # Read, not imported: only under the double has a torch without its NVIDIA libraries what it needs to load.
    source = Path(__file__).with_name("fit_bodies.py").read_text().splitlines()
    line = next(number for number, text in enumerate(source, 1) if "the line that the warning must name" in text)
    assert run.told(f"fit_bodies.py:{line}"), run.logged[-3000:]
    warned = [text for text in run.logged.splitlines() if f"fit_bodies.py:{line}" in text]
    assert warned and "new_group()" in warned[0] and "p2p_or_acs" in warned[0], run.logged[-3000:]


@pytest.mark.long
def test_an_nvls_fault_is_cured_by_its_setting(fits: Fits) -> None:
    run = fits.guarded("init:preset=nvls@without=NCCL_NVLS_ENABLE=0")
    trained_on(run, "nccl")
    assert verdict(run)[0] == "nvlink_fabric_error" and run.report["relief"] == {"NCCL_NVLS_ENABLE": "0"}
    assert [n["nccl"] for n in run.notes] == [{"NCCL_NVLS_ENABLE": "0"}] * 2
    assert run.told("NCCL_NVLS_ENABLE=0"), "the message names the setting"


@pytest.mark.slow
@pytest.mark.parametrize("where", ["the environment", pytest.param("nccl.conf", marks=pytest.mark.long)])
def test_a_setting_of_the_users_is_left_alone_and_named(fits: Fits, where: str, tmp_path: Path) -> None:
    conf = tmp_path / "nccl.conf"
    conf.write_text("# of this node\nNCCL_P2P_DISABLE=0\n")
    env = {"NCCL_P2P_DISABLE": "0"} if where == "the environment" else {"NCCL_CONF_FILE": str(conf)}
    run = fits.guarded("init:preset=p2p@without=NCCL_P2P_DISABLE=1", env=env)
    trained_on(run, "gloo")
    assert [rung[:2] for rung in rungs(run)] == [("nccl", {}), ("gloo", {})], "the relief was not tried"
    (note,) = [note for note in run.report["notes"] if "would have been tried" in note]
    assert "you have set NCCL_P2P_DISABLE=0" in note
    assert run.told("would have been tried, but you have set NCCL_P2P_DISABLE=0"), "the message says it too"
    assert where == "the environment" or note.endswith(f"in {conf}")


@pytest.mark.slow
def test_the_budget_ends_the_rung_that_runs(fits: Fits) -> None:
    run = fits.guarded("init:hang@rank1", policy={"budget_s": 6})
    assert "Policy.budget_s = 6 s" in refused(run)
    assert verdict(run)[0] == "init_timeout_hang" and len(run.report["attempts"]) == 1
    assert run.report["timings_s"]["probe"] < 15, "its own deadline is 40 s"


@pytest.mark.long
def test_the_budget_ends_a_later_rung_too_and_is_not_its_failure(fits: Fits) -> None:
    run = fits.guarded(f"{P2P}@without=NCCL_P2P_DISABLE=1,init:hang@rank1", policy={"budget_s": 8})
    assert refused(run).endswith("was used up while nccl NCCL_P2P_DISABLE=1 was being proved") or "before gloo" in refused(
        run
    )
    assert verdict(run)[0] == "p2p_or_acs", "the first rung's verdict is the run's"


def test_a_sharded_job_whose_gather_gloo_has_not_is_refused_by_its_name(fits: Fits) -> None:
    run = fits.guarded(P2P, collectives=["fsdp", "coalesced_all_gather"], policy={"relief": False})
    assert "gloo has no coalesced_all_gather (pytorch#152645) of CUDA tensors" in refused(run)
    assert [rung[0] for rung in rungs(run)] == ["nccl"], "gloo was not tried"


@pytest.mark.slow
def test_a_sharded_job_that_gloo_can_serve_trains_on_it(fits: Fits) -> None:
    run = fits.guarded(P2P, collectives="fsdp", policy={"relief": False})
    trained_on(run, "gloo")
    assert {"all_gather_into_tensor", "reduce_scatter"} <= set(run.report["collectives_proved"])


@pytest.mark.long
def test_more_ranks_than_the_ceiling_allows_are_refused_without_trying_gloo(fits: Fits) -> None:
    run = fits.guarded(P2P, policy={"relief": False, "world_warn": 1, "world_ceiling": 1})
    assert "gloo is refused above 1 ranks, and this job has 2" in refused(run)
    assert [rung[0] for rung in rungs(run)] == ["nccl"]
