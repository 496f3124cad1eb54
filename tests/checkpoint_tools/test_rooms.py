"""Imports of the tools go one way, and what is used in memory needs no package of the command line."""

import graphlib
from pathlib import Path

import checkpoint_tools
from tests.test_import_direction import import_in_fresh_process, imported_modules

FOLDER = Path(checkpoint_tools.__file__).parent

EXCHANGE = ["fusions", "owners", "param_groups", "roles", "draft", "splitting", "merging", "exchange"]
"""The rooms of an exchange: each may import those before it, except that the two ways do not know each other."""


def import_graph() -> dict[str, set[str]]:
    """Module → those of the package that it imports."""
    files = {f"checkpoint_tools.{file.stem}": file for file in FOLDER.glob("*.py") if file.stem != "__init__"}
    return {
        module: imported_modules(file.read_text(encoding="utf-8"), module, set(files)) for module, file in files.items()
    }


def test_modules_form_no_cycle() -> None:
    tuple(graphlib.TopologicalSorter(import_graph()).static_order())  # CycleError names the modules


def test_the_rooms_of_an_exchange_are_in_one_order() -> None:
    graph = import_graph()
    for number, room in enumerate(EXCHANGE):
        later = {f"checkpoint_tools.{other}" for other in EXCHANGE[number:]}
        assert graph[f"checkpoint_tools.{room}"] & later == set()
    assert "checkpoint_tools.splitting" not in graph["checkpoint_tools.merging"]


def test_only_the_exchange_knows_how_it_is_found() -> None:
    """And renaming, which drafts an exchange of names alone."""
    inside = {f"checkpoint_tools.{room}" for room in ("roles", "draft", "splitting", "merging")}
    outside = {module for module, found in import_graph().items() if found & inside} - inside
    assert outside == {"checkpoint_tools.exchange", "checkpoint_tools.renaming"}


def test_what_is_used_in_memory_needs_no_other_package() -> None:
    seen = import_in_fresh_process("checkpoint_tools")
    assert {"typer", "rich", "safetensors", "fsspec"} & set(seen["modules"]) == set()
