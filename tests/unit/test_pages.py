"""What the pages write works: Python runs, commands parse, names exist, links lead somewhere.

Python that needs a framework is not run: it is compiled, and its calls of ours are held to our signatures. Where a page
stands on names of its reader's (``model``, ``optimizer``, ``path``), :func:`reader` has them.
"""

import ast
import dataclasses
import importlib
import importlib.util
import inspect
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import typer
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from checkpoint_tools import __main__ as checkpoint_tools
from examples.benchmarks import __main__ as benchmarks
from fsdp_offload import OffloadedOptimizer, OffloadPolicy, is_offloaded, offload_optimizer
from fsdp_offload.__main__ import DOCTOR_HELP, HELP
from fsdp_offload.plan import command as plan
from tests.pages import DOCS, OURS, PAGES, ROOT, Block, blocks_in, blocks_of, needs_a_framework, text_of

PYTHON = blocks_in("python")
RUN = [block for block in PYTHON if not needs_a_framework(block)]
POLICY_FIELDS = {field.name for field in dataclasses.fields(OffloadPolicy)}

every_page = pytest.mark.parametrize("page", PAGES)


@pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("accelerate", "lightning", "megatron_fsdp", "torchtitan", "trl"))),
    reason="needs the frameworks of the extra [dev]",
)
def test_the_table_of_frameworks_is_what_tests_prove() -> None:
    made = subprocess.run([sys.executable, "-m", "tests.proofs"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert made.stdout in text_of("docs/frameworks.md"), f"docs/frameworks.md is to have this table:\n{made.stdout}"


def test_the_pages_have_what_is_tested() -> None:
    assert len(RUN) >= 12
    assert len(PYTHON) - len(RUN) >= 8
    assert len(list(commands())) >= 30
    assert {block.language for page in PAGES for block in blocks_of(page)} <= {"python", "sh", "text", "mermaid"}


class Model(nn.Module):
    """Blocks, as the README's reader has them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


class TokenModel(nn.Module):
    """A model that returns its loss for token numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(64, 32), nn.Linear(32, 64)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.embedding(tokens[:, :-1]))
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(4, 32, dtype=next(model.parameters()).dtype)).square().mean().backward()
        optimizer.step()


def reader(block: Block, mesh: DeviceMesh, path: Path, *, offload: bool = True) -> dict[str, Any]:
    """The script around a block: a sharded model, trained for two steps, unless the block itself does that."""
    calls = {ast.unparse(node.func) for node in ast.walk(ast.parse(block.code)) if isinstance(node, ast.Call)}
    torch.manual_seed(0)
    model = Model().to(torch.bfloat16 if "add_masters" in block.code else torch.float32)
    if "fully_shard" not in calls:
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if "offload_optimizer" not in calls:
        if offload:
            offload_optimizer(optimizer, model=model)
        train(model, optimizer)
    mlp = {
        "model.layers.0.mlp.gate_up_proj.weight": torch.ones(8, 4),
        "model.layers.0.mlp.down_proj.weight": torch.ones(4, 4),
    }
    mlp_state = {key: {"exp_avg": value + 1} for key, value in mlp.items()}
    return {
        "torch": torch,
        "dcp": dcp,
        "nn": nn,
        "fully_shard": fully_shard,
        "OffloadPolicy": OffloadPolicy,
        "OffloadedOptimizer": OffloadedOptimizer,
        "offload_optimizer": offload_optimizer,
        "model": model,
        "step": 2,
        "optimizer": optimizer,
        "path": path,
        "MyModel": TokenModel,
        "build": Model,
        "three_batches": range(3),
        "train": lambda _: train(model, optimizer),
        "config": SimpleNamespace(finalize_model_grads_func=None),
        "state": {"model": model.state_dict()},
        "model_state": mlp,
        "optim_state": {"state": mlp_state, "param_groups": [{"lr": 1e-3, "params": list(mlp)}]},
    }


