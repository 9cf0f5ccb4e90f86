"""`ray-nccl-guard compat`: can this libnccl run on these GPUs? For an image build, an init container, or a node."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Sequence

from ray_nccl_guard.compat import answer as answers
from ray_nccl_guard.compat import record
from ray_nccl_guard.compat.driver import CudaVersion, parse_cuda
from ray_nccl_guard.compat.elf import MACHINES
from ray_nccl_guard.compat.errors import CompatError, LibraryUnreadable
from ray_nccl_guard.compat.fatbin import Images, scan
from ray_nccl_guard.compat.fingerprint import fingerprint
from ray_nccl_guard.compat.gpus import DEADLINE_S, GpusHere, gpus_here, kernel_driver, visible
from ray_nccl_guard.compat.locate import LibraryFile, Via, find_libnccl, find_libtorch_cuda, torch_directory
from ray_nccl_guard.compat.rule import Exit
from ray_nccl_guard.compat.targets import Target, parse
from ray_nccl_guard.errors import UsageError

_EPILOG = """exit codes: 0 native or binary compatible; 10 the driver must compile PTX, or a hazard that need not strike;
20 no code for a GPU, a hazard known to fault or to be refused at init, or not to be shown compatible; 2 wrong usage.
Without --target the GPUs present are asked for through NVML, without a CUDA context."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's options."""
    parser.epilog = _EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--libnccl", metavar="PATH", help="the library to judge (default: the one torch would load)")
    parser.add_argument(
        "--target", action="append", default=[], metavar="GPU", help="sm_120, 12.0 or a name (may be given more than once)"
    )
    parser.add_argument("--driver-cuda", metavar="X.Y", help="CUDA version of the driver that will run it, for --target")
    parser.add_argument("--machine", choices=sorted(MACHINES.values()), help="processor of the nodes (default: this one's)")
    parser.add_argument("--record", metavar="FILE", help="store GPU UUIDs and verdict there, for the main container")
    parser.add_argument(
        "--nvml-timeout", type=_seconds, default=DEADLINE_S, metavar="SECONDS", help=f"default {DEADLINE_S:g}"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Judge and print; return the exit code."""
    targets = [parse(text) for text in args.target]
    driver_cuda = _driver_cuda(args.driver_cuda, targets)
    library: LibraryFile | None = None
    try:
        library = LibraryFile(path=os.path.realpath(args.libnccl), via=Via.GIVEN) if args.libnccl else _found()
        images = _read(library, given=args.libnccl, machine=args.machine or platform.machine())
        here = None if targets else gpus_here(args.nvml_timeout)
        answer = _answer(args, library, images, targets, here, driver_cuda)
    except CompatError as error:
        return _refuse(args, library.path if library else "", error)
    result = answer.to_json()
    if args.record:
        record.write(args.record, result)
    print(json.dumps(result, indent=1) if args.json else answers.text(answer))
    return answer.exit.value


def _answer(
    args: argparse.Namespace,
    library: LibraryFile,
    images: Images,
    targets: Sequence[Target],
    here: GpusHere | None,
    driver_cuda: CudaVersion | None,
) -> answers.Answer:
    if here:
        targets, driver_cuda = _present(here), here.driver_cuda
    # A library that was named need not be the one torch loads, so torch is none of its business.
    torch = None if args.libnccl else find_libtorch_cuda()
    torch_images = scan(torch.path) if torch else None
    return answers.Answer(
        library=library,
        images=images,
        fingerprint=fingerprint(library.path),
        torch=torch_images,
        lines=answers.judge_all(images, torch_images, targets, driver_cuda=driver_cuda, env=os.environ),
        here=here,
        driver_cuda=driver_cuda,
        kernel_driver=kernel_driver(),
    )


def _found() -> LibraryFile:
    library = find_libnccl()
    if library is None:
        torch = torch_directory()
        if torch and find_libtorch_cuda() is None:
            why = f"the torch in {torch} is built without CUDA"
        else:
            why = "libtorch_cuda.so needs it and the loader would not find it" if torch else "there is no torch here either"
        raise CompatError(f"no libnccl would be loaded: {why}", help=("to judge another file, name it: --libnccl PATH",))
    return library


def _read(library: LibraryFile, *, given: str | None, machine: str) -> Images:
    try:
        images = scan(library.path)
    except LibraryUnreadable as error:
        if given:
            raise UsageError(str(error)) from error
        raise
    if images.machine != machine and machine in MACHINES.values():
        raise CompatError(
            f"{library.path} is built for {images.machine} and cannot be loaded on {machine}",
            help=(f"if the nodes are {images.machine}, add --machine {images.machine}",),
        )
    return images


def _present(here: GpusHere) -> list[Target]:
    """The GPUs here as targets; raises where there is none to judge, since that is no pass."""
    ask = ("without a GPU, as in an image build, name what it is for: --target sm_90",)
    if here.not_run:
        raise CompatError(f"the GPUs here could not be asked for: {here.not_run}", help=ask)
    if not here.gpus:
        raise CompatError("NVML lists no GPU here (a driver also hides a GPU that is too new for it)", help=ask)
    gpus = visible(here.gpus, os.environ)
    if not gpus:
        raise CompatError(
            f"CUDA_VISIBLE_DEVICES={os.environ['CUDA_VISIBLE_DEVICES']!r} leaves none of {len(here.gpus)} GPUs"
        )
    return [Target(capability=gpu.capability, name=gpu.name, uuid=gpu.uuid) for gpu in gpus]


def _refuse(args: argparse.Namespace, path: str, error: CompatError) -> int:
    result = answers.failed(path, str(error))
    if args.record:
        record.write(args.record, result)
    if args.json:
        print(json.dumps(result, indent=1))
    else:
        print(f"error: {error}; it cannot be shown compatible", file=sys.stderr)
        for line in error.help:
            print(f"help: {line}", file=sys.stderr)
    return Exit.FAILS.value


def _driver_cuda(text: str | None, targets: Sequence[Target]) -> CudaVersion | None:
    if text is None:
        return None
    if not targets:
        raise UsageError("--driver-cuda goes with --target; the driver of GPUs that are present is asked for")
    version = parse_cuda(text)
    if version is None:
        raise UsageError(f"--driver-cuda takes a version such as 12.4, not {text!r}")
    return version


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value <= 600:
        raise argparse.ArgumentTypeError("give a number of seconds above 0 and up to 600")
    return value
