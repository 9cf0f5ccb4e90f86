"""What the workers of `syncbn.py` measured as rows, sentences and notes. Without torch: a kept answer can be shown again."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks import harness
from benchmarks.syncbn_names import ALONE, BN, SYNCBN, bus_bytes

Answer = Mapping[str, Any]
PARTS = ("compute", "gradients", "statistics")

NOTES = (
    "Step: median over all timed steps of the mean over ranks. Statistics: SyncBatchNorm's all_gather forward and all_reduce "
    "backward, from the call to the result on the stream that computes (waiting for slower ranks included). Gradients: what "
    "the step waits for after the last bucket is ready; busy includes what backward hides. Compute: the rest, the optimizer "
    "and the launch of kernels included. The parts are medians of their own and need not add up to the last digit.",
    f"Lost: the share of the step that one rank alone ({ALONE}, its BatchNorm its own) does not need; a dash where the "
    "difference does not stand out from the spread. Images are synthetic and lie on the device: no input pipeline. "
    "fp32 is torch's default, in which convolutions on a GPU may use TF32; bf16 is autocast.",
    "One collective: seconds from the call until the result is there on the slowest rank; bytes are each rank's result; "
    "GB/s is bus bandwidth as nccl-tests count it. Values are checked before anything is timed.",
)
ON_CPU = (
    "CPU tensors on gloo: torch's SyncBatchNorm refuses them, so the layer here is written out by hand with the same two "
    "collectives, and the arms without synchronisation use the same layer without them. Not a figure for GPU workers."
)


def rows(answers: Sequence[Answer]) -> list[dict[str, Any]]:
    """One table of steps for each number of workers, network and precision, and one of single collectives for each number."""
    return [row for answer in answers for row in (*_steps(answer), *_collectives(answer))]


def _steps(answer: Answer) -> Iterator[dict[str, Any]]:
    cases = answer["cases"]
    for case in cases:
        step_ms = _ms(case, "total_s")
        alike = {other["arm"]: other for other in cases if _key(other) == _key(case)}
        total = harness.summary(step_ms)
        alone = harness.ratio(_ms(alike[ALONE], "total_s"), step_ms) if case["arm"] != ALONE else None
        peer = alike.get(case["arm"].replace("gloo", _peer(answer) or "")) if case["arm"].startswith("gloo") else None
        yield {
            "table": f"{case['model']}, {case['dtype']}, {_workers(answer)}: a step, ms",
            "batch": case["batch"],
            "arm": case["arm"],
            "images/s": answer["world"] * case["batch"] / total["median"] * 1e3,
            **total,
            "compute": statistics.median(
                t - s - g
                for t, s, g in zip(step_ms, _ms(case, "statistics_s"), _ms(case, "gradients_s"), strict=True)
            ),
            "gradients": statistics.median(_ms(case, "gradients_s")),
            "gradients busy": statistics.median(_ms(case, "gradients_busy_s")),
            "statistics": statistics.median(_ms(case, "statistics_s")),
            "last loss": round(case["losses"][-1], 4),
            "lost %": None if alone is None else 100 * (1 - alone),
            **({f"x {_peer(answer)}": harness.ratio(step_ms, _ms(peer, "total_s"))} if peer else {}),
        }  # fmt: skip


def _collectives(answer: Answer) -> Iterator[dict[str, Any]]:
    world = answer["world"]
    for operation, size in dict.fromkeys((one["operation"], one["bytes"]) for one in answer["sweep"]):
        alike = {
            one["backend"]: one["seconds"]
            for one in answer["sweep"]
            if (one["operation"], one["bytes"]) == (operation, size)
        }
        row: dict[str, Any] = {
            "table": f"one collective, {_workers(answer)}", "operation": operation, "bytes": size,
        }  # fmt: skip
        for backend, seconds in alike.items():
            found = harness.summary(seconds)
            row[f"{backend} ms"] = found["median"] * 1e3
            row[f"{backend} spread"] = found["spread"] * 1e3
            if world > 1:
                row[f"{backend} GB/s"] = bus_bytes(operation, size, world) / found["median"] / 1e9
        peer = _peer(answer)
        if peer and "gloo" in alike:
            row[f"gloo x {peer}"] = harness.ratio(alike["gloo"], alike[peer])
        yield row


def found(answers: Sequence[Answer]) -> list[str]:
    """The sentences: what SyncBatchNorm costs on each backend, and gloo against NCCL."""
    sentences = []
    for answer in (one for one in answers if one["world"] > 1):  # one rank has nobody to exchange with
        for key in dict.fromkeys(_key(case) for case in answer["cases"]):
            arms = {case["arm"]: case for case in answer["cases"] if _key(case) == key}
            name = f"{_workers(answer)}, {key[0]}, batch {key[2]}, {key[1]}"
            for backend in answer["backends"]:
                told = harness.times(_against(arms, f"{backend}, {SYNCBN}", f"{backend}, {BN}"))
                sentences.append(f"{name}: a step with SyncBatchNorm by one without, on {backend}: {told}.")
            peer = _peer(answer)
            if peer and "gloo" in answer["backends"]:
                told = harness.times(_against(arms, f"gloo, {SYNCBN}", f"{peer}, {SYNCBN}"))
                sentences.append(f"{name}: a step with SyncBatchNorm on gloo by one on {peer}: {told}.")
    return sentences


def notes(answers: Sequence[Answer]) -> list[str]:
    """How it was measured, what the guard decided, and what was not run."""
    said = list(NOTES)
    if any(answer["device"] == "cpu" for answer in answers):
        said.append(ON_CPU)
    for answer in answers:
        name = f"{_workers(answer)} on {answer['hosts']} host{'s' if answer['hosts'] > 1 else ''}, {answer['device']}"
        guard = answer["guard"]
        if guard is None:
            said.append(f"{name}: not guarded.")
        else:
            relief = "".join(f", with {key}={value}" for key, value in guard["relief"].items())
            said.append(f"{name}: the guard's verdict {guard['failure']}, {guard['action']} on {guard['backend']}{relief}.")
        missing = [backend for backend in answer["asked"] if backend not in answer["backends"]]
        if missing:
            said.append(f"{name}: {', '.join(missing)} not measured: the guard did not choose it.")
        said += [f"{name}, not run: {text}" for text in answer["not_run"]]
    return [line for note in said for line in (note, "")][:-1]


def title(answers: Sequence[Answer]) -> str:
    what = "NCCL against gloo in training with SyncBatchNorm"
    if any(answer["device"] == "cpu" for answer in answers):
        what = "SyncBatchNorm written out, gloo on CPU workers (no GPU, no NCCL)"
    return f"{harness.NOT_A_MEASUREMENT}: {what}" if is_fake(answers) else what


def is_fake(answers: Sequence[Answer]) -> bool:
    return any(answer["fake"] for answer in answers)


def _peer(answer: Answer) -> str | None:
    """The backend that gloo is compared with."""
    return next((backend for backend in answer["backends"] if backend != "gloo"), None)


def _against(arms: Mapping[str, Answer], one: str, other: str) -> float | None:
    return harness.ratio(_ms(arms[one], "total_s"), _ms(arms[other], "total_s"))


def _ms(case: Answer, part: str) -> list[float]:
    return [step[part] * 1e3 for step in case["steps"]]


def _key(case: Answer) -> tuple[str, str, int]:
    return case["model"], case["dtype"], case["batch"]


def _workers(answer: Answer) -> str:
    return f"{answer['world']} worker{'s' if answer['world'] > 1 else ''}"
