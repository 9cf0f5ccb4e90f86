"""Logs as they come: many ranks in one file, prefixes of six launchers, gzip, cut files, garbage, no end."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pytest

from ray_nccl_guard.classes import FailureClass as F
from ray_nccl_guard.diagnosis.gather import scanner_for
from ray_nccl_guard.errors import UsageError
from ray_nccl_guard.logs.evidence import KEEP, read_logs
from ray_nccl_guard.verdict import Verdict, classify

OOM = "include/alloc.h:178 NCCL WARN Cuda failure 'out of memory'"
CLOSED = "misc/socket.cc:49 NCCL WARN socketProgress: Connection closed by remote peer host-0<51159>"


def verdict_of(*paths: Path | str, **options: bool) -> Verdict:
    return classify(read_logs([str(path) for path in paths], scanner_for(None), **options))


def write(path: Path, *lines: str | bytes) -> Path:
    path.write_bytes(b"".join((line if isinstance(line, bytes) else line.encode()) + b"\n" for line in lines))
    return path


@pytest.mark.parametrize("line", [
    f"[rank3]: {OOM}",
    f"[rank3]:[W1129 NCCL.cpp:1] {OOM}",
    f"[E ProcessGroupNCCL.cpp:616] [Rank 3] {OOM}",
    f"[1,3]<stderr>:host-0:1:2 [3] {OOM}",
    f"[rank=3] || {OOM}",
    f"2026-01-01T00:00:00.1Z stderr F [rank3]: {OOM}",
    f"worker-1 | [rank3]: {OOM}",
    f"(RayTrainWorker pid=7, ip=10.0.0.2) [rank3]: {OOM}",
    f"\x1b[36m(RayTrainWorker pid=7)\x1b[0m [rank3]: {OOM}\r",
    json.dumps({"levelname": "ERROR", "message": OOM, "world_rank": 3, "pid": 7}),
])  # fmt: skip
def test_a_line_says_whose_it_is(tmp_path: Path, line: str):
    path = write(tmp_path / "driver.log", "start", line, f"[rank0]: {CLOSED}")
    verdict = verdict_of(path)
    assert (verdict.failure, verdict.culprit_ranks) == (F.GPU_OUT_OF_MEMORY, (3,))
    assert (verdict.evidence[0].line, verdict.evidence[0].source) == (2, str(path))


def test_rays_list_of_workers_gives_their_lines_a_rank(tmp_path: Path):
    path = write(
        tmp_path / "driver.log",
        "(TrainController pid=9) - (node_id=ab, ip=10.0.0.2, pid=70) world_rank=0, local_rank=0, node_rank=0",
        "(TrainController pid=9) - (node_id=ab, ip=10.0.0.3, pid=71) world_rank=1, local_rank=0, node_rank=1",
        f"(RayTrainWorker pid=71, ip=10.0.0.3) {OOM}",
        f"(RayTrainWorker pid=70, ip=10.0.0.2) {CLOSED}",
    )
    assert verdict_of(path).culprit_ranks == (1,)


def test_nccls_own_lines_give_a_process_its_rank_in_the_largest_communicator(tmp_path: Path):
    path = write(
        tmp_path / "driver.log",
        "node-1:40:90 [1] NCCL INFO ncclCommInitRank comm 0x5 rank 5 nranks 8 cudaDev 1 nvmlDev 1 busId 1 commId 0x1 - Init COMPLETE",
        "node-1:40:90 [1] NCCL INFO ncclCommSplit comm 0x6 rank 1 nranks 2 cudaDev 1 nvmlDev 1 busId 1 commId 0x2 - Init COMPLETE",
        f"node-0:30:31 [0] {CLOSED}",
        f"node-1:40:91 [1] {OOM}",
    )
    evidence = read_logs([str(path)], scanner_for(None))
    assert evidence.world_size == 8
    assert classify(evidence).culprit_ranks == (5,)


def test_a_file_named_after_its_rank_gives_it(tmp_path: Path):
    files = [write(tmp_path / f"train_rank{rank}.log", CLOSED if rank != 2 else OOM) for rank in range(4)]
    assert verdict_of(*files).culprit_ranks == (2,)


def test_any_number_in_a_name_is_a_rank_only_if_the_caller_says_so(tmp_path: Path):
    files = [write(tmp_path / f"worker-{rank}.err", CLOSED if rank != 2 else OOM) for rank in range(4)]
    assert verdict_of(*files).culprit_ranks == ()
    assert verdict_of(*files, trust_names=True).culprit_ranks == (2,)


def test_gzip_is_read_and_a_cut_one_up_to_the_cut(tmp_path: Path):
    whole = gzip.compress(f"[rank1]: {OOM}\n".encode() * 3 + os.urandom(200_000))
    (tmp_path / "a.log.gz").write_bytes(whole)
    (tmp_path / "cut.log.gz").write_bytes(whole[:-50_000])
    assert verdict_of(tmp_path / "a.log.gz").failure is F.GPU_OUT_OF_MEMORY
    assert verdict_of(tmp_path / "cut.log.gz").failure in (F.GPU_OUT_OF_MEMORY, F.UNKNOWN)


def test_the_last_state_of_a_progress_bar_is_a_line(tmp_path: Path):
    path = write(tmp_path / "a.log", "10%|#  |\r" * 5000 + f"20%|## |\r[rank1]: {OOM}")
    assert verdict_of(path).failure is F.GPU_OUT_OF_MEMORY


@pytest.mark.parametrize(
    "data", [b"", b"\n\n", b"\x00" * 5000, os.urandom(20_000), b"\xff\xfe\n\xc3\x28\n", b"no line end", b"{" * 50_000]
)
def test_what_is_no_log_is_unknown(tmp_path: Path, data: bytes):
    (tmp_path / "x").write_bytes(data)
    assert verdict_of(tmp_path / "x").failure is F.UNKNOWN


def test_mixed_line_ends_and_bad_utf8_do_not_hide_a_line(tmp_path: Path):
    path = write(tmp_path / "a.log", b"caf\xe9 \xff\r", f"[rank1]: {OOM}\r".encode(), b"\xed\xa0\x80")
    assert verdict_of(path).failure is F.GPU_OUT_OF_MEMORY


def test_a_line_longer_than_memory_allows_is_cut_and_the_rest_is_read(tmp_path: Path):
    path = tmp_path / "a.log"
    with path.open("wb") as file:
        for _ in range(40):
            file.write(b"x" * 1_000_000)
        file.write(f"\n[rank1]: {OOM}\n".encode())
    assert verdict_of(path).failure is F.GPU_OUT_OF_MEMORY


def test_a_file_given_twice_counts_once(tmp_path: Path):
    path = write(tmp_path / "a.log", f"[rank1]: {OOM}")
    once, twice = read_logs([str(path)], scanner_for(None)), read_logs([str(path), str(path)], scanner_for(None))
    assert once == twice


def test_thousands_of_writers_are_kept_within_bounds(tmp_path: Path):
    path = write(tmp_path / "a.log", *(f"host-{i}:{i}:1 [0] {CLOSED}" for i in range(3000)), f"[rank1]: {OOM}")
    evidence = read_logs([str(path)], scanner_for(None), max_writers=50)
    assert len(evidence.ranks) <= 52
    assert sum(len(record.lines) for record in evidence.ranks) <= 52 * KEEP * 2
    assert classify(evidence).failure is F.GPU_OUT_OF_MEMORY


@pytest.mark.parametrize(("name", "reason"), [("", "no log"), ("missing.log", "cannot be read"), (".", "is a directory")])
def test_what_cannot_be_read_is_a_usage_error(tmp_path: Path, name: str, reason: str):
    with pytest.raises(UsageError, match=reason):
        read_logs([str(tmp_path / name)] if name else [], scanner_for(None))


def test_the_host_of_a_rank_is_read_off_its_own_lines(tmp_path: Path):
    path = tmp_path / "driver.log"
    path.write_text(
        "(RayTrainWorker pid=11, ip=10.0.0.7) [rank0]: RuntimeError: Connection closed by remote peer\n"
        "[rank1]: node-b:12:40 [0] include/alloc.h:178 NCCL WARN Cuda failure 2 'out of memory'\n"
        "[rank2]: RuntimeError: Connection closed by remote peer\n"
    )
    evidence = read_logs([str(path)], scanner_for(None))
    assert [(record.rank, record.host) for record in evidence.ranks] == [(0, "10.0.0.7"), (1, "node-b"), (2, "")]
    assert classify(evidence).to_json()["culprit_hosts"] == ["node-b"]


def test_the_rank_whose_own_file_complains_of_nothing_is_the_suspect(tmp_path):
    waits = "[rank{r}]:[E1 ProcessGroupNCCL.cpp:6] [Rank {r}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=80, OpType=ALLREDUCE)\n"
    for rank in range(4):
        (tmp_path / f"rank{rank}.log").write_text("epoch 3\n" if rank == 2 else waits.format(r=rank))
    evidence = read_logs([str(tmp_path / f"rank{rank}.log") for rank in range(4)], scanner_for(None))
    assert [record.rank for record in evidence.ranks] == [0, 1, 2, 3]
    verdict = classify(evidence)
    assert (verdict.culprit_ranks, verdict.silence) == ((2,), "what it printed complains of nothing")


def test_a_rank_whose_log_is_not_there_is_a_suspect_of_another_kind(tmp_path):
    done = "comm 0x5 rank {r} nranks 4 cudaDev {r} nvmlDev {r} busId 1 commId 0x2 - Init COMPLETE"
    closed = "misc/socket.cc:49 NCCL WARN socketProgress: Connection closed by remote peer h<5>"
    for rank in (0, 1, 3):
        (tmp_path / f"rank{rank}.log").write_text(
            f"h:{rank}:9 [0] NCCL INFO {done.format(r=rank)}\nh:{rank}:9 [0] {closed}\n"
        )
    verdict = verdict_of(*sorted(tmp_path.glob("*.log")))
    assert (verdict.culprit_ranks, verdict.silence) == ((2,), "there is no record of it")
