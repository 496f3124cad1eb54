"""The pages about other frameworks: what they write of this library exists, and their links lead somewhere."""

import ast
import dataclasses
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from fsdp_offload import OffloadPolicy

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = ["megatron_fsdp.md", "megatron_bridge.md", "nemo_rl.md", "xtuner.md"]
OURS = ("fsdp_offload", "checkpoint_tools")

every_page = pytest.mark.parametrize("page", PAGES)


def blocks_of(page: str) -> list[ast.Module]:
    text = (DOCS / page).read_text(encoding="utf-8")
    return [ast.parse(block) for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL)]


def imported(tree: ast.Module) -> Iterator[tuple[str, object]]:
    """Names that a block imports from us, and what they are."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] in OURS:
            module = importlib.import_module(str(node.module))
            yield from ((alias.name, getattr(module, alias.name)) for alias in node.names)


@every_page
def test_imports_exist_and_calls_fit(page: str) -> None:
    blocks = blocks_of(page)
    assert blocks
    calls = 0
    for tree in blocks:
        known = dict(imported(tree))
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in known:
                names = {keyword.arg: None for keyword in node.keywords if keyword.arg is not None}
                inspect.signature(known[node.func.id]).bind(*([None] * len(node.args)), **names)
                calls += 1
    assert calls


@every_page
def test_names_in_the_text_exist(page: str) -> None:
    text = (DOCS / page).read_text(encoding="utf-8")
    fields = {field.name for field in dataclasses.fields(OffloadPolicy)}
    assert set(re.findall(r"OffloadPolicy\((\w+)=", text)) <= fields
    for module, name in re.findall(r"`((?:fsdp_offload|checkpoint_tools)[\w.]*)\.(\w+)", text):
        if not module.startswith("fsdp_offload.examples"):
            assert hasattr(importlib.import_module(module), name), f"{module}.{name}"


@every_page
def test_links_lead_somewhere(page: str) -> None:
    text = (DOCS / page).read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+)(?:#[\w-]+)?\)", text):
        assert (DOCS / target).exists(), target
