"""Checkpoints that are converted in this process, and looked into."""

import json
import struct
from pathlib import Path
from typing import Any

import torch

from checkpoint_tools.convert import convert
from checkpoint_tools.convert.convert import Wanted
from checkpoint_tools.look.verify import check_structure
from checkpoint_tools.rewrite import rewrite
from checkpoint_tools.stored.opening import open_checkpoint
from checkpoint_tools.stored.reading import Checkpoint


def converted(
    source: Path | str,
    destination: Path | str,
    *,
    shard_bytes: int = 5_000_000_000,
    key_prefix: str | None = None,
    what: str = "all",
    excluded: tuple[str, ...] = (),
    dtype: torch.dtype | None = None,
    threads: int = 2,
    max_memory_bytes: int = 1 << 20,
) -> Checkpoint:
    """The new one; it is whole, and sealed if it is one of DCP."""
    rewrite.check_destination(str(source), str(destination))
    wanted = Wanted(what, key_prefix, excluded, shard_bytes, dtype)  # type: ignore[arg-type]
    planned = convert.plan(str(source), wanted, threads=1)
    rewrite.write(
        planned.checkpoint,
        planned.rewrite,
        str(destination),
        threads=threads,
        max_memory_bytes=max_memory_bytes,
        beside=planned.beside,
        sidecars=planned.sidecars,
    )
    made = open_checkpoint(destination)
    assert (made.manifest is None) == bool(planned.rewrite.heads)
    problems, files = check_structure(made, 1)
    assert not problems
    assert not files.notes
    return made


def safetensors_file(path: Path, header: Any, data: bytes = b"", *, length: int | None = None) -> Path:
    """A file with whatever header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path
