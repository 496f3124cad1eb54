"""The lines of the README and the pages pass mypy and pyright in strict mode as they stand."""

import json
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.pages import ROOT, blocks_in, needs_a_framework

# What the reader has: a script around each block.
PREAMBLE = """
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import fully_shard

from fsdp_offload import OffloadedOptimizer, OffloadPolicy, offload_optimizer


class Model(nn.Module):
    layers: nn.ModuleList


class MyModel(Model): ...


def build() -> Model:
    return Model()


def train(batch: int) -> None: ...


three_batches: list[int] = []


state: dict[str, Any] = {}
"""
SCRIPT = """
def block_{number}(
    model: Model, optimizer: torch.optim.AdamW, path: Path, config: Any,
    model_state: dict[str, Any], optim_state: dict[str, Any] | None,
) -> None:
{block}
"""


# torch's own: what it does not annotate in full, under the names that the pages use.
UNKNOWN_IN_TORCH = re.compile(
    r'Type of "(step|save|async_save|future|new_group|group)" is partially unknown|"ProcessGroup \| int \| None"'
)


@pytest.fixture
def scripts(tmp_path: Path) -> Path:
    """A file with a function for each block."""
    blocks = [block.code for block in blocks_in("python") if not needs_a_framework(block)]
    assert len(blocks) >= 10
    functions = [SCRIPT.format(number=n, block=textwrap.indent(block, "    ")) for n, block in enumerate(blocks)]
    path = tmp_path / "pages.py"
    path.write_text("\n\n".join([PREAMBLE, *functions]), encoding="utf-8")
    return path


def checked(folder: Path, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = (sys.executable, "-m", *command)
    return subprocess.run(command, cwd=folder, env=environment or None, capture_output=True, text=True, check=False)


@pytest.mark.long
def test_pages_pass_mypy(scripts: Path) -> None:
    # Like an installed package, ours is only looked at; and torch does not export torch.distributed.checkpoint.save.
    options = ("--strict", "--config-file=", "--follow-imports=silent", "--implicit-reexport", "--cache-dir=.")
    run = checked(scripts.parent, "mypy", *options, scripts.name, MYPYPATH=str(ROOT), PATH="")
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.long  # mypy says nearly all of it, in a fraction of the time
def test_pages_pass_pyright(scripts: Path) -> None:
    pytest.importorskip("basedpyright")
    # A snippet need not use what it shows; and torch does not export torch.distributed.checkpoint.save.
    off = ["reportUnusedImport", "reportUnusedVariable", "reportPrivateImportUsage"]
    config = {"include": [scripts.name], "typeCheckingMode": "strict", "extraPaths": [str(ROOT)]}
    (scripts.parent / "pyrightconfig.json").write_text(json.dumps(config | dict.fromkeys(off, "none")))
    run = checked(scripts.parent, "basedpyright", "--outputjson", "--pythonpath", sys.executable)
    result = json.loads(run.stdout)
    assert result["summary"]["filesAnalyzed"] == 1
    found = [f"{each['range']['start']['line'] + 1}: {each['message']}" for each in result["generalDiagnostics"]]
    assert [message for message in found if not UNKNOWN_IN_TORCH.search(message)] == []
