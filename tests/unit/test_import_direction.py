"""The rooms of both packages import downwards only, keep torch's private names in one place, are cheap to import.

The imports are read from the source, not executed. Those inside functions and under ``if TYPE_CHECKING:`` count like
all others: a room that needs another one's types knows that room, and leaving them out would hide cycles. Modules that
are imported by a computed name (``importlib.import_module(name)``) are not seen.
"""

import ast
import graphlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import resolve_name
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "fsdp_offload"

# Room → the rooms it may import from, lowest room first: a line may name only rooms whose lines come before it. A room
# is a folder of the package, whose files may import each other, or a module beside the folders. The package itself and
# its command have no lines: they import what they like, and only their users import them.
MAY_IMPORT: dict[str, set[str]] = {
    "lazy": set(),
    "policy": set(),
    "fsdp": set(),
    "device": set(),
    "core": {"policy", "fsdp", "device"},  # no optimizer and no state: bytes, their homes and places, and who waits
    "state": {"policy", "fsdp"},
    "optimizers": {"policy", "fsdp", "state"},
    "cpu_update": {"policy", "fsdp", "device", "state", "optimizers"},
    "model": {"policy", "fsdp", "device"},
    "engine": {"policy", "fsdp", "device", "core", "state", "optimizers", "cpu_update"},
    "api": {"policy", "fsdp", "device", "state", "optimizers", "cpu_update", "model", "core", "engine"},
    "checkpoint": {"policy", "fsdp", "device", "state", "optimizers", "cpu_update", "engine", "api"},
    "listeners": {*("policy", "fsdp", "device", "core", "state", "optimizers", "model", "engine", "api", "checkpoint")},
    "plan": {"lazy", "policy", "device", "core"},
    "integrations": {"policy", "state", "api", "checkpoint"},
}

TOOLS = "checkpoint_tools"
TABLES: dict[str, dict[str, set[str]]] = {
    PACKAGE: MAY_IMPORT,
    TOOLS: {
        "core": set(),
        "stored": {"core"},
        "fuse": {"core", "stored"},
        "look": {"core", "stored", "fuse"},
        "rewrite": {"core", "stored", "fuse", "look"},
        "convert": {"core", "stored", "fuse", "look", "rewrite"},
        "cli": {"core", "stored", "fuse", "look", "rewrite", "convert"},
    },
}
EVERY_PACKAGE = pytest.mark.parametrize("package", TABLES)
WITHOUT_LINE = {"__init__", "__main__"}

# Files that may use private names of torch.distributed and torch._C, each under a table of what is used and why.
MAY_USE_PRIVATE_TORCH = {
    *("fsdp/__init__.py", "fsdp/dtensor.py", "fsdp/fully_shard.py", "fsdp/optim.py"),
    *("fsdp/guard.py", "fsdp/homed.py", "fsdp/allocations.py"),
}

# Also attributes of our own objects with one of these names, which read as torch's. Call them something else.
PRIVATE_TORCH = re.compile(
    r"torch\._C(\..+)?|torch\.distributed(\.\w+)*?\._(?!_)\w+(\.\w+)*"
    r"|_local_tensor|_spec|_get_fsdp_state|_comm_ctx|_fsdp_param\w*"
)

OPTIONAL_PACKAGES = {
    *("transformer_engine", "torchao", "schedulefree", "bitsandbytes"),
    *("typer", "rich", "matplotlib", "safetensors"),
    *("accelerate", "transformers", "trl", "lightning", "torchtitan", "verl", "megatron_fsdp"),
    *("pytest", "hypothesis"),
}


# --- the rules -------------------------------------------------------------------------------------------------------


@EVERY_PACKAGE
def test_every_room_has_a_line_in_the_table(package: str):
    rooms, table = {room_of(module) for module in module_files(package)} - WITHOUT_LINE, TABLES[package]
    assert rooms - table.keys() == set(), (
        f"new in {package}/ and unknown to {Path(__file__).name}: give each a line in its table that names what "
        "it may import, before the lines of the rooms that import it, and a line in the map of CONTRIBUTING.md"
    )
    assert table.keys() - rooms == set(), "the table names rooms that do not exist: take their lines out"


@EVERY_PACKAGE
def test_the_table_points_downwards_only(package: str):
    lower: set[str] = set()
    for room, allowed in TABLES[package].items():
        assert allowed <= lower, f"{room} may import {sorted(allowed - lower)}, whose lines do not come before it"
        lower.add(room)


@EVERY_PACKAGE
def test_rooms_import_only_what_the_table_allows(package: str):
    wrong = [
        f"{module} imports {target}"
        for module, targets in import_graph(package).items()
        for target in sorted(targets)
        if room_of(module) not in WITHOUT_LINE
        if room_of(target) not in {room_of(module), *TABLES[package].get(room_of(module), set())}
    ]
    assert not wrong, (
        "imports go downwards only (see TABLES). Move the piece that both need to a lower room, pass it as an "
        f"argument, or import the module instead of the package's public name: {wrong}"
    )


