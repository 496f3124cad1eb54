"""Checkpoints to look into: written by torch, and edited."""

import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import chdir, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.tensor import Shard, distribute_tensor
from typer.testing import CliRunner

from checkpoint_tools.__main__ import app
from tests.distributed.launch import mesh, spawn
from tests.loading import edit_metadata

ROOT = Path(__file__).resolve().parents[2]

STRIDED = torch.arange(24.0).view(4, 6).t()
STATE = {
    "model": {"layers.10.weight": torch.arange(20.0).view(4, 5), "layers.2.weight": torch.ones(3).bfloat16()},
    "optim": {
        "state": {
            "layers.10.weight": {"step": torch.tensor(3.0), "exp_avg": torch.full((4, 5), 0.5)},
            "layers.2.weight": {"step": torch.tensor(3.0), "exp_avg": STRIDED},
        },
        "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99)}],
    },
    "nothing": torch.empty(0, 3),
}
FUSED = torch.randn(7, 6, generator=torch.Generator().manual_seed(0))


def save(folder: Path, state: dict[str, Any], **options: Any) -> Path:
    """By this process alone."""
    with warnings.catch_warnings(action="ignore"):  # that there is no process group
        dcp.save(state, storage_writer=dcp.FileSystemWriter(folder, **options), no_dist=True)
    return folder


def save_on_two_ranks(tmp_path: Path) -> tuple[Path, Path]:
    """The same state, divided into rows, and into columns: folders ``rows`` and ``columns``."""
    spawn(_save_sharded, 2, tmp_path, tmp_path)
    return tmp_path / "rows", tmp_path / "columns"


def _save_sharded(rank: int, world_size: int, tmp_path: Path) -> None:
    device_mesh = mesh(world_size)
    for name, dim in (("rows", 0), ("columns", 1)):
        fused = distribute_tensor(FUSED.clone(), device_mesh, [Shard(dim)])
        moments = {"exp_avg": fused * 2, "step": torch.tensor(5.0)}
        state = {"model": {"fused": fused}, "optim": {"state": {"fused": moments}}}
        dcp.save(state, checkpoint_id=tmp_path / name)
    dist.barrier()


def changed(folder: Path, name: str, edit: Any) -> Path:
    """A copy whose metadata are edited."""
    copy = folder.with_name(name)
    shutil.copytree(folder, copy)
    edit_metadata(copy, edit)
    return copy


def chunks_in(metadata: Metadata, key: str) -> list[Any]:
    """The chunks of a tensor in torch's own metadata."""
    return metadata.state_dict_metadata[key].chunks  # type: ignore[union-attr]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@contextmanager
def without_checksums() -> Iterator[None]:
    """Make torch.save write zeros in their place."""
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(True)


class Opaque:
    """Unpickled by nothing but Python's own unpickler."""

    def __init__(self, value: int = 0) -> None:
        self.value = value


class Trap:
    """Makes a file when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> object:
        return os.system, (f"touch {self.file}",)


def run_here(*args: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """``checkpoint-tools ARGS`` in this process, in ``cwd``: most of the time of another one is torch's import."""
    with nullcontext() if cwd is None else chdir(cwd):
        result = CliRunner(env={"COLUMNS": "100"}).invoke(app, list(map(str, args)))
    return subprocess.CompletedProcess(args, result.exit_code, result.stdout, result.stderr)


def python(*arguments: object, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    """Another process, not on a terminal."""
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def run_tool(*args: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """``python -m checkpoint_tools ARGS``, as from a shell."""
    return python("-m", "checkpoint_tools", *args, cwd=cwd, COLUMNS="100")


def assert_one_line(run: subprocess.CompletedProcess[str], *matches: str) -> None:
    assert run.returncode == 2, run.stdout + run.stderr
    assert run.stdout == ""
    assert run.stderr.startswith("error: ")
    assert len(run.stderr.splitlines()) == 1, run.stderr
    assert all(match in run.stderr for match in matches), (run.stderr, matches)
