"""`run`: run a Ray Train script, unchanged, with the guard on."""

from __future__ import annotations

import argparse
import json
import os
import runpy
import sys
import types
from collections.abc import MutableMapping
from pathlib import Path

from ray_nccl_guard import carried_rules
from ray_nccl_guard.cli.after_import import after_import
from ray_nccl_guard.errors import UsageError
from ray_nccl_guard.policy_file import POLICY_VARIABLE, carry, resolve
from ray_nccl_guard.rulebook import load_rules, packs_from_env

CALLBACKS_VARIABLE = "RAY_TRAIN_CALLBACKS"
CALLBACK = "ray_nccl_guard.ray_train.hook.GuardHook"
# What `ray job submit` hands to its driver; ray.init() merges it into the runtime environment of the job.
JOB_VARIABLE = "RAY_JOB_CONFIG_JSON_ENV_VAR"
OVERRIDE_VARIABLE = "RAY_OVERRIDE_JOB_RUNTIME_ENV"
# Settings of the job. Others (RAY_NCCL_GUARD_COMPAT_RECORD) belong to a node, and rule packs travel by value.
_OF_THE_JOB = (
    "RAY_NCCL_GUARD",
    POLICY_VARIABLE,
    "RAY_NCCL_GUARD_DEADLINE",
    "RAY_NCCL_GUARD_COLLECTIVES",
    carried_rules.VARIABLE,
)
# One string of an environment may have 128 KiB on Linux (MAX_ARG_STRLEN, execve(2)); the rest of the job needs some of it.
_MOST_RULES_BYTES = 96 << 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "exit codes: the script's own; 2 a wrong flag, policy or rule pack, before anything runs."
    parser.add_argument("--policy", metavar="P", help="default, fallback, strict, observe, or a TOML file")
    parser.add_argument(
        "--deadline", metavar="S", help="seconds in which the communicator must form (default 30 + 0.1 per rank)"
    )
    parser.add_argument(
        "--collectives", metavar="NAMES", help="what the job needs: presets (ddp, syncbn, fsdp, tp, pp) or operations"
    )
    parser.add_argument("-m", dest="module", action="store_true", help="SCRIPT is the name of a module, as in `python -m`")
    parser.add_argument("script", help="the script (or module) to run")
    parser.add_argument("args", nargs=argparse.REMAINDER, help="its arguments")


def run(args: argparse.Namespace) -> int:
    """The script's own exit code; 2 if a flag, the policy or a rule pack is wrong, before anything runs."""
    if not args.module and not Path(args.script).is_file():
        raise UsageError(f"There is no script {args.script}.")
    prepare(os.environ, policy=args.policy, deadline=args.deadline, collectives=args.collectives)
    # For Ray without RAY_TRAIN_CALLBACKS (V1; V2 before 2.48). Not earlier: the script may choose V1 or V2 itself.
    after_import("ray.train.torch", _guard_this_process)
    return _execute(args)


def prepare(environ: MutableMapping[str, str], *, policy: str | None, deadline: str | None, collectives: str | None) -> None:
    """Put the guard's settings into `environ` and into the runtime environment of the Ray job that it will start.

    The latter is for trainers inside Ray tasks and Tune trials: workers of a running cluster do not see the driver's
    environment. There, files are not found, so policy and rules go by value.

    Raises:
        UsageError: a setting that cannot be.
    """
    _flags(environ, deadline, collectives)
    try:
        resolved = resolve(policy, environ)
        if resolved.sources:  # somebody said something
            environ[POLICY_VARIABLE] = carry(resolved)
    except ValueError as error:
        raise UsageError(str(error)) from error
    callbacks = [name.strip() for name in environ.get(CALLBACKS_VARIABLE, "").split(",") if name.strip()]
    environ[CALLBACKS_VARIABLE] = ",".join([*callbacks, *([] if CALLBACK in callbacks else [CALLBACK])])
    _carry_rules(environ)
    _add_to_job(environ, {name: environ[name] for name in (CALLBACKS_VARIABLE, *_OF_THE_JOB) if environ.get(name)})


def _flags(environ: MutableMapping[str, str], deadline: str | None, collectives: str | None) -> None:
    from ray_nccl_guard.probe.operations import expand

    try:
        if deadline is not None:
            if not float(deadline) > 0:
                raise ValueError(f"--deadline is a number of seconds above 0, not {deadline}")
            environ["RAY_NCCL_GUARD_DEADLINE"] = deadline
        if collectives is not None:
            expand(collectives.replace(",", " ").split())
            environ["RAY_NCCL_GUARD_COLLECTIVES"] = collectives
    except ValueError as error:
        raise UsageError(str(error)) from error


def _carry_rules(environ: MutableMapping[str, str]) -> None:
    folders = packs_from_env(environ)
    if not folders:
        return
    load_rules(*folders)
    value = carried_rules.pack(folders)
    if len(value) <= _MOST_RULES_BYTES:
        environ[carried_rules.VARIABLE] = value
        return
    print(
        f"ray-nccl-guard run: the rule packs take {len(value) >> 10} KiB, more than an environment can carry: trainers inside "
        "Ray tasks go without them",
        file=sys.stderr,
    )


def _add_to_job(environ: MutableMapping[str, str], variables: dict[str, str]) -> None:
    try:
        job = json.loads(environ.get(JOB_VARIABLE) or "{}")
        runtime_env = job.get("runtime_env") or {}
        given = runtime_env.get("env_vars") or {}
        theirs = [name for name in str(given.get(CALLBACKS_VARIABLE, "")).split(",") if name and name != CALLBACK]
    except (json.JSONDecodeError, AttributeError) as error:
        print(f"ray-nccl-guard run: {JOB_VARIABLE} is not understood and left alone: {error}", file=sys.stderr)
        return
    if theirs:
        mine = [name for name in variables[CALLBACKS_VARIABLE].split(",") if name not in theirs]
        variables = {**variables, CALLBACKS_VARIABLE: ",".join([*theirs, *mine])}
    environ[JOB_VARIABLE] = json.dumps({**job, "runtime_env": {**runtime_env, "env_vars": {**given, **variables}}})
    # A script that gives ray.init() one of these variables itself would be refused as a conflict; so its own value wins.
    environ.setdefault(OVERRIDE_VARIABLE, "1")


def _guard_this_process() -> None:
    from ray_nccl_guard.ray_train import unmodified

    unmodified.install()


def _execute(args: argparse.Namespace) -> int:
    """Run the script as `python SCRIPT ARGS...` would, in this process."""
    package_parent = str(Path(__file__).resolve().parents[2])
    if package_parent not in sys.path:
        sys.path.append(package_parent)  # it may have come from the current folder, which the next line takes away
    sys.argv = [args.script, *args.args]
    sys.path[0] = os.getcwd() if args.module else str(Path(args.script).resolve().parent)
    try:
        if args.module:
            runpy.run_module(args.script, run_name="__main__", alter_sys=True)
        else:
            _run_file(args.script)
    except Exception as error:
        # As the interpreter itself ends a script; the frames of this file say nothing about it.
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        return 1
    return 0


def _run_file(script: str) -> None:
    # runpy.run_path empties the module when the script ends, under the feet of its threads and exit functions.
    main = types.ModuleType("__main__")
    main.__dict__.update(__file__=script, __builtins__=__builtins__)
    sys.modules["__main__"] = main
    code = compile(Path(script).read_bytes(), script, "exec")
    exec(code, main.__dict__)
