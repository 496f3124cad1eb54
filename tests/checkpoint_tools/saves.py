"""Checkpoints to look into and to rewrite: what is in them, saved by torch, cut as one likes, edited, damaged."""

import math
import os
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.tensor import Shard, distribute_tensor

from checkpoint_tools import Rule
from fsdp_offload.checkpoint import Chunk, ShardChunks, ShardTensor
from fsdp_offload.checkpoint.chunks import contiguous_strides
from tests.distributed.launch import mesh, spawn
from tests.loading import edit_metadata

Rectangle = tuple[tuple[int, ...], tuple[int, ...]]

WEIGHT = "model.layers.10.weight"
PLAIN: dict[str, Any] = {
    "model": {"layers.10.weight": torch.arange(20.0).view(4, 5), "layers.2.weight": torch.ones(3).bfloat16()},
    "optim": {
        "state": {
            "layers.10.weight": {"step": torch.tensor(3.0), "exp_avg": torch.full((4, 5), 0.5)},
            "layers.2.weight": {"step": torch.tensor(3.0), "exp_avg": torch.arange(24.0).view(4, 6).t()},
        },
        "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99)}],
    },
    "nothing": torch.empty(0, 3),
}
MATRIX = torch.randn(7, 6, generator=torch.Generator().manual_seed(0))  # what two ranks have saved

FUSED, DOWN = "mlp.gate_up.weight", "mlp.down.weight"
GATE, UP = "mlp.gate.weight", "mlp.up.weight"
WITH_FUSED: dict[str, Any] = {
    "model": {FUSED: torch.arange(24.0).view(8, 3), DOWN: torch.ones(3, 4)},
    "optim": {
        "state": {FUSED: {"exp_avg": torch.arange(24.0).view(8, 3) + 1, "step": torch.tensor(3.0)}},
        "param_groups": [{"lr": 0.5, "params": [FUSED, DOWN]}],
    },
}
RULES = """
[[rule]]
fused = '{p}gate_up.weight'
parts = ['{p}gate.weight', '{p}up.weight']
"""


def rule(**fields: Any) -> Rule:
    """That of ``RULES``, but for these fields."""
    return Rule(**{"fused": "{p}gate_up.weight", "parts": ("{p}gate.weight", "{p}up.weight"), **fields})


# Saving --------------------------------------------------------------------------------------------------------------


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
        dcp.save(divided(distribute_tensor(MATRIX.clone(), device_mesh, [Shard(dim)])), checkpoint_id=tmp_path / name)
    dist.barrier()


def divided(fused: Tensor) -> dict[str, Any]:
    """What two ranks have saved: a matrix, and its state."""
    return {"model": {"fused": fused}, "optim": {"state": {"fused": {"exp_avg": fused * 2, "step": torch.tensor(5.0)}}}}


def tiled(whole: Tensor, rectangles: Iterable[Rectangle]) -> ShardTensor:
    """All of ``whole``, saved as these chunks."""
    chunks, pieces, start = [], [], 0
    for offsets, sizes in rectangles:
        piece = whole[tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))]
        chunks.append(Chunk(offsets, sizes, start, contiguous_strides(sizes)))
        pieces.append(piece.reshape(-1))
        start += piece.numel()
    memory = torch.cat(pieces) if pieces else whole.new_empty(0)
    return ShardTensor(memory, ShardChunks(tuple(whole.shape), tuple(memory.shape), tuple(chunks)))


@contextmanager
def without_checksums() -> Iterator[None]:
    """Make torch.save write zeros in their place."""
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(True)


def full(*_: object) -> None:
    """In the place of what writes, on a disk that is full."""
    raise OSError(28, "No space left on device")


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


# Editing -------------------------------------------------------------------------------------------------------------


def changed(folder: Path, name: str, edit: Callable[[Metadata], object]) -> Path:
    """A copy beside it whose metadata are edited."""
    copy = folder.with_name(name)
    shutil.copytree(folder, copy)
    edit_metadata(copy, edit)
    return copy


def edit_file(file: Path, edit: Callable[[Any], object]) -> None:
    """Change what torch.save has written."""
    value = torch.load(file, weights_only=False)
    edit(value)
    torch.save(value, file)


def flip_bit(file: Path, at: int | None = None) -> None:
    """In the middle, if nobody says where."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2 if at is None else at] ^= 1
    file.write_bytes(content)


def entry_of(metadata: Metadata, key: str) -> Any:
    """A tensor in torch's own metadata."""
    return metadata.state_dict_metadata[key]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# Values --------------------------------------------------------------------------------------------------------------


def content(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Any bits; of a bool, one of two."""
    generator = torch.Generator().manual_seed(seed)
    high = 2 if dtype == torch.bool else 256
    numbers = torch.randint(0, high, (math.prod(shape) * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return numbers.view(dtype).view(shape)


def part_of(rule: Rule, whole: Tensor, number: int) -> Tensor:
    """A part, by indexing: another way than the tools have."""
    count, dim = len(rule.parts), rule.dim % whole.dim()
    if rule.layout == "stacked":
        return whole.unbind(dim)[number]
    if rule.layout == "interleaved":
        return whole.unflatten(dim, (-1, count)).select(dim + 1, number)
    groups = whole.unflatten(dim, (rule.groups, -1))
    sizes: Any = [whole.shape[dim] // count] * count if rule.sizes == "equal" else rule.sizes
    return groups.split([each // rule.groups for each in sizes], dim + 1)[number].flatten(dim, dim + 1)


def same_bits(a: Any, b: Any) -> bool:
    if not isinstance(a, Tensor):
        return bool(a == b)
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(_bytes_of(a), _bytes_of(b))


def _bytes_of(values: Tensor) -> Tensor:
    return torch.empty(values.numel(), dtype=values.dtype).copy_(values.reshape(-1)).view(torch.uint8)
