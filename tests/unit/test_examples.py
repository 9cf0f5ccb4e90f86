"""The example scripts by their structure: also those whose libraries are not installed use names and arguments that exist."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import ray_nccl_guard
from ray_nccl_guard.probe.drill import parse
from ray_nccl_guard.probe.operations import OPERATIONS, PRESETS
from tests.unit.test_docs import KNOWN_ARGUMENTS

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SCRIPTS = sorted(EXAMPLES.glob("*.py"))
each_script = pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)


def roots(tree: ast.Module) -> set[str]:
    """The top-level packages that a script imports."""
    found = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    found |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module}
    return {name.split(".")[0] for name in found}


def calls(tree: ast.Module, name: str) -> list[ast.Call]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.Call) and getattr(node.func, "id", "") == name]


@each_script
def test_an_example_says_what_it_is_and_runs_as_a_script_only(script):
    tree = ast.parse(script.read_text())
    assert f"examples/{script.name}" in (ast.get_docstring(tree) or ""), "its docstring says how to run it"
    functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert {"train_func", "main"} <= functions
    guard = tree.body[-1]
    assert isinstance(guard, ast.If) and ast.unparse(guard.test) == "__name__ == '__main__'"


@each_script
def test_no_example_hides_a_package_that_any_of_them_imports(script):
    # Ray puts the folder of the driver's script on the workers' path.
    assert script.stem not in set().union(*(roots(ast.parse(other.read_text())) for other in SCRIPTS))


@each_script
def test_what_an_example_takes_of_the_guard_exists(script):
    tree = ast.parse(script.read_text())
    for node in (n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.module == "ray_nccl_guard"):
        assert {alias.name for alias in node.names} <= set(ray_nccl_guard.__all__)
    assert calls(tree, "GuardedTorchConfig")
    for name, known in KNOWN_ARGUMENTS.items():
        for call in calls(tree, name):
            assert {keyword.arg for keyword in call.keywords} <= set(known())
    for call in calls(tree, "GuardedTorchConfig"):
        for keyword in call.keywords:
            if keyword.arg == "collectives":
                assert set(ast.literal_eval(keyword.value)) <= {*OPERATIONS, *PRESETS}


def test_the_drill_of_the_example_is_one():
    tree = ast.parse((EXAMPLES / "drill.py").read_text())
    defaults = [k.value.value for c in ast.walk(tree) if isinstance(c, ast.Call) for k in c.keywords
                if k.arg == "default" and c.args and getattr(c.args[0], "value", "") == "--fault"]  # fmt: skip
    assert defaults and parse(defaults[0])


def test_every_example_stands_in_the_list():
    text = (EXAMPLES / "README.md").read_text()
    missing = [
        path.name
        for path in EXAMPLES.iterdir()
        if path.name not in ("README.md", "__pycache__") and f"({path.name}" not in text
    ]
    assert not missing
