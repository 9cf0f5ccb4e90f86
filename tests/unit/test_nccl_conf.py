"""NCCL's configuration files are read as NCCL reads them."""

from __future__ import annotations

from ray_nccl_guard import facts, nccl_conf
from ray_nccl_guard.network import addresses


def conf(tmp_path, text: str) -> dict[str, str]:
    (tmp_path / "nccl.conf").write_text(text)
    return {"NCCL_CONF_FILE": str(tmp_path / "nccl.conf")}


def test_lines_of_the_file_count_where_the_environment_says_nothing(tmp_path):
    env = conf(
        tmp_path, "# NCCL_DEBUG=INFO\nNCCL_P2P_DISABLE=1\nNCCL_IB_HCA==mlx5_0\nnonsense\nHOME=/tmp\nNCCL_P2P_DISABLE=0\n"
    )
    path = env["NCCL_CONF_FILE"]
    assert nccl_conf.settings(env) == {"NCCL_P2P_DISABLE": ("1", path), "NCCL_IB_HCA": ("=mlx5_0", path)}
    assert nccl_conf.settings({**env, "NCCL_P2P_DISABLE": "0"}) == {"NCCL_IB_HCA": ("=mlx5_0", path)}


def test_a_file_that_is_not_there_or_no_text_sets_nothing(tmp_path):
    assert nccl_conf.settings({"NCCL_CONF_FILE": str(tmp_path / "none")}) == {}
    (tmp_path / "nccl.conf").write_bytes(bytes(range(256)) * 4096)
    assert nccl_conf.settings({"NCCL_CONF_FILE": str(tmp_path / "nccl.conf")}) == {}
    assert nccl_conf.settings({"NCCL_CONF_FILE": str(tmp_path)}) == {}, "a folder"


def test_the_facts_and_the_choice_of_an_interface_go_by_the_file(tmp_path, monkeypatch):
    env = conf(tmp_path, "NCCL_SOCKET_IFNAME=nosuch0\n")
    monkeypatch.setenv("NCCL_CONF_FILE", env["NCCL_CONF_FILE"])
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    fact = facts.collect(0)
    assert fact.settings["NCCL_SOCKET_IFNAME"] == "nosuch0"
    assert fact.settings_from == {"NCCL_SOCKET_IFNAME": env["NCCL_CONF_FILE"]}
    assert any("nosuch0" in problem.text for problem in addresses.gather(env, deadline_s=1.0).problems)
