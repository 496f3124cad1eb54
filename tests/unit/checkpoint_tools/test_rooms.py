"""Imports of the tools go one way, and what is used in memory needs no package of the command line."""

import graphlib
from pathlib import Path

import checkpoint_tools
from tests.unit.test_import_direction import import_in_fresh_process, imported_modules

FOLDER = Path(checkpoint_tools.__file__).parent

# Room → the rooms it may import from, lowest room first; as in tests/unit/test_import_direction.py. "" is the package
# itself.
MAY_IMPORT: dict[str, set[str]] = {
    "core": set(),
    "stored": {"core"},
    "fuse": {"core", "stored"},
    "look": {"core", "stored", "fuse"},
    "integrity": {"core", "stored", "look"},
    "rewrite": {"core", "stored", "fuse", "look", "integrity"},
    "convert": {"core", "stored", "fuse", "look", "integrity", "rewrite"},
    "": {"core", "stored", "fuse", "look", "integrity"},
    "cli": {"core", "stored", "fuse", "look", "integrity", "rewrite", "convert"},
    "__main__": {"core", "cli"},
}


def module_files() -> dict[str, Path]:
    """Dotted module name → file."""
    parts = {file: file.relative_to(FOLDER.parent).with_suffix("").parts for file in sorted(FOLDER.rglob("*.py"))}
    return {".".join(p[:-1] if p[-1] == "__init__" else p): file for file, p in parts.items()}


def import_graph() -> dict[str, set[str]]:
    """Module → those of the package that it imports."""
    files = module_files()
    return {
        module: imported_modules(
            file.read_text(encoding="utf-8"), module, set(files), is_folder=file.name == "__init__.py"
        )
        for module, file in files.items()
    }


def room_of(module: str) -> str:
    """``checkpoint_tools.core.text`` → ``core``."""
    return module.removeprefix("checkpoint_tools").removeprefix(".").partition(".")[0]


def test_rooms_import_only_what_the_table_allows() -> None:
    assert {room_of(module) for module in module_files()} == MAY_IMPORT.keys()
    wrong = [
        f"{module} imports {target}"
        for module, targets in import_graph().items()
        for target in targets
        if room_of(target) not in {room_of(module), *MAY_IMPORT[room_of(module)]}
    ]
    assert not wrong


def test_the_table_points_downwards_only() -> None:
    lower: set[str] = set()
    for room, allowed in MAY_IMPORT.items():
        assert allowed <= lower, f"{room} may import {sorted(allowed - lower)}, whose lines do not come before it"
        lower.add(room)


def test_modules_form_no_cycle() -> None:
    tuple(graphlib.TopologicalSorter(import_graph()).static_order())  # CycleError names the modules


def test_what_is_used_in_memory_needs_no_other_package() -> None:
    seen = import_in_fresh_process("checkpoint_tools")
    assert {"typer", "rich", "safetensors", "fsspec"} & set(seen["modules"]) == set()