@pytest.mark.parametrize("block", RUN, ids=str)
@pytest.mark.filterwarnings("ignore:.*The parameters are on the CPU:UserWarning")
@pytest.mark.filterwarnings("ignore:.*all of the state fits into device_bytes:UserWarning")
@pytest.mark.filterwarnings("ignore:DTensor random operators:UserWarning")
def test_python_runs(block: Block, mesh: DeviceMesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And training goes on behind it, with an offloaded optimizer."""
    if not torch.accelerator.is_available():
        monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)  # which is an error without one
    monkeypatch.chdir(tmp_path)
    names = reader(block, mesh, tmp_path)
    exec(compile(block.code, str(block), "exec"), names)
    for value in [*names.values()]:
        if isinstance(value, Future):
            value.result()
    if not isinstance(names["model"], TokenModel):
        assert is_offloaded(names["optimizer"])
        train(names["model"], names["optimizer"])


class Plain(ast.NodeTransformer):
    """Removes the call of ``offload_optimizer``; where ``guarded``, puts calls that raise without behind an ``if``."""

    def __init__(self, *, guarded: bool) -> None:
        self.guarded = guarded

    def generic_visit(self, node: ast.AST) -> Any:
        super().generic_visit(node)
        if isinstance(node, ast.Expr | ast.Assign):
            calls = {ast.unparse(call.func) for call in ast.walk(node) if isinstance(call, ast.Call)}
            if "offload_optimizer" in calls:
                return ast.Pass()
            if self.guarded and calls & MEANS_NOTHING_PLAIN:
                return ast.If(ast.parse("is_offloaded(optimizer)", mode="eval").body, [node], [])
        return node


MEANS_NOTHING_PLAIN = {"offload_report", "offload_states", "release_states", "reload_states", "reload_before"}


@pytest.mark.parametrize(
    "block",
    [block for block in RUN if "materialize_on_host" not in block.code and "recoverable" not in block.code],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:DTensor random operators:UserWarning")
def test_python_runs_without_offload(
    block: Block, mesh: DeviceMesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Remove the call of ``offload_optimizer``, as README says: what raises then has the line to write."""
    if not torch.accelerator.is_available():
        monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)
    monkeypatch.chdir(tmp_path)

    def run(*, guarded: bool) -> None:
        names = reader(block, mesh, tmp_path, offload=False)
        tree = ast.fix_missing_locations(Plain(guarded=guarded).visit(ast.parse(block.code)))
        exec(compile(tree, str(block), "exec"), {**names, "is_offloaded": is_offloaded})
        assert not is_offloaded(names["optimizer"])
        train(names["model"], names["optimizer"])

    calls = {ast.unparse(node.func) for node in ast.walk(ast.parse(block.code)) if isinstance(node, ast.Call)}
    if calls & MEANS_NOTHING_PLAIN:
        with pytest.raises((TypeError, RuntimeError), match=r"write `if is_offloaded\(optimizer\):` before this"):
            run(guarded=False)
    run(guarded=True)


@pytest.mark.parametrize("block", PYTHON, ids=str)
def test_calls_of_ours_fit(block: Block) -> None:
    tree = ast.parse(block.code)
    modules = {"OffloadPolicy": "fsdp_offload", "offload_optimizer": "fsdp_offload", **dict(imported(tree))}
    signatures = {name: signature_of(module, name) for name, module in modules.items()}
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.func.id not in modules:
            continue
        name = call.func.id
        keywords = {str(keyword.arg): keyword.value for keyword in call.keywords}
        if name == "OffloadPolicy":
            check_policy(keywords, str(block))
        elif signature := signatures[name]:
            signature.bind(*call.args, **keywords)
        if modules[name].startswith("fsdp_offload.integrations."):  # which take the fields of a policy as a dict
            for value in (*call.args, *keywords.values()):
                if isinstance(value, ast.Dict):
                    pairs = zip(value.keys, value.values, strict=True)
                    check_policy({ast.literal_eval(key): of for key, of in pairs if key}, str(block))


def imported(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Names that a block imports from us, each with its module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] in OURS:
            yield from ((alias.name, str(node.module)) for alias in node.names)


