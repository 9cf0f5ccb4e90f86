"""The answer of `compat`: every target judged, as a value, as the JSON contract, and as the text a person reads."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ray_nccl_guard.compat.arch import Fit
from ray_nccl_guard.compat.driver import CudaVersion, dotted, minimum_driver, parse_cuda
from ray_nccl_guard.compat.fatbin import Images
from ray_nccl_guard.compat.gpus import GpusHere
from ray_nccl_guard.compat.locate import LibraryFile
from ray_nccl_guard.compat.rule import Exit, Judgement, holdings, judge
from ray_nccl_guard.compat.targets import Target

_COLUMNS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One target: what becomes of NCCL there, and of torch (None where torch was not looked at)."""

    target: Target
    nccl: Judgement
    torch: Judgement | None

    @property
    def exit(self) -> Exit:
        exits = [self.nccl.exit, *([self.torch.exit] if self.torch else [])]
        return max(exits, key=lambda e: e.value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """All targets judged.

    Attributes:
        library: the libnccl file. images: what it holds. fingerprint: see `fingerprint`.
        torch: what libtorch_cuda.so holds, None where it was not looked at.
        here: what NVML said, None where it was not asked.
        driver_cuda: the CUDA version PTX was judged by, None if not known.
        kernel_driver: version of the driver loaded here, None if there is none.
    """

    library: LibraryFile
    images: Images
    fingerprint: str
    torch: Images | None
    lines: tuple[Line, ...]
    here: GpusHere | None
    driver_cuda: CudaVersion | None
    kernel_driver: str | None

    @property
    def exit(self) -> Exit:
        return max((line.exit for line in self.lines), key=lambda e: e.value, default=Exit.FAILS)

    def to_json(self) -> dict[str, Any]:
        """The contract of `compat --json` (keys are added, never renamed)."""
        images = self.images
        build = parse_cuda(images.cuda_build)
        return {
            "libnccl": self.library.path,
            "nccl_version": images.nccl_version or "unknown",
            "cuda_build": images.cuda_build or "unknown",
            "sass": [arch.sm for arch in images.sass],
            "ptx": [arch.compute for arch in images.ptx],
            "targets": [_line_json(line) for line in self.lines],
            "exit": self.exit.value,
            "found_by": self.library.via.value,
            "machine": images.machine,
            "fingerprint": self.fingerprint,
            "extra_sass": [arch.sm for arch in images.extra_sass],
            "extra_ptx": [arch.compute for arch in images.extra_ptx],
            "ptx_isa": {arch.compute: dotted(isa) for arch, isa in sorted(images.ptx_isa.items())},
            "minimum_driver": minimum_driver(build) if build else None,
            "driver": (self.here.driver if self.here else None) or self.kernel_driver,
            "driver_cuda": dotted(self.driver_cuda) if self.driver_cuda else None,
            "torch": {"libtorch_cuda": self.torch.path, "sass": [a.sm for a in self.torch.sass],
                      "ptx": [a.compute for a in self.torch.ptx]} if self.torch else None,
            "gpus": [{"uuid": gpu.uuid, "name": gpu.name, "capability": dotted(gpu.capability),
                      "mig_uuids": list(gpu.mig_uuids)} for gpu in (self.here.gpus if self.here else ())],
            "error": None,
        }  # fmt: skip


def _line_json(line: Line) -> dict[str, Any]:
    judgement, hazard = line.nccl, line.nccl.hazard
    return {
        "target": line.target.sm,
        "verdict": judgement.verdict.value,
        "hazard": hazard.effect.value if hazard else None,
        "name": line.target.name,
        "uuid": line.target.uuid,
        "image": judgement.image_name,
        "why": judgement.why,
        "fix": judgement.fix,
        "hazard_detail": {
            "id": hazard.id, "mechanism": hazard.mechanism, "source": hazard.source, "known": hazard.known.value,
            "min_bytes": hazard.min_bytes,
        } if hazard else None,
        "torch_verdict": line.torch.verdict.value if line.torch else None,
        "exit": line.exit.value,
    }  # fmt: skip


def failed(path: str, reason: str) -> dict[str, Any]:
    """The JSON where no library could be judged: the contract's keys, empty, with exit 20 and the reason."""
    return {"libnccl": path, "nccl_version": "unknown", "cuda_build": "unknown", "sass": [], "ptx": [], "targets": [],
            "exit": Exit.FAILS.value, "error": reason, "gpus": [], "fingerprint": ""}  # fmt: skip


def judge_all(
    images: Images,
    torch: Images | None,
    targets: Sequence[Target],
    *,
    driver_cuda: CudaVersion | None,
    env: Mapping[str, str],
) -> tuple[Line, ...]:
    """Judge every target, once per GPU."""
    return tuple(
        Line(
            target=target,
            nccl=judge(images, target.capability, driver_cuda, env),
            torch=judge(torch, target.capability, driver_cuda, env) if torch else None,
        )
        for target in targets
    )


def text(answer: Answer) -> str:
    """The answer for a person: one sentence a target, then the file, what it holds, the driver, and the fixes."""
    images = answer.images
    lines, counts = _alike(answer.lines)
    out = [_headline(line, answer) + (f" ({n} GPUs)" if n > 1 else "") for line, n in zip(lines, counts, strict=True)]
    out += ["", f"  library    {answer.library.path}", f"             found by {answer.library.via.value}"]
    out += [
        f"  NCCL       {images.nccl_version or 'does not say its version'}, built with CUDA {images.cuda_build or 'unknown'}"
    ]
    out += [f"  holds      {holdings(images)}{_isa(images)}"]
    if images.extra_sass or images.extra_ptx:
        extra = [*(a.sm for a in images.extra_sass), *(a.compute for a in images.extra_ptx)]
        out += [f"             and in some kernels only: {' '.join(extra)}"]
    if answer.torch:
        out += [f"  torch      {holdings(answer.torch)} in libtorch_cuda.so"]
    out += [f"  driver     {_driver(answer)}"]
    for line in lines:
        out += _details(line)
    return "\n".join(_wrapped(line) for line in out)


def _alike(lines: Sequence[Line]) -> tuple[list[Line], list[int]]:
    """One line for all GPUs of a kind, with their number: eight equal GPUs are told once."""
    kinds: dict[tuple[str, str], list[Line]] = {}
    for line in lines:
        kinds.setdefault((line.target.sm, line.target.name), []).append(line)
    return [group[0] for group in kinds.values()], [len(group) for group in kinds.values()]


def _wrapped(line: str) -> str:
    """Prose within the columns of a terminal, under its label; headlines and commands stay whole, to grep and to copy."""
    if len(line) <= _COLUMNS or not line.startswith("  ") or "/" in line:
        return line
    return "\n".join(
        textwrap.wrap(line, _COLUMNS, subsequent_indent=" " * 13, break_long_words=False, break_on_hyphens=False)
    )


def _headline(line: Line, answer: Answer) -> str:
    name = f"{line.target.sm}{f' ({line.target.name})' if line.target.name else ''}"
    nccl = f"NCCL {answer.images.nccl_version or '(unknown version)'}"
    judgement, hazard = line.nccl, line.nccl.hazard
    if judgement.verdict is Fit.NONE:
        return f"error[{judgement.failure.value}]: {nccl} has no code for {name}; it cannot run there"
    if hazard and hazard.effect.fatal:
        end = "do not train with it" if hazard.min_bytes else "it cannot start there"
        return f"error[{judgement.failure.value}]: {nccl} is known to fail on {name} ({hazard.effect.value}); {end}"
    if line.torch and line.torch.verdict is Fit.NONE:
        return f"error[{line.torch.failure.value}]: {nccl} runs on {name}, but torch has no code for it; training cannot run"
    if hazard:
        return f"warning[{hazard.effect.value}]: {nccl} runs on {name}, with a known hazard: {hazard.mechanism}"
    if judgement.verdict is Fit.PTX_JIT_ONLY:
        return f"warning[ptx_jit_only]: {nccl} has no compiled code for {name}; its first use waits for a compilation"
    return f"ok: {nccl} runs on {name}: {judgement.verdict.value} by {judgement.image_name}"


def _details(line: Line) -> list[str]:
    judgement, hazard = line.nccl, line.nccl.hazard
    out = [f"  {line.target.sm:<10} {judgement.verdict.value}: {judgement.why}"]
    if line.torch:
        out += [f"             torch {line.torch.verdict.value}: {line.torch.why}"]
    if hazard:
        size = f" from {hazard.min_bytes} bytes on" if hazard.min_bytes else ""
        out += [f"  hazard     {hazard.effect.value}{size}: {hazard.mechanism}",
                f"             {hazard.source}", f"             {hazard.known.value}"]  # fmt: skip
    fixes = [judgement.fix, line.torch.fix if line.torch and line.torch.exit is Exit.FAILS else ""]
    return out + [f"help: {fix}" for fix in fixes if fix]


def _isa(images: Images) -> str:
    isas = sorted({images.ptx_isa[arch] for arch in images.ptx})
    return f" (PTX ISA {', '.join(map(dotted, isas))})" if isas else ""


def _driver(answer: Answer) -> str:
    build = parse_cuda(answer.images.cuda_build)
    floor = minimum_driver(build) if build else None
    needs = f"; compiled code built with CUDA {dotted(build)} takes {floor} or newer" if build and floor else ""
    here = answer.here
    if here and here.driver:
        return f"{here.driver}, CUDA {dotted(here.driver_cuda) if here.driver_cuda else 'unknown'}{needs}"
    if answer.driver_cuda:
        return f"assumed to report CUDA {dotted(answer.driver_cuda)}{needs}"
    seen = f"{answer.kernel_driver} is loaded here, but the targets were named" if answer.kernel_driver else "none seen here"
    return f"{seen}; PTX was not held against a driver{needs}"
