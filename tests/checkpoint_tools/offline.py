"""Checkpoints that are rewritten or converted without a process group: made, in this process, and looked into."""

import io
import math
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from checkpoint_tools.convert import convert
from checkpoint_tools.convert.convert import Wanted
from checkpoint_tools.core.regions import whole_of
from checkpoint_tools.fuse.request import Request, Way, complete, with_told
from checkpoint_tools.fuse.rules import Rule
from checkpoint_tools.look.verify import check_structure
from checkpoint_tools.rewrite import rewrite
from checkpoint_tools.stored.checkpoint import Checkpoint
from checkpoint_tools.stored.items import ItemReader
from checkpoint_tools.stored.reading import open_checkpoint
from fsdp_offload.checkpoint import Chunk, ShardChunks, ShardTensor
from fsdp_offload.checkpoint.chunks import contiguous_strides

FUSED, DOWN = "mlp.gate_up.weight", "mlp.down.weight"
GATE, UP = "mlp.gate.weight", "mlp.up.weight"

STATE: dict[str, Any] = {
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

Rectangle = tuple[tuple[int, ...], tuple[int, ...]]


def rule(**fields: Any) -> Rule:
    fields = {"fused": "{p}gate_up.weight", "parts": ("{p}gate.weight", "{p}up.weight"), **fields}
    return Rule(**fields)


def rewritten(
    way: Way,
    source: Path,
    destination: Path | str,
    *rules: Rule,
    values: dict[str, float] | None = None,
    excluded: Sequence[str] = (),
    only: Sequence[str] = (),
    is_sure: bool = False,
    threads: int = 2,
    max_memory_bytes: int = 1 << 20,
) -> Checkpoint:
    """The new checkpoint; it is whole, and sealed."""
    rewrite.check_destination(str(source), str(destination))
    checkpoint, sidecars = rewrite.open_whole(str(source), 1)
    asked = complete(checkpoint, way, Request(rules, values or {}, excluded, only, is_sure))
    planned = rewrite.with_record(rewrite.plan(checkpoint, sidecars, way, asked), way, asked)
    rewrite.write(planned, str(destination), threads, max_memory_bytes)
    made = made_whole(destination, is_sealed=True)
    for file, entries in made.items_by_file().items():  # one after the other
        ranges = {(item.offset_bytes, item.length_bytes) for _, item in entries}
        assert sum(length for _, length in ranges) == made.folder.size_bytes(file)
    return made


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
    planned, _ = convert.plan(str(source), wanted, threads=1)
    rewrite.write(planned, str(destination), threads, max_memory_bytes)
    return made_whole(destination, is_sealed=not planned.heads)


def made_whole(destination: Path | str, *, is_sealed: bool) -> Checkpoint:
    made = open_checkpoint(destination)
    assert (made.manifest is not None) == is_sealed
    problems, files = check_structure(made, 1)
    assert not problems
    assert not files.notes
    return made


def told(
    checkpoint: Checkpoint, rules: Iterable[Rule], given: Mapping[str, float]
) -> tuple[dict[str, float], list[str]]:
    """The values that rules name, and what is said about those that the checkpoint tells."""
    return with_told(checkpoint, {name for rule in rules for name in rule.value_names}, given)


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


def content(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Any bits; of a bool, one of two."""
    generator = torch.Generator().manual_seed(seed)
    high = 2 if dtype == torch.bool else 256
    numbers = torch.randint(0, high, (math.prod(shape) * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return numbers.view(dtype).view(shape)


def values_of(checkpoint: Checkpoint) -> dict[str, Any]:
    """Everything, by flat key."""
    reader = ItemReader(checkpoint)
    found: dict[str, Any] = {key: reader.read_object(item) for key, item in checkpoint.objects.items()}
    for key, tensor in checkpoint.tensors.items():
        whole = torch.empty(tensor.shape, dtype=tensor.dtype)
        for chunk in tensor.chunks:
            place = tuple(slice(at, at + n) for at, n in zip(chunk.offsets, chunk.sizes, strict=True))
            whole[place] = reader.read_chunk(chunk, tensor.dtype)
        found[key] = whole
    return found


def tensor_of(checkpoint: Checkpoint, key: str) -> Tensor:
    """One of these."""
    tensor = checkpoint.tensors[key]
    return ItemReader(checkpoint).read_region(tensor, whole_of(tensor.shape))


def chunks_of_keys(checkpoint: Checkpoint) -> dict[str, list[Rectangle]]:
    return {key: [(c.offsets, c.sizes) for c in tensor.chunks] for key, tensor in checkpoint.tensors.items()}


def same_bits(a: Any, b: Any) -> bool:
    if not isinstance(a, Tensor):
        return bool(a == b)
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(_bytes_of(a), _bytes_of(b))


def _bytes_of(values: Tensor) -> Tensor:
    return torch.empty(values.numel(), dtype=values.dtype).copy_(values.reshape(-1)).view(torch.uint8)


def assert_same(a: Checkpoint, b: Checkpoint) -> None:
    """All values, bit by bit, and where each was in the nested state dict."""
    first, second = values_of(a), values_of(b)
    assert first.keys() == second.keys()
    assert [key for key, value in first.items() if not same_bits(value, second[key])] == []
    assert a.paths == b.paths


def check_zip_files(checkpoint: Checkpoint) -> None:
    """Every item is a zip file whose checksums are right."""
    reader = ItemReader(checkpoint)
    for key, item in checkpoint.items():
        with zipfile.ZipFile(io.BytesIO(reader.view(item))) as archive:
            assert archive.testzip() is None, key
