"""Single messages of NCCL, torch, gloo, Ray and the kernel: each is named, and NCCL's mere information never is."""

from __future__ import annotations

from pathlib import Path

import pytest

from ray_nccl_guard.classes import FailureClass as F
from ray_nccl_guard.evidence import Evidence, Origin, RankEvidence
from ray_nccl_guard.probe.spec import LogLine, Outcome
from ray_nccl_guard.rulebook import RuleRole, load_rules, shipped_rules
from ray_nccl_guard.verdict import Verdict, classify

MESSAGES = [
    (tuple(line.split(" | ", 1)[0].split()), line.split(" | ", 1)[1])
    for line in (Path(__file__).parent / "data" / "messages.txt").read_text(encoding="utf-8").splitlines()
    if not line.startswith("#")
]
HEAD = "host-0:4000:9000 [0] "


def named(*lines: str) -> Verdict:
    found = tuple(LogLine(source="train.log", number=i + 1, text=line) for i, line in enumerate(lines))
    record = RankEvidence(rank=None, outcome=Outcome.NOT_RUN, lines=found)
    return classify(Evidence(origin=Origin.LOG, backend="nccl", world_size=0, ranks=(record,)))


def test_the_table_of_messages_speaks_of_every_class_that_a_log_line_can_name():
    listed = {name for classes, _ in MESSAGES for name in classes}
    by_line = {rule.failure for rule in shipped_rules() if rule.role is RuleRole.CAUSE}
    assert {failure.value for failure in by_line} <= listed


@pytest.mark.parametrize(("classes", "text"), MESSAGES, ids=[f"{c[0]}-{i}" for i, (c, _) in enumerate(MESSAGES)])
def test_one_message_alone_is_named(classes: tuple[str, ...], text: str):
    assert named(text).failure.value in classes


@pytest.mark.parametrize("line", [
    "NCCL INFO NET/Plugin : dlerror=libnccl-net.so: cannot open shared object file: No such file or directory No plugin found",
    "NCCL INFO Could not find real path of /sys/class/net/eth0/device",
    "NCCL INFO NET/OFI Could not find tuner",
    "NCCL INFO NET/IB : No device found.",
    "NCCL INFO Could not enable P2P between dev 0(=1000) and dev 1(=2000)",
    "NCCL INFO NCCL_IB_DISABLE set by environment to 1.",
    "NCCL INFO Failed to open libmlx5.so[.1]",
    "NCCL INFO comm 0x7f0 rank 3 nRanks 8 cudaDev 3 busId 1f - Abort COMPLETE",
])  # fmt: skip
def test_what_nccl_did_without_is_no_cause(line: str):
    assert named(HEAD + line).failure in {F.OK, F.UNKNOWN}


def test_the_same_words_are_a_cause_once_nccl_warns_of_them():
    words = "Could not find real path of /sys/class/pci_bus/0000:0d/../../0000:0d:00.0"
    assert named(f"{HEAD}graph/xml.cc:400 NCCL WARN {words}").failure is F.TOPOLOGY_DETECTION
    assert named(f"{HEAD}NCCL INFO {words}").failure is not F.TOPOLOGY_DETECTION


def test_a_rule_may_say_that_nccl_prints_its_cause_as_information(tmp_path: Path):
    rule = 'failure = "gloo_network"\nrole = "cause"\nsummary = "the oven is off"\npatterns = ["oven is off"]\n'
    line = HEAD + "NCCL INFO the oven is off"
    (tmp_path / "oven.log").write_text("the oven is off\n")
    for extra, claimed in (("", False), ("informs = true\n", True)):
        (tmp_path / "oven.toml").write_text(rule + extra)
        oven = next(rule for rule in load_rules(tmp_path) if rule.id == "oven")
        assert oven.matches(line) is claimed
        assert oven.matches(line.replace("INFO", "WARN"))


def test_an_id_that_could_not_be_fetched_because_the_store_went_away_means_a_peer_that_died():
    head = (
        "[1] is setting up NCCL communicator and retrieving ncclUniqueId from [0] via c10d key-value store by key '0', "
        "but store->get('0') got error: "
    )
    assert named(f"torch.distributed.DistBackendError: {head}Connection reset by peer").failure is F.REMOTE_PEER_DIED
    assert named(f"torch.distributed.DistBackendError: {head}Socket Timeout").failure is F.MISSING_RANK


def test_a_transport_that_finds_different_sizes_means_that_the_ranks_called_differently():
    verdict = named(
        f"{HEAD}transport/net_ib.cc:1300 NCCL WARN NET/IB : req 0/1 tag 3 peer 10.0.0.1<5> collective mismatch error, "
        "local size 1048576 remote size 2097152"
    )
    assert verdict.failure is F.SHAPE_OR_DTYPE_MISMATCH


def test_a_corrected_bus_error_is_no_failure_and_an_uncorrected_one_is():
    head = "pcieport 0000:00:03.0: AER: PCIe Bus Error: severity="
    assert named(f"{head}Corrected, type=Data Link Layer").failure in {F.OK, F.UNKNOWN}
    assert named(f"{head}Uncorrected (Fatal), type=Transaction Layer").failure is F.HARDWARE_XID_ECC


def test_torchs_report_of_a_desync_names_the_ranks_that_did_not_join():
    verdict = named(
        "[rank0]:[E ProcessGroupNCCL.cpp:633] [Rank 0] Watchdog caught collective operation timeout: "
        "WorkNCCL(SeqNum=6, OpType=ALLREDUCE, NumelIn=8, NumelOut=8, Timeout(ms)=10000) ran for 10055 milliseconds",
        "\t - To our best knowledge, the lagging/dead/mismatched ranks that caused the desync are:",
        "\t   - [3, 5] finished collective #5, but didn't join collective #6 (count from 1)",
    )
    assert (verdict.failure, verdict.culprit_ranks) == (F.COLLECTIVE_TIMEOUT_DESYNC, (3, 5))


def test_gloo_says_to_whom_it_could_not_connect():
    text = "Expected number of connected peers is: 3. Rank 1 is NOT connected to: [3]"
    verdict = named(f"RuntimeError: Gloo connectFullMesh failed with Rank 1 is connected to 2 peer ranks. {text}")
    assert (verdict.failure, verdict.culprit_ranks) == (F.GLOO_NETWORK, (3,))
