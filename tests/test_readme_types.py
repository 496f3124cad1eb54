"""The README's lines pass mypy in strict mode as they stand."""

import re
import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# What the README's reader has: a script around each block.
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


state: dict[str, Any] = {}
"""
SCRIPT = "def block_{number}(model: Model, optimizer: torch.optim.AdamW, path: Path, config: Any) -> None:\n{block}\n"


def test_readme_passes_mypy(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) >= 10
    scripts = [SCRIPT.format(number=n, block=textwrap.indent(block, "    ")) for n, block in enumerate(blocks)]
    (tmp_path / "readme.py").write_text("\n\n".join([PREAMBLE, *scripts]), encoding="utf-8")
    # Like an installed package, ours is only looked at; and torch does not export torch.distributed.checkpoint.save.
    options = ["--strict", "--config-file=", "--follow-imports=silent", "--implicit-reexport"]
    run = subprocess.run(
        [sys.executable, "-m", "mypy", *options, f"--cache-dir={tmp_path}", "readme.py"],
        cwd=tmp_path,
        env={"MYPYPATH": str(ROOT), "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
