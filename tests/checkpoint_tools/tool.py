"""The command line, in this process and in others; and what it has written, as torch itself reads it."""

import dataclasses
import io
import itertools
import json
import os
import pickle
import subprocess
import sys
import tempfile
import warnings
import zipfile
from collections import defaultdict
from contextlib import chdir, nullcontext
from pathlib import Path
from typing import Any

import fsspec
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from typer.testing import CliRunner

from checkpoint_tools import Rule
from checkpoint_tools.__main__ import app
from checkpoint_tools.core.text import CheckpointError
from tests.checkpoint_tools.saves import Rectangle, same_bits

ROOT = Path(__file__).resolve().parents[2]
Run = subprocess.CompletedProcess[str]

# Running -------------------------------------------------------------------------------------------------------------


def run(*command: object, cwd: Path | None = None) -> Run:
    """``checkpoint-tools COMMAND`` in this process, in ``cwd``: most of the time of another one is torch's import."""
    sizes = ("--max-memory", "--shard-size")  # whose numbers have a unit, if they are as small as here
    pairs = itertools.pairwise(("", *command))
    typed = [f"{one}bytes" if before in sizes and isinstance(one, int) else str(one) for before, one in pairs]
    with nullcontext() if cwd is None else chdir(cwd):
        result = CliRunner(env={"COLUMNS": "100"}).invoke(app, typed)
    return subprocess.CompletedProcess(command, result.exit_code, result.stdout, result.stderr)


def python(*arguments: object, cwd: Path | None = None, **environment: str) -> Run:
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


def from_shell(*command: object, cwd: Path | None = None) -> Run:
    """``python -m checkpoint_tools COMMAND``."""
    return python("-m", "checkpoint_tools", *command, cwd=cwd, COLUMNS="100")


def shown(*command: object, code: int = 0, cwd: Path | None = None) -> str:
    """What a command prints that ends with this code, without a word on standard error."""
    ran = run(*command, cwd=cwd)
    assert (ran.returncode, ran.stderr) == (code, ""), ran
    return ran.stdout


def as_json(*command: object, code: int = 0) -> Any:
    return json.loads(shown(*command, "--json", code=code))


def with_names(folder: Path, names: object) -> tuple[object, ...]:
    """The option with which the optimizer's parameters are named, by a file in this folder."""
    (folder / "names.json").write_text(json.dumps(names))
    return "--names", folder / "names.json"


def assert_one_line(ran: Run, *matches: str) -> None:
    """An error of one line, and nothing else."""
    assert ran.returncode == 2, ran.stdout + ran.stderr
    assert ran.stdout == ""
    assert ran.stderr.startswith("error: ")
    assert len(ran.stderr.splitlines()) == 1, ran.stderr
    assert all(match in ran.stderr for match in matches), (ran.stderr, matches)


def made(command: str, source: Path | str, destination: Path | str, *options: object, threads: int = 2) -> Any:
    """Its destination, which is whole. ``options`` are rules and what one types.

    Raises:
        CheckpointError: the command was refused; with its line.
    """
    rules = [each for each in options if isinstance(each, Rule)]
    typed = [each for each in options if not isinstance(each, Rule)]
    if "--max-memory" not in typed:
        typed += ["--max-memory", 1 << 20]
    with tempfile.TemporaryDirectory() as folder:
        if rules:
            tables = [{name: v for name, v in dataclasses.asdict(each).items() if v is not None} for each in rules]
            Path(folder, "rules.json").write_text(json.dumps({"rule": tables}))
            typed += ["--rules", Path(folder, "rules.json")]
        ran = run(command, source, destination, "--threads", threads, *typed)
    if ran.returncode:
        assert_one_line(ran)
        raise CheckpointError(ran.stderr)
    assert_whole(destination)
    return destination


# Looking at --------------------------------------------------------------------------------------------------------


def assert_whole(path: Path | str) -> None:
    """Nothing to note; of DCP sealed, and each item a zip file whose checksums are right, one after the other."""
    files, root = fsspec.core.url_to_fs(str(path))
    is_dcp = files.exists(f"{root}/.metadata")
    assert "note:" not in shown("verify", path, *["--data"] * is_dcp)
    assert files.exists(f"{root}/.checksums") == is_dcp
    ranges = defaultdict(set)
    for info in metadata_of(path).storage_data.values() if is_dcp else ():
        ranges[info.relative_path].add((info.offset, info.length))
    for file, places in ranges.items():
        content = files.cat_file(f"{root}/{file}")
        assert sum(length for _, length in places) == len(content)
        for offset, length in places:
            with zipfile.ZipFile(io.BytesIO(content[offset : offset + length])) as archive:
                assert archive.testzip() is None


def metadata_of(path: Path | str) -> Metadata:
    files, root = fsspec.core.url_to_fs(str(path))
    return pickle.loads(files.cat_file(f"{root}/.metadata"))


def place_of(path: Path | str, key: str) -> Any:
    """Which file has an item, its offset and its length."""
    (info,) = (info for index, info in metadata_of(path).storage_data.items() if index.fqn == key)
    return info


def values_of(path: Path | str) -> dict[str, Any]:
    """Everything in a checkpoint of DCP, by flat key, as torch loads it."""
    found: dict[str, Any] = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype) if isinstance(entry, TensorStorageMetadata) else None
        for key, entry in metadata_of(path).state_dict_metadata.items()
    }
    load(found, path, planner=dcp.DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False))
    return found


def load(state: dict[str, Any], path: Path | str, **options: Any) -> None:
    """By this process alone."""
    with warnings.catch_warnings(action="ignore"):  # that there is no process group
        dcp.load(state, checkpoint_id=path, no_dist=True, **options)


def shapes_of(path: Path | str) -> dict[str, Any]:
    """All keys, also of safetensors; of objects None."""
    return {row["key"]: row["shape"] for row in as_json("inspect", path)["keys"]}


def chunks_of(path: Path | str) -> dict[str, list[Rectangle]]:
    return {
        key: sorted((tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks)
        for key, entry in metadata_of(path).state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def assert_same(a: Path | str, b: Path | str) -> None:
    """All values, bit by bit, and where each was in the nested state dict."""
    first, second = values_of(a), values_of(b)
    assert first.keys() == second.keys()
    assert [key for key, value in first.items() if not same_bits(value, second[key])] == []
    assert (metadata_of(a).planner_data or {}) == (metadata_of(b).planner_data or {})  # Megatron-Core has none


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())
