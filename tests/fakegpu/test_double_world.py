"""Communicators of the double under the real torch: right values, the faults it plays, and what a death leaves."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from tests.fakegpu.double import SOURCES, Double
from tests.fakegpu.matrix import NEW
from tests.fakegpu.ranks import Ended, Ranks

pytestmark = pytest.mark.torch_versions

BODIES = "tests.fakegpu.bodies"
# "nccl" is the new backend in torch 2.15 and the old one before; "nccl-legacy" exists from 2.14 on.
BACKENDS = ("nccl", "nccl-legacy")
KERNELS = re.compile(r"Init timings - ncclCommInitRankConfig: rank (\d) nranks 2 total .*?kernels (\d+\.\d\d),")


def all_reduce(
    ranks: Ranks, world: int, fault: str = "", deadline_s: float = 30.0, env: dict[str, str] | None = None, **kwargs: object
) -> list[Ended]:
    return ranks.run(f"{BODIES}:all_reduce", world, deadline_s, env={"FAKE_FAULT": fault, **(env or {})}, **kwargs)


def values(ended: list[Ended]) -> list[object]:
    assert all(rank.exit_code == 0 for rank in ended), "\n".join(rank.output for rank in ended)
    return [rank.value for rank in ended]


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16", "int64", "int32", "int8", "uint8"])
def test_collectives_give_the_values_that_the_cpu_gives(ranks: Ranks, shared_memory: Path, dtype: str, world: int) -> None:
    size = 300_001 if dtype == "float32" else 17  # several rounds of staging, and an odd end
    assert values(ranks.run(f"{BODIES}:every_collective", world, dtype=dtype, size=size)) == [[]] * world


def test_the_legacy_backend_gives_the_same_values(ranks: Ranks, shared_memory: Path) -> None:
    ended = ranks.run(f"{BODIES}:every_collective", 4, dtype="float32", size=1000, backend="nccl-legacy")
    assert values(ended) == [[]] * 4


def test_sixty_four_ranks_sum_up(double: Double, shared_memory: Path) -> None:
    with Ranks(double.env(devices=64, shm=shared_memory)) as many:
        assert values(all_reduce(many, 64, deadline_s=120)) == [[2080.0, 2080.0]] * 64


def test_a_wrong_value_is_really_wrong_on_the_rank_it_was_asked_for(ranks: Ranks, shared_memory: Path) -> None:
    assert values(all_reduce(ranks, 2, "allreduce:wrong@rank1")) == [[3.0, 3.0], [4.0, 3.0]]


def test_a_fault_from_a_size_up_spares_smaller_ones(ranks: Ranks, shared_memory: Path) -> None:
    fault = "allreduce:wrong@bytes>=512K"
    assert values(all_reduce(ranks, 2, fault, elements=(512 << 10) // 4 - 1)) == [[3.0, 3.0]] * 2
    assert values(all_reduce(ranks, 2, fault, elements=(512 << 10) // 4)) == [[4.0, 3.0]] * 2


def test_a_fault_from_a_world_size_up_spares_smaller_ones(ranks: Ranks, shared_memory: Path) -> None:
    fault = "allreduce:wrong@rank0@world>=4"
    assert values(all_reduce(ranks, 2, fault))[0] == [3.0, 3.0]
    assert values(all_reduce(ranks, 4, fault))[0] == [11.0, 10.0]


def test_a_bad_link_strikes_its_two_ends_and_nobody_else(ranks: Ranks, shared_memory: Path) -> None:
    assert values(all_reduce(ranks, 4, "allreduce:wrong@pair=1-3")) == [
        [10.0, 10.0],
        [11.0, 10.0],
        [10.0, 10.0],
        [11.0, 10.0],
    ]
    moved = {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}
    assert values(all_reduce(ranks, 2, "allreduce:wrong@gpupair=4-5", env=moved)) == [[4.0, 3.0]] * 2
    assert values(all_reduce(ranks, 2, "allreduce:wrong@gpupair=4-6", env=moved)) == [[3.0, 3.0]] * 2


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_setting_cures_the_fault_that_names_it(ranks: Ranks, shared_memory: Path, backend: str) -> None:
    fault = "init:preset=nvls@without=NCCL_NVLS_ENABLE=0"
    ill = all_reduce(ranks, 2, fault, backend=backend)
    assert any("NVLink SHARP (NVLS) Multicast" in rank.error_text for rank in ill)
    assert values(all_reduce(ranks, 2, fault, env={"NCCL_NVLS_ENABLE": "0"}, backend=backend)) == [[3.0, 3.0]] * 2


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_error_in_init_reaches_python_with_nccls_words(ranks: Ranks, backend: str) -> None:
    ended = all_reduce(ranks, 2, "init:error=5", backend=backend)
    texts = [rank.error_text for rank in ended if "invalid usage" in rank.error_text]
    assert texts and all("fault injected at init: result 5" in text for text in texts)


def test_a_rank_that_hangs_in_init_leaves_python_running_and_a_hang_with_the_gil_does_not(ranks: Ranks) -> None:
    (free,) = ranks.run(f"{BODIES}:python_goes_on", 1, deadline_s=20, env={"FAKE_FAULT": "init:hang"})
    assert free.exit_code == 3
    (held,) = ranks.run(f"{BODIES}:python_goes_on", 1, deadline_s=3, env={"FAKE_FAULT": "init:hang-gil"})
    assert held.hung and "tick" not in held.output


# torch makes gather and scatter of send and recv, and asks for attributes through the driver's own interface.
NOT_CALLED = {"gather", "scatter", "call_gather", "call_scatter", "getattribute"} | (set() if NEW else {"memset"})


def test_torch_comes_by_every_point_of_the_fault_language(ranks: Ranks, shared_memory: Path) -> None:
    source = (SOURCES / "fault_language.c").read_text()
    points = set(re.findall(r'"(\w*[a-z])"', source.partition("POINTS[] = {")[2].partition("/* NVML */")[0]))
    assert len(points) > 40 and points.isdisjoint({"nvmlinit", "nvmlhandle"})
    everywhere = {"FAKE_FAULT": ",".join(f"{point}:delay=0" for point in points), "FAKE_CUDA_LOG": "1"}
    output = ""
    for backend in BACKENDS:
        ended = ranks.run(f"{BODIES}:every_point", 2, env=everywhere, backend=backend)
        assert values(ended) == [[], []]
        output += "".join(rank.output for rank in ended)
    assert points - set(re.findall(r"fault at (\w+) on rank", output)) == NOT_CALLED


def test_a_sticky_error_meets_every_later_call(ranks: Ranks, shared_memory: Path) -> None:
    for rank in ranks.run(f"{BODIES}:sticky", 2, env={"FAKE_FAULT": "allreduce:cuda700"}):
        assert rank.exit_code == 7
        assert rank.output.count("\ncall: CUDA error: an illegal memory access was encountered") == 3


@pytest.mark.parametrize(
    ("action", "number", "code"),
    [("abort", signal.SIGABRT, None), ("segv", signal.SIGSEGV, None), ("kill", signal.SIGKILL, None), ("exit=9", None, 9)],
)
def test_a_rank_dies_as_asked_and_leaves_no_shared_memory_once_all_had_met(
    ranks: Ranks, shared_memory: Path, action: str, number: int | None, code: int | None
) -> None:
    dead, left = reversed(all_reduce(ranks, 2, f"allreduce:{action}@rank1", deadline_s=2))
    assert (dead.signal, dead.exit_code) == (number, code)
    assert left.hung  # over shared memory nobody tells it


def test_a_death_before_all_have_met_leaves_the_file_as_nccl_does(ranks: Ranks, shared_memory: Path) -> None:
    all_reduce(ranks, 2, "init:kill@rank1", deadline_s=2)
    (left,) = shared_memory.iterdir()
    left.unlink()
    assert re.fullmatch(r"nccl-[a-zA-Z0-9]{6}", left.name)


def test_the_shared_memory_lies_where_nccls_does_and_is_unlinked_while_in_use(double: Double, tmp_path: Path) -> None:
    with Ranks(double.env(devices=2, state=tmp_path)) as plain:
        for mapped in values(plain.run(f"{BODIES}:mapped_shared_memory", 2)):
            assert isinstance(mapped, list)
            assert re.fullmatch(r"/dev/shm/nccl-[a-zA-Z0-9]{6} \(deleted\)", mapped[0]), mapped


def test_a_peers_death_is_seen_when_asked_for(ranks: Ranks, shared_memory: Path) -> None:
    env = {"FAKE_NCCL_PEER_DEATH": "remote"}
    survivor = all_reduce(ranks, 2, "allreduce:kill@rank1", env=env, deadline_s=20, timeout_s=60)[0]
    assert not survivor.hung and "remote process exited or there was a network error" in survivor.output


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_watchdog_aborts_a_process_whose_collective_hangs(ranks: Ranks, shared_memory: Path, backend: str) -> None:
    for rank in all_reduce(ranks, 2, "allreduce:hang@rank1", deadline_s=60, backend=backend, timeout_s=2):
        assert rank.signal == signal.SIGABRT
        assert "imeout" in rank.output


def test_nonblocking_init_works_and_its_hang_is_bounded(ranks: Ranks) -> None:
    env = {"TORCH_NCCL_USE_COMM_NONBLOCKING": "1"}
    assert values(all_reduce(ranks, 2, env=env)) == [[3.0, 3.0]] * 2
    ended = all_reduce(ranks, 2, "init:hang", env={**env, "TORCH_NCCL_NONBLOCKING_TIMEOUT": "2"}, deadline_s=40, timeout_s=2)
    assert not any(rank.hung for rank in ended) and any("ime" in rank.error_text for rank in ended)


def test_a_slow_init_that_logs_is_seen_to_go_on(ranks: Ranks, shared_memory: Path, tmp_path: Path) -> None:
    env = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": f"{tmp_path}/%h.%p", "FAKE_CUDA_NODE": "gpu-02.example"}
    assert values(all_reduce(ranks, 2, "init:delay=1500@rank1@chatty", env=env)) == [[3.0, 3.0]] * 2
    logs = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert len(logs) == 2 and all(name.startswith("gpu-02.") for name in logs)
    assert sorted(text.count("NCCL INFO Channel") for text in logs.values()) == [1, 4]
    for text in logs.values():
        for line in text.splitlines():
            assert re.match(r"gpu-02:\d+:\d+ \[\d\] NCCL INFO \S", line), line
        assert "Bootstrap: Using" in text and "NCCL version 2.30.7+cuda" in text
        assert re.search(r"rank \d nranks 2 cudaDev \d nvmlDev \d busId \d000 commId 0x[0-9a-f]+ - Init START", text)
        assert "Init COMPLETE" in text
    loading_s = {rank: float(seconds) for text in logs.values() for rank, seconds in KERNELS.findall(text)}
    assert loading_s["1"] >= 1.5 > loading_s["0"], "what delays a rank's start is its own time"
    waited_s = [float(text.split("Bootstrap timings total ")[1].split()[0]) for text in logs.values()]
    assert max(waited_s) > 0.5 > min(waited_s), f"the other one waits for it in the bootstrap, not it: {waited_s}"


def test_a_warning_has_nccls_format_and_only_the_level_asked_for(ranks: Ranks, tmp_path: Path) -> None:
    env = {"NCCL_DEBUG": "WARN", "NCCL_DEBUG_FILE": f"{tmp_path}/%p"}
    all_reduce(ranks, 2, "init:preset=shm", env=env, deadline_s=5)
    for path in tmp_path.iterdir():
        lines = path.read_text().split("\n")
        warned = [line for line in lines if "NCCL WARN" in line]
        assert len(warned) == 2 and not any("INFO" in line for line in lines)
        assert re.match(
            r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\] \S+:\d+:\d+ \[\d\] misc/shmutils.cc:\d+ NCCL WARN Error: failed to extend",
            warned[0],
        )


def test_an_interface_that_is_not_there_fails_the_bootstrap(ranks: Ranks, shared_memory: Path) -> None:
    ended = all_reduce(ranks, 2, env={"NCCL_SOCKET_IFNAME": "nosuch"})
    assert any("no socket interface found" in rank.error_text for rank in ended)


def test_two_ranks_on_one_gpu_are_refused_and_on_two_hosts_gpu_zero_is_two_gpus(ranks: Ranks, shared_memory: Path) -> None:
    same = {"LOCAL_RANK": "0"}
    ended = all_reduce(ranks, 2, env=same)
    assert any(
        re.search(r"Duplicate GPU detected : rank \d and rank \d both on CUDA device 1000", rank.error_text)
        for rank in ended
    )
    assert values(all_reduce(ranks, 2, env={**same, "FAKE_CUDA_NODE": "host-{rank}"})) == [[3.0, 3.0]] * 2


def test_an_error_that_only_the_next_look_shows(ranks: Ranks, shared_memory: Path) -> None:
    ended = all_reduce(ranks, 2, "initdone:async=2@rank1", deadline_s=3)
    assert "unhandled system error" in ended[1].error_text


def test_python_code_forked_after_the_first_cuda_call_cannot_use_cuda(ranks: Ranks) -> None:
    (ended,) = ranks.run(f"{BODIES}:in_a_fork_after_cuda", 1)
    assert "Cannot re-initialize CUDA in forked subprocess" in str(ended.value)
