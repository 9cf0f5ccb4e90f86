"""One direction of imports: torch only where a process may die for it, ray only in one room, nothing heavy at import."""

from __future__ import annotations

import ast
import subprocess
import sys
import time
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "ray_nccl_guard"
FILES = sorted(PACKAGE.rglob("*.py"))

TORCH_MAY = {
    "probe/act.py",
    "probe/child.py",
    "probe/collectives.py",
    "probe/store.py",
    "probe/serve.py",
    "probe/local.py",
    "eager.py",
}
TORCH_MAY |= {"cli/probe_session.py"}  # inside functions: it forks the ranks
# What the guard's own path must never pay for: tables, templates and plots belong to the command line and the benchmarks.
HEAVY = {"rich", "jinja2", "matplotlib", "yaml", "numpy", "pandas"}

# The flow of the design: a stage imports only earlier ones. Files of one row may know each other.
FLOW = [
    {"errors", "_version", "classes", "current"},
    {"compat"},
    {"facts", "gpu_facts", "differences", "nccl_conf"},
    {"network"},
    {"probe"},
    {"evidence"},
    {"rulebook", "carried_rules", "diagnosis", "logs", "verdict", "locate"},
    {"policy", "policy_file", "rung", "ladder"},
    {"flight"},
    {"report", "guard", "eager", "headline", "render", "saved", "last_good", "html", "price", "excerpts", "attempt"},
    {"prove"},
    {"ray_train"},
    {"cli", "arguments", "__main__", "__init__"},
]
ROW = {name: number for number, names in enumerate(FLOW) for name in names}


def imports(path: Path) -> set[str]:
    """Every module that a file imports, also inside functions (but not for type checkers only)."""
    tree = ast.parse(path.read_text())
    skipped = {
        id(node)
        for branch in ast.walk(tree)
        if isinstance(branch, ast.If) and "TYPE_CHECKING" in ast.dump(branch.test)
        for node in ast.walk(branch)
    }
    found = set()
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


def top_level_imports(path: Path) -> set[str]:
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            found.update(alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.split(".")[0])
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_a_file_imports_only_what_its_room_may(path):
    relative = str(path.relative_to(PACKAGE))
    roots = {name.split(".")[0] for name in imports(path)}
    if relative not in TORCH_MAY:
        assert "torch" not in roots or relative.startswith("ray_train/"), f"{relative} imports torch"
    if not relative.startswith(("ray_train/", "cli/")):
        assert "ray" not in roots, f"{relative} imports ray"
    if relative.startswith("cli/"):
        assert not {"ray", "torch"} & top_level_imports(path), f"{relative} imports ray or torch at its top"
    assert not HEAVY & top_level_imports(path), f"{relative} imports something heavy at its top"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_a_stage_imports_only_earlier_stages(path):
    own = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    assert own in ROW, f"{own} has no place in the flow: add it to FLOW"
    for name in imports(path):
        parts = name.split(".")
        if parts[0] == "ray_nccl_guard" and len(parts) > 1 and parts[1] in ROW and own != "__init__":
            assert ROW[parts[1]] <= ROW[own], f"{path.name} ({own}) imports {name}, a later stage"


def test_importing_the_package_loads_neither_torch_nor_ray_and_takes_no_time():
    program = (
        "import sys, time; start = time.process_time(); import ray_nccl_guard; taken = time.process_time() - start\n"
        "assert 'torch' not in sys.modules and 'ray' not in sys.modules\n"
        "from ray_nccl_guard import Policy, ProbeSpec, FailureClass, current_report\n"
        "assert 'torch' not in sys.modules and 'ray' not in sys.modules\n"
        "print(taken)"
    )
    times = []
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, cwd=PACKAGE.parent, check=False
        )
        assert done.returncode == 0, done.stderr
        times.append(float(done.stdout))
        if min(times) < 0.05:
            break
        time.sleep(1)
    assert min(times) < 0.05, f"import takes {min(times):.3f} s"


def test_every_public_name_can_be_had():
    import ray_nccl_guard

    pytest.importorskip("ray", reason="ray is not installed")
    pytest.importorskip("torch", reason="torch is not installed")
    for name in ray_nccl_guard.__all__:
        assert getattr(ray_nccl_guard, name) is not None
    with pytest.raises(AttributeError):
        ray_nccl_guard.nothing_of_that_name  # noqa: B018


def test_a_worker_of_a_healthy_job_loads_the_config_and_the_probe_and_nothing_that_judges():
    """Every worker pays for what the config it gets, and the functions it runs, import: memory that its training lacks."""
    program = (
        "import sys; from ray_nccl_guard import GuardedTorchConfig\n"
        "import ray_nccl_guard.ray_train.on_worker, ray_nccl_guard.probe.launch, ray_nccl_guard.eager\n"
        "print(*sorted(name for name in sys.modules if name.startswith('ray_nccl_guard.')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, cwd=PACKAGE.parent, check=False
    )
    assert done.returncode == 0, done.stderr
    loaded = {name.removeprefix("ray_nccl_guard.").split(".")[0] for name in done.stdout.split()}
    judging = {name for row in FLOW[FLOW.index({"evidence"}) :] for name in row}
    judging -= {"ray_train", "policy", "eager", "__init__"}  # what the config holds, and what forms the training group
    assert {"probe", "policy", "facts"} <= loaded and not loaded & judging, loaded & judging
