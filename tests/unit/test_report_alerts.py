"""The example alerts ask for metrics, tags and values that the guard really sets."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("yaml", reason="pyyaml is not installed")

import yaml

from ray_nccl_guard.classes import FailureClass
from ray_nccl_guard.policy import Action

ROOT = Path(__file__).resolve().parents[2]
RULES = [
    rule
    for group in yaml.safe_load((ROOT / "examples" / "alerts" / "prometheus.yml").read_text())["groups"]
    for rule in group["rules"]
]
SOURCE = (ROOT / "ray_nccl_guard" / "ray_train" / "metrics.py").read_text()


def tags_by_metric() -> dict[str, set[str]]:
    """Read off the source, since importing it takes Ray: each Gauge(NAME, description, tags) and Counter(...)."""
    names: dict[str, str] = {}
    found: dict[str, set[str]] = {}
    for node in ast.walk(ast.parse(SOURCE)):
        if isinstance(node, ast.Assign):
            targets = node.targets[0].elts if isinstance(node.targets[0], ast.Tuple) else [node.targets[0]]
            values = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
            names |= {t.id: v.value for t, v in zip(targets, values, strict=False)
                      if isinstance(t, ast.Name) and isinstance(v, ast.Constant)}  # fmt: skip
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("Gauge", "Counter"):
            metric, _, tags = node.args
            name = f"ray_{names[metric.id]}" + ("_total" if node.func.id == "Counter" else "")
            found[name] = {names[t.id] if isinstance(t, ast.Name) else t.value for t in tags.elts}
    return found


METRICS = tags_by_metric()


def test_the_metrics_were_found_in_the_source():
    assert {"ray_nccl_guard_backend", "ray_nccl_guard_action", "ray_nccl_guard_fallbacks_total"} <= set(METRICS)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_an_alert_asks_for_metrics_and_tags_that_exist(rule):
    expression = rule["expr"]
    metrics = re.findall(r"ray_nccl_guard_\w+", expression)
    assert metrics and set(metrics) <= set(METRICS)
    tags = set().union(*(METRICS[name] for name in metrics))
    asked = set(re.findall(r"(\w+)(?:=~|!=|=)\"", expression))
    by = {tag.strip() for group in re.findall(r"by \(([^)]*)\)", expression) for tag in group.split(",")}
    shown = set(re.findall(r"\$labels\.(\w+)", str(rule["annotations"])))
    assert asked <= tags and by <= tags and shown <= by, "a label that is aggregated away would stay empty"
    assert expression.count("(") == expression.count(")") and rule["labels"]["severity"] in ("page", "ticket")


@pytest.mark.parametrize("tag, values", [("action", {a.value for a in Action}),
                                         ("failure", {f.value for f in FailureClass} | {"guard_error"})])  # fmt: skip
def test_the_values_that_alerts_compare_with_exist(tag, values):
    asked = {value for rule in RULES for value in re.findall(rf'{tag}="([^"]*)"', rule["expr"])}
    assert asked and asked <= values


def test_a_run_on_gloo_and_a_refused_one_have_their_alerts():
    expressions = " ".join(rule["expr"] for rule in RULES)
    assert 'backend="gloo"' in expressions and 'action="refuse"' in expressions


def test_prometheus_own_tool_raises_each_of_them_on_the_series_that_the_guard_sets():
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (Debian: prometheus)")
    done = subprocess.run(
        [promtool, "test", "rules", str(ROOT / "tests" / "unit" / "data" / "alerts_promtool.yml")],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
