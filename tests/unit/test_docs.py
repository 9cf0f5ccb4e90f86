"""The documentation says nothing that is not there: links, anchors, verbs, flags, public names, variables, and Python that parses."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import ray_nccl_guard
from ray_nccl_guard.classes import FailureClass
from ray_nccl_guard.cli import VERBS
from ray_nccl_guard.policy import Policy
from ray_nccl_guard.probe.operations import OPERATIONS, PRESETS
from ray_nccl_guard.probe.spec import ProbeSpec

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md"), *ROOT.glob("tests/**/*.md")])
LINK = re.compile(r"(?<!!)\[[^\]]+\]\(([^)\s]+)\)|!\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
IDENTIFIERS = r"[A-Za-z_][A-Za-z0-9_]*"

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def prose(page: Path) -> str:
    return FENCE.sub("", page.read_text())


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives a page's headings: lower case, punctuation dropped, spaces to hyphens."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", re.sub(r"[`*]", "", heading)).strip().lower().replace(" ", "-") for heading in headings}


def code(page: Path, *languages: str) -> Iterator[str]:
    for indent, language, text in FENCE.findall(page.read_text()):
        if language in languages:
            yield re.sub(rf"^{indent}", "", text, flags=re.MULTILINE)


def said(page: Path) -> list[str]:
    """What a page gives for typing or as a name: its inline code and its blocks that are commands or output."""
    inline = [text.replace("\n", " ") for text in re.findall(r"`([^`]+)`", prose(page))]
    lines = [line for block in code(page, "", "yaml", "sh", "dockerfile") for line in block.splitlines()]
    return [*inline, *lines]


def flags_of(verb: str) -> set[str]:
    parser = argparse.ArgumentParser()
    importlib.import_module(f"ray_nccl_guard.cli.{verb}").add_arguments(parser)
    return {option for action in parser._actions for option in action.option_strings}


@each_page
def test_every_relative_link_and_anchor_resolves(page):
    for target in (first or second for first, second in LINK.findall(prose(page))):
        if "://" in target or target.startswith("mailto:"):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{page.name} links to {target}, which is not there"
        if anchor and file.suffix == ".md":
            assert anchor in anchors(file), f"{page.name} links to {target}: {file.name} has no such heading"


def test_every_page_of_the_documentation_can_be_reached_from_the_readme():
    reached, open_pages = set(), [ROOT / "README.md"]
    while open_pages:
        page = open_pages.pop()
        if page in reached or page.suffix != ".md":
            continue
        reached.add(page)
        targets = [(first or second).partition("#")[0] for first, second in LINK.findall(prose(page))]
        open_pages += [(page.parent / t).resolve() for t in targets if t and "://" not in t and (page.parent / t).exists()]
    missing = sorted(str(page.relative_to(ROOT)) for page in ROOT.glob("docs/*.md") if page not in reached)
    assert not missing, f"no link leads to {missing}"


@each_page
def test_every_verb_and_flag_of_the_command_line_exists(page):
    for text in said(page):
        for command in re.findall(r"(?:ray-nccl-guard|-m ray_nccl_guard) ([^|;&]*)", text):
            words = command.replace("[", " ").replace("]", " ").split()
            verb = next((word for word in words if not word.startswith("-")), None)
            if verb is None or not re.fullmatch(r"[a-z]+", verb):
                continue
            assert verb in VERBS, f"{page.name}: {text!r} names the verb {verb}, which does not exist"
            known = flags_of(verb)
            # What follows the script of `run` is the script's own.
            ends = (
                next((i for i, word in enumerate(words) if word.endswith(".py")), len(words))
                if verb == "run"
                else len(words)
            )
            for word in words[:ends]:
                flag = word.partition("=")[0].rstrip(".,)'\"")
                if flag.startswith("--") and flag not in ("--help", "--version"):
                    assert flag in known, f"{page.name}: {text!r} uses {flag}, which {verb} does not have"


@each_page
def test_every_public_name_exists(page):
    text = page.read_text()
    known = set(ray_nccl_guard.__all__)
    for names in re.findall(r"from ray_nccl_guard import ([^\n(]+)", text):
        for name in (one.strip() for one in names.split(",")):
            assert name in known, f"{page.name} imports {name}, which is not public"
    for name in re.findall(rf"\bray_nccl_guard\.({IDENTIFIERS})\(", text):
        assert name in known, f"{page.name} calls ray_nccl_guard.{name}, which is not public"
    fields = {
        "Policy": {field.name for field in dataclasses.fields(Policy)} | {"fallback", "strict", "observe", "from_name"},
        "ProbeSpec": {field.name for field in dataclasses.fields(ProbeSpec)},
    }
    for kind, name in re.findall(rf"\b(Policy|ProbeSpec)\.({IDENTIFIERS})", text):
        assert name in fields[kind], f"{page.name} names {kind}.{name}, which does not exist"


def config_arguments() -> set[str]:
    """The arguments of GuardedTorchConfig, read from its source: Ray need not be installed here."""
    tree = ast.parse((ROOT / "ray_nccl_guard/ray_train/config.py").read_text())
    config = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "GuardedTorchConfig")
    own = {node.target.id for node in config.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)}
    return own | {"backend", "init_method", "timeout_s"}  # TorchConfig's


KNOWN_ARGUMENTS = {
    "GuardedTorchConfig": config_arguments,
    "Policy": lambda: {field.name for field in dataclasses.fields(Policy)},
    "ProbeSpec": lambda: {field.name for field in dataclasses.fields(ProbeSpec)},
}


@each_page
def test_python_parses_and_gives_our_names_arguments_that_they_have(page):
    blocks = list(code(page, "python"))
    inline = [
        text
        for text in re.findall(r"`([^`]+)`", prose(page))
        if text.startswith(tuple(KNOWN_ARGUMENTS)) and "..." not in text
    ]
    for text in [*blocks, *(text.replace("\n", " ") for text in inline if text.endswith(")"))]:
        try:
            tree = ast.parse(text.replace(", ...)", ")"))  # what a page leaves out
        except SyntaxError as error:
            raise AssertionError(f"{page.name}: not Python: {error}\n{text}") from error
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            name = call.func.id if isinstance(call.func, ast.Name) else ""
            for keyword in call.keywords if name in KNOWN_ARGUMENTS else ():
                assert keyword.arg in KNOWN_ARGUMENTS[name](), f"{page.name}: {name} has no argument {keyword.arg}"


@each_page
def test_every_variable_of_ours_is_one_that_the_code_reads(page):
    source = "\n".join(file.read_text() for file in ROOT.glob("ray_nccl_guard/**/*.py"))
    for name in set(re.findall(r"\bRAY_NCCL_GUARD\w*", page.read_text())):
        assert f'"{name}"' in source, f"{page.name} names {name}, which nothing reads"


@each_page
def test_collectives_and_classes_have_their_names(page):
    text = page.read_text()
    for names in re.findall(r"collectives=[\[(]([^\])]*)", text):
        for name in re.findall(r'"(\w+)"', names):
            assert name in (*OPERATIONS, *PRESETS), f"{page.name}: {name} is no collective and no preset"
    for name in re.findall(r"classes\.md#(\w+)", text):
        assert name in {failure.value for failure in FailureClass}, f"{page.name}: {name} is no class"
