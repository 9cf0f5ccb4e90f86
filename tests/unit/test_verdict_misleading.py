"""Fifteen reports whose first visible message misleads (docs: the classes' cautions), and the lines that decide nothing."""

from __future__ import annotations

import pytest

from ray_nccl_guard.classes import FailureClass as F
from ray_nccl_guard.evidence import Evidence, Origin, RankEvidence
from ray_nccl_guard.probe.spec import LogLine, Outcome
from ray_nccl_guard.verdict import Certainty, Verdict, classify


def logs(*ranks: str, world: int = 0, origin: Origin = Origin.LOG) -> Evidence:
    """One record for each text, ranks counted from 0."""
    records = tuple(
        RankEvidence(rank=rank, outcome=Outcome.NOT_RUN, lines=tuple(
            LogLine(source=f"rank{rank}.log", number=i + 1, text=line) for i, line in enumerate(text.splitlines())
        )) for rank, text in enumerate(ranks)
    )  # fmt: skip
    return Evidence(origin=origin, backend="nccl", world_size=world or len(ranks), ranks=records)


def named(*ranks: str, world: int = 0) -> Verdict:
    return classify(logs(*ranks, world=world))


TIMEOUT = (
    "[rank{rank}]:[E626 ProcessGroupNCCL.cpp:632] [Rank {rank}] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum={seq}, OpType={op}, NumelIn={numel}, NumelOut={numel}, Timeout(ms)=600000) ran for 600060 milliseconds"
)
ID_WAIT = (
    "torch.distributed.DistBackendError: [1] is setting up NCCL communicator and retrieving ncclUniqueId from [0] via c10d "
    "key-value store by key '0', but store->get('0') got error: Socket Timeout"
)


def timeout(rank: int, seq: int = 120, op: str = "ALLREDUCE", numel: int = 4096) -> str:
    return TIMEOUT.format(rank=rank, seq=seq, op=op, numel=numel)


def test_waiting_for_the_id_is_explained_by_rank_zeros_lack_of_an_interface():
    verdict = named("host-0:1:2 [0] bootstrap.cc:45 NCCL WARN Bootstrap : no socket interface found", ID_WAIT)
    assert verdict.failure is F.NCCL_BOOTSTRAP_NETWORK


def test_waiting_for_the_id_alone_stays_open():
    verdict = named("loading data set ...", ID_WAIT)
    assert verdict.failure is F.MISSING_RANK
    assert verdict.certainty is Certainty.OPEN


def test_out_of_memory_on_one_rank_beats_closed_connections_on_the_others():
    closed = "host-0:100:200 [0] misc/socket.cc:49 NCCL WARN socketProgress: Connection closed by remote peer host-0<51159>"
    oom = "host-0:103:203 [3] include/alloc.h:178 NCCL WARN Cuda failure 'out of memory'"
    verdict = named(closed, closed, closed, oom)
    assert (verdict.failure, verdict.culprit_ranks) == (F.GPU_OUT_OF_MEMORY, (3,))


def test_the_kernels_oom_line_beats_six_watchdog_timeouts():
    killed = "[ 812.1] Out of memory: Killed process 4242 (python) total-vm:900kB"
    verdict = named(*(timeout(rank) for rank in range(6)), killed)
    assert (verdict.failure, verdict.culprit_ranks) == (F.HOST_OOM_KILLED, (6,))


def test_rays_list_of_potential_root_causes_is_no_evidence_of_an_oom_kill():
    text = (
        "A worker died or was killed while executing a task by an unexpected system error. There are some potential root "
        "causes. (1) The process is killed by SIGKILL by OOM killer due to high memory usage."
    )
    verdict = named(text)
    assert verdict.certainty is Certainty.OPEN
    assert verdict.failure is F.REMOTE_PEER_DIED


def test_a_missing_libibverbs_decides_nothing():
    assert named("host-0:1:2 [0] misc/ibvwrap.cc:63 NCCL WARN Failed to open libibverbs.so[.1]").failure is F.UNKNOWN


def test_a_full_shm_that_only_peer_to_peer_off_exposes_names_both():
    verdict = named(
        "NCCL test hangs between GPU2 and GPU3 all the time\n"
        "ACSCtl: SrcValid+ TransBlk- ReqRedir+ CmpltRedir+ UpstreamFwd+ EgressCtrl- DirectTrans-\n"
        "host-0:1:2 [1] NCCL INFO NCCL_P2P_DISABLE set by environment to 1.\n"
        "host-0:1:2 [1] include/shm.h:28 NCCL WARN Call to posix_fallocate failed : No space left on device"
    )
    assert verdict.failure is F.SHM_TOO_SMALL
    assert F.P2P_OR_ACS in [c.failure for c in verdict.candidates]
    assert any("p2p_or_acs" in text for text in verdict.against)