def signature_of(module: str, name: str) -> inspect.Signature | None:
    """How ``module.name`` is called; nothing for a class without an ``__init__`` of its own.

    Our integrations are read and not imported, since their frameworks need not be installed.
    """
    if not module.startswith("fsdp_offload.integrations."):
        thing = getattr(importlib.import_module(module), name)
        return inspect.signature(thing) if callable(thing) else None
    tree = ast.parse((ROOT / module.replace(".", "/")).with_suffix(".py").read_text(encoding="utf-8"))
    [found] = [node for node in tree.body if getattr(node, "name", None) == name]
    wanted = {name} if isinstance(found, ast.FunctionDef) else {"__init__"}
    for function in (node for node in ast.walk(found) if isinstance(node, ast.FunctionDef) and node.name in wanted):
        made: dict[str, Any] = {}
        exec(f"from __future__ import annotations\ndef made({ast.unparse(function.args)}): ...", made)
        called = inspect.signature(made["made"])
        return called.replace(parameters=[each for each in called.parameters.values() if each.name != "self"])
    return None


def check_policy(fields: dict[str, ast.expr], where: str) -> None:
    """Make the policy of these fields; those whose values the page leaves open only have to exist."""
    assert set(fields) <= POLICY_FIELDS, f"{where}: no field {sorted(set(fields) - POLICY_FIELDS)} of OffloadPolicy"
    values = {name: value_of(node) for name, node in fields.items()}
    OffloadPolicy(**{name: value for name, value in values.items() if value is not ...})


def value_of(node: ast.expr) -> Any:
    """``640 << 20`` and the like; ``...`` for what names something of the page's reader."""
    if any(isinstance(each, ast.Name | ast.Attribute) for each in ast.walk(node)):
        return ...
    return eval(compile(ast.Expression(node), "", "eval"), {})


MODULES = {"examples.benchmarks": benchmarks.app, "checkpoint_tools": checkpoint_tools.app}
OTHERS = {"python -m pytest", "python3 -m venv", "pre-commit install", "source .venv/bin/activate"}


def commands() -> Iterator[tuple[str, list[str]]]:
    """Where, and the words of a command: those of shell blocks, and ours in the text."""
    for block in blocks_in("sh"):
        for line in block.code.replace("\\\n", " ").splitlines():
            for command in line.split(" && "):
                if words := shlex.split(command, comments=True):
                    yield str(block), words
    for page in PAGES:
        prose = re.sub(r"```.*?```", "", text_of(page), flags=re.DOTALL)
        for code in re.findall(r"`([^`\n]+)`", prose):
            if re.match(
                r"(fsdp-offload|checkpoint-tools|torchrun|python -m (examples\.benchmarks|checkpoint_tools)\S*) \S",
                code,
            ):
                yield page, shlex.split(code.replace(" NAME", " link").replace("`", ""))


@pytest.mark.parametrize(("where", "words"), [pytest.param(*each, id=" ".join(each[1])) for each in commands()])
def test_commands_parse(where: str, words: list[str]) -> None:
    program, arguments = Path(words[0]).name, words[1:]
    if program == "fsdp-offload" and arguments[0] == "plan":
        parse(plan.app, arguments[1:])
    elif program == "fsdp-offload":
        assert f"  {arguments[0]} " in HELP, where
        assert all(f"  {flag} " in DOCTOR_HELP for flag in arguments[1:]), where
    elif program == "checkpoint-tools":
        parse(checkpoint_tools.app, arguments)
    elif program in ("python", "python3") and arguments[0] == "-m" and arguments[1] in MODULES:
        parse(MODULES[arguments[1]], arguments[2:])
    elif program in ("python", "python3") and arguments[:3] == ["-m", "pip", "install"]:
        extras = re.findall(r"\[([\w,]+)\]", " ".join(arguments))
        known = tomllib.loads(text_of("pyproject.toml"))["project"]["optional-dependencies"]
        assert {extra for each in extras for extra in each.split(",")} <= known.keys(), where
    elif program in ("python", "python3", "torchrun") and (script := [w for w in arguments if w.endswith(".py")]):
        flags = [word for word in arguments[arguments.index(script[0]) + 1 :] if word.startswith("--")]
        source = text_of(script[0])
        assert [flag for flag in flags if flag != "--help" and f'"{flag}"' not in source] == [], where
    else:
        assert " ".join([program, *arguments[: 1 if len(arguments) == 1 else 2]]) in OTHERS, f"{where}: {words}"