@EVERY_PACKAGE
def test_modules_form_no_cycle(package: str):
    tuple(graphlib.TopologicalSorter(import_graph(package)).static_order())  # CycleError names the modules


def test_the_package_only_reexports():
    tree = ast.parse((ROOT / PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    assert ast.get_docstring(tree)
    for node in tree.body[1:]:
        text = ast.unparse(node)
        for_checkers = isinstance(node, ast.If) and all(isinstance(each, ast.ImportFrom) for each in node.body)
        allowed = isinstance(node, ast.ImportFrom) or for_checkers or text.startswith(("__all__ = ", "__version__ = "))
        assert allowed, f"{PACKAGE}/__init__.py does more than re-export: {text}"


def test_private_torch_names_stay_in_their_room():
    folder = ROOT / PACKAGE
    found = [
        f"{file.relative_to(folder)}:{line} uses {name}"
        for file in module_files().values()
        if file.relative_to(folder).as_posix() not in MAY_USE_PRIVATE_TORCH
        for line, name in private_torch_uses(file.read_text(encoding="utf-8"))
    ]
    assert not found, f"only {sorted(MAY_USE_PRIVATE_TORCH)} may; give fsdp a function that does this: {found}"


@pytest.mark.parametrize(
    ("module", "forbidden"),
    [
        (PACKAGE, OPTIONAL_PACKAGES),
        (f"{PACKAGE}.plan", OPTIONAL_PACKAGES),
        (f"{TOOLS}.fuse.live", OPTIONAL_PACKAGES | {"fsspec"}),
    ],
)
def test_importing_touches_no_device_and_no_optional_package(module: str, forbidden: set[str]):
    seen = import_in_fresh_process(module)
    assert seen["device_initialised"] is False
    assert seen["device_requests"] == 0
    assert forbidden & set(seen["modules"]) == set()


# --- reading the source ----------------------------------------------------------------------------------------------


def module_files(package: str = PACKAGE) -> dict[str, Path]:
    """Dotted module name → file, for every module of the package."""
    files = sorted((ROOT / package).rglob("*.py"))
    parts = {file: file.relative_to(ROOT).with_suffix("").parts for file in files}
    return {".".join(p[:-1] if p[-1] == "__init__" else p): file for file, p in parts.items()}


def imported_modules(source: str, module: str, modules: set[str], *, is_folder: bool = False) -> set[str]:
    """Those of ``modules`` that ``source``, the text of ``module``, imports; ``is_folder`` for an ``__init__.py``."""
    package = module if is_folder else module.rpartition(".")[0]
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = resolve_name("." * node.level + (node.module or ""), package)
            # `from package import name` imports the module package.name if there is one, else a name of package.
            submodules = {f"{base}.{alias.name}" for alias in node.names} & modules
            found |= submodules | ({base} if len(submodules) < len(node.names) else set())
    return (found & modules) - {module}


def room_of(module: str) -> str:
    """``fsdp_offload.plan.trace`` → ``plan``; the package itself → ``__init__``."""
    parts = module.split(".")
    return "__init__" if len(parts) == 1 else parts[1]


def import_graph(package: str) -> dict[str, set[str]]:
    """Module → the modules of the package that it imports."""
    files = module_files(package)
    return {
        module: imported_modules(
            file.read_text(encoding="utf-8"), module, set(files), is_folder=file.name == "__init__.py"
        )
        for module, file in files.items()
    }


def private_torch_uses(source: str) -> Iterator[tuple[int, str]]:
    """Line and name of each use of a private name of ``torch.distributed`` or ``torch._C``."""
    tree = ast.parse(source)
    known_as = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            base = f"{getattr(node, 'module', None) or ''}.".removeprefix(".")
            known_as |= {alias.asname or alias.name: base + alias.name for alias in node.names}
            names = [base + alias.name for alias in node.names]
        elif isinstance(node, ast.Attribute):
            first, _, rest = ast.unparse(node).partition(".")
            names = [f"{known_as.get(first, first)}.{rest}", node.attr]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names = [node.value]  # getattr(tensor, "_spec")
        else:
            continue
        yield from ((node.lineno, name) for name in names if PRIVATE_TORCH.fullmatch(name))


def import_in_fresh_process(module: str) -> dict[str, Any]:
    """What importing ``module`` did to a Python that had imported torch alone."""
    # torch._C initialises the device through _lazy_init, which is called, and then fails, on a machine without one too.
    code = f"""
import importlib, json, sys
import torch, torch.cuda
requests = []
lazy_init = torch.cuda._lazy_init
torch.cuda._lazy_init = lambda: (requests.append(1), lazy_init())
before = set(sys.modules)
found = importlib.import_module({module!r})
[getattr(found, name) for name in getattr(found, "__all__", ())]  # which is when they are imported
print(json.dumps(dict(
    device_initialised=torch.cuda.is_initialized(),
    device_requests=len(requests),
    modules=sorted({{name.split(".")[0] for name in set(sys.modules) - before}}),
)))
"""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    command, environment = [sys.executable, "-c", code], {**os.environ, "PYTHONPATH": path}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)