def test_217_in_shm_cc_is_not_the_peer_to_peer_problem():
    text = "host-0:1:2 [1] transport/{}.cc:590 NCCL WARN Cuda failure 217 'peer access is not supported between these two devices'"
    shm, p2p = named(text.format("shm")), named(text.format("p2p"))
    assert shm.failure is F.CUMEM_CONTAINER_CAPS
    assert dict(shm.relief) == {"NCCL_CUMEM_HOST_ENABLE": "0"}
    assert p2p.failure is F.P2P_OR_ACS


def test_nvls_invalid_argument_keeps_the_container_as_second_candidate():
    verdict = named("host-0:1:2 [7] transport/nvls.cc:157 NCCL WARN Cuda failure 1 'invalid argument'")
    assert verdict.failure is F.NVLINK_FABRIC_ERROR
    assert verdict.candidates[1].failure is F.CUMEM_CONTAINER_CAPS
    assert "nvidia-caps" in verdict.caution


def test_a_reset_connection_is_explained_by_the_other_nodes_infiniband_fault():
    verdict = named(
        "host-0:1:2 [0] include/socket.h:428 NCCL WARN Net : Call to recv from 10.0.0.1<36048> failed : Connection reset by peer",
        "host-1:1:2 [0] transport/net_ib.cc:1 NCCL WARN NET/IB : Got completion from peer 10.0.0.1<3> with status=12 vendor err 129",
    )
    assert (verdict.failure, verdict.certainty) == (F.IB_RDMA_ERROR, Certainty.LIKELY)


def test_internal_error_is_nothing_internal_when_an_interface_is_missing():
    verdict = named(
        "internal error - please report this issue to the NCCL developers",
        "host-1:1:2 [0] NCCL WARN Bootstrap : no socket interface found",
    )
    assert verdict.failure is F.NCCL_BOOTSTRAP_NETWORK


def test_rays_engine_error_is_explained_by_gloos_refused_mesh():
    verdict = named(
        "[W ProcessGroupGloo.cpp:721] Warning: Unable to resolve hostname to a (local) address. Using the loopback address\n"
        "Gloo connectFullMesh failed with [pair.cc:152] timed out connecting: SO_ERROR: Connection refused, remote=[127.0.0.1]:3$1\n"
        "ray.exceptions.ActorHandleNotFoundError: engine initialization failed"
    )
    assert verdict.failure is F.GLOO_NETWORK
    assert verdict.gloo_can_help is False


def test_more_workers_than_ranks_is_a_second_generation_and_not_a_missing_rank():
    verdict = named(
        "Waiting in store based barrier to initialize process group for rank: 0, key: store_based_barrier_key:1 "
        "(world_size=2, worker_count=4, timeout=0:30:00)"
    )
    assert verdict.failure is F.MISSING_RANK
    assert "more workers than ranks" in verdict.summary


def test_a_mistake_in_the_program_beside_a_connection_abort_is_not_called_a_network_fault_for_sure():
    verdict = named(
        "host-0:1:2 [0] misc/socket.cc:484 NCCL WARN socketStartConnect: Connect to 10.0.0.5<4> failed : connection abort\n"
        "ValueError: trying to initialize the default process group twice!"
    )
    assert verdict.certainty is Certainty.OPEN
    assert {F.USER_CODE_NOT_INFRA, F.NCCL_BOOTSTRAP_NETWORK} <= {c.failure for c in verdict.candidates}


def test_an_absurd_allocation_after_timeouts_is_no_memory_shortage():
    verdict = named(
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate more than 1EB memory",
        timeout(1),
        timeout(2),
        timeout(3),
    )
    assert verdict.failure is F.COLLECTIVE_TIMEOUT_DESYNC


def test_a_missing_kernel_image_carries_the_caution_about_the_release_that_left_it_behind():
    verdict = named("RuntimeError: CUDA error: no kernel image is available for execution on the device")
    assert verdict.failure is F.NO_KERNEL_IMAGE
    assert "2.28.3" in verdict.caution