def parse(app: typer.Typer, arguments: list[str]) -> None:
    """Parse a command line as the program does, and run nothing. A command alone is the name of one in the text."""
    command: Any = typer.main.get_command(app)
    if hasattr(command, "resolve_command"):
        context = command.make_context("test", arguments[:1])
        _, command, _ = command.resolve_command(context, arguments[:1])
        arguments = arguments[1:]
    if arguments:
        command.make_context("test", arguments)


@every_page
def test_names_in_the_text_exist(page: str) -> None:
    text = text_of(page)
    assert set(re.findall(r"OffloadPolicy\((\w+)=", text)) <= POLICY_FIELDS
    for module, name in re.findall(r"`((?:fsdp_offload|checkpoint_tools)[\w.]*)\.(\w+)`", text):
        if not module.startswith("fsdp_offload.integrations"):
            exists = hasattr(importlib.import_module(module), name)
            assert exists or importlib.util.find_spec(f"{module}.{name}"), f"{module}.{name}"


@every_page
def test_policies_in_the_text_can_be_made(page: str) -> None:
    """``overlap="iteration", device_bytes=640 << 20`` in a table."""
    for code in re.findall(r"`(\w+=[^`\n]+)`", text_of(page)):
        fields = keywords_of(code)
        if fields.keys() & POLICY_FIELDS and "parameters" not in fields:
            check_policy(fields, page)


def test_the_readme_says_what_to_write() -> None:
    """Its table has six rows at most; each but the first, the defaults, has one policy in the second column."""
    table = (
        text_of("README.md")
        .partition("| your loop | write | GPU freed | host taken | time |\n")[2]
        .partition("\n\n")[0]
    )
    rows = table.splitlines()[1:]
    assert 3 <= len(rows) <= 6
    for row in rows[1:]:
        [code] = re.findall(r"`(\w+=[^`]+)`", row.split(" | ")[1])
        check_policy(keywords_of(code), "README.md")


def keywords_of(code: str) -> dict[str, ast.expr]:
    """The arguments in ``a=1, b=2``; none where that is no Python."""
    try:
        call = ast.parse(f"f({code})", mode="eval").body
    except SyntaxError:
        return {}
    assert isinstance(call, ast.Call)
    return {str(keyword.arg): keyword.value for keyword in call.keywords}


OF_OTHER_WIDTH = {"docs/benchmarks.md", "docs/design.md", "docs/plan.md"}


@pytest.mark.parametrize("page", [page for page in PAGES if page not in OF_OTHER_WIDTH])
def test_lines_to_copy_are_seen_whole(page: str) -> None:
    """The site shows 80 columns on a screen of 1,280 pixels."""
    lines = (line for block in blocks_of(page) for line in block.code.splitlines())
    assert [line for line in lines if len(line) > 80] == []


@every_page
def test_links_lead_somewhere(page: str) -> None:
    """Their anchors are checked by ``mkdocs build --strict``."""
    for target in re.findall(r"\]\((?!https?:)([^)#\s]+)(?:#[\w-]+)?\)", text_of(page)):
        assert ((ROOT / page).parent / target).exists(), target


def test_the_page_on_policies_has_every_field() -> None:
    table = text_of("docs/policy.md").partition("\n## All fields\n")[2].partition("\n## ")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == POLICY_FIELDS


def test_every_record_is_told_of() -> None:
    records = {path.name for path in (ROOT / "examples/benchmark_results").iterdir()}
    page = text_of("examples/benchmark_results/README.md")
    assert {name for name in records - {"README.md"} if f"`{name}`" not in page} == set()


def test_the_pages_can_be_read() -> None:
    """A page more, or a longer one, takes the place of something else."""
    assert len(text_of("README.md").splitlines()) <= 130
    assert len(DOCS) <= 14
    words = sum(len(page.read_text(encoding="utf-8").split()) for page in DOCS)
    assert words <= 18_386  # 300 are steps that outlive a kill; 40 say who holds a gradient; 65 "auto"
    assert len(text_of("CHANGELOG.md").splitlines()) <= 60