@pytest.mark.parametrize("line", [
    "RuntimeError: NCCL error in: ProcessGroupNCCL.cpp:784, unhandled cuda error, NCCL version 2.7.8",
    "ncclUnhandledCudaError: Call to CUDA function failed.",
    "ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.",
    "internal error - please report this issue to the NCCL developers",
    "ncclInvalidUsage: This usually reflects invalid usage of NCCL library.",
    "host-0:1:2 [0] NCCL INFO NET/IB : No device found.",
    "host-0:1:2 [0] NCCL INFO NET/Plugin : No plugin found, using internal implementation",
    "[W socket.cpp:697] [c10d] The hostname of the client socket cannot be retrieved. err=-3",
    "To avoid data inconsistency, we are taking the entire process down.",
    "host-0:1:2 [0] NCCL INFO Comm config Blocking set to 1",
])  # fmt: skip
def test_a_line_of_boilerplate_alone_decides_nothing(line: str):
    assert named(line).failure is F.UNKNOWN


@pytest.mark.parametrize(("lines", "failure"), [
    ("[pair.cc:553] Connection closed by peer [10.77.3.3]:31398. This is typically caused by a remote worker crashing.", F.REMOTE_PEER_DIED),
    ("[pair.cc:537] Read error [10.77.3.3]:31398: Connection reset by peer", F.REMOTE_PEER_DIED),
    ("[Rank 3 Error Snippet]: A worker health check failed\n"
     "ValueError: Default process group has not been initialized, please make sure to call init_process_group.", F.REMOTE_PEER_DIED),
    ("[unbound_buffer.cc:78] Timed out waiting 10000ms for recv operation to complete", F.COLLECTIVE_TIMEOUT_DESYNC),
    ("Gloo connectFullMesh failed with [pair.h:311] Connect timeout [none]", F.GLOO_NETWORK),
    ("Gloo connectFullMesh failed with [gloo/transport/tcp/pair.cc:561] Connection closed by peer [127.0.0.1]:31896.", F.REMOTE_PEER_DIED),
    ("torch.distributed.DistStoreError: Timed out after 11 seconds waiting for clients. 3/4 clients joined.", F.MISSING_RANK),
])  # fmt: skip
def test_an_echo_of_teardown_or_of_a_lost_peer_is_not_taken_for_the_cause(lines: str, failure: F):
    assert named(lines).failure is failure


def test_a_process_that_torchrun_killed_after_another_had_failed_is_no_oom_kill():
    killed = "  exitcode  : -9 (pid: 14689)\n  traceback : Signal 9 (SIGKILL) received by PID 14689"
    assert named(f"{killed}\n  exitcode  : 1 (pid: 14692)").failure is F.UNKNOWN
    assert named(killed).failure is F.HOST_OOM_KILLED
    assert named(killed).certainty is Certainty.OPEN


def test_the_rank_that_the_programs_own_error_ended_is_the_culprit_and_not_those_that_waited_for_it():
    verdict = named(timeout(0), timeout(1), "Traceback (most recent call last):\nKeyError: 'pixel_values'", timeout(3))
    assert (verdict.failure, verdict.culprit_ranks) == (F.USER_CODE_NOT_INFRA, (2,))
    assert verdict.gloo_can_help is False


def test_an_error_on_a_rank_that_had_waited_itself_explains_nothing():
    verdict = named(timeout(0), timeout(1), f"{timeout(2)}\nKeyError: 'pixel_values'")
    assert verdict.failure is F.COLLECTIVE_TIMEOUT_DESYNC


def test_a_real_cause_beats_the_programs_own_error():
    oom = "[ 812.1] Out of memory: Killed process 4242 (python) total-vm:900kB"
    assert named(timeout(0), "KeyError: 'x'", oom).failure is F.HOST_OOM_KILLED


@pytest.mark.parametrize("line", [
    "RuntimeError: DataLoader worker (pid 220) is killed by signal: Bus error. It is possible that dataloader's workers are out "
    "of shared memory. Please try to raise your shared memory limit.",
    "ERROR: Unexpected bus error encountered in worker. This might be caused by insufficient shared memory (shm).",
    "RuntimeError: unable to write to file </torch_91_33_0>: No space left on device (28)",
])  # fmt: skip
def test_the_data_loaders_shared_memory_is_not_nccls_but_speaks_for_it_once_nccl_failed(line: str):
    assert named(line).failure is F.UNKNOWN
    assert "data loader ran out of /dev/shm" in named(line).summary
    beside = named(
        f"{line}\nncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error."
    )
    assert (beside.failure, beside.certainty, beside.gloo_can_help) == (F.SHM_TOO_SMALL, Certainty.OPEN, None)


def test_a_log_does_not_tell_whose_kernel_faulted_and_the_probe_runs_only_its_own():
    text = "torch.AcceleratorError: CUDA error: an illegal memory access was encountered"
    assert named(text).failure is F.ILLEGAL_MEMORY_ACCESS
    assert named(text).gloo_can_help is None
    assert classify(logs(text, origin=Origin.PROBE)).gloo_can_help is True
