"""The plan of a new checkpoint: pieces of its tensors and objects, each with how it is read from the old one.

::

    Checkpoint, Exchange ──plan_rewrite──▶ Rewrite: files ─▶ pieces: key, rectangle, read(ItemReader) ─▶ tensor or bytes

=========  ============================================================================================================
direction  piece
=========  ============================================================================================================
split      what one stored item has of a part: a view of the bytes of the fused elements
merge      a rectangle of the fused tensor, put together from the items of the parts, wherever they are
=========  ============================================================================================================

Each rank keeps a file of its own: its files become one of the new checkpoint. No data are read here.
"""

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from fsdp_offload.checkpoint import Chunk, ShardChunks, chunks_of
from fsdp_offload.checkpoint.chunks import contiguous_strides

from ..core.errors import CheckpointError
from ..core.regions import (
    Index,
    TensorRegion,
    fused_regions,
    joined,
    nothing_of,
    part_chunks,
    replaced,
    stretches,
)
from ..fuse.plan import Exchange, Fusion
from ..look.inspect import rank_of
from ..stored.items import ItemReader, typed
from ..stored.reading import Checkpoint, Path, StoredChunk, StoredObject, StoredTensor

LARGEST_PIECE_BYTES = 128 << 20
"""Pieces that are put together in memory are not larger."""


Given = TypeVar("Given", bytes, Tensor)


def writer_of(file: str) -> str:
    """Tell which files of the old checkpoint become one of the new: those of a rank."""
    rank = rank_of(file)
    return file if rank is None else str(rank)


class Piece(NamedTuple):
    """Something to write: a rectangle of a tensor, or an object."""

    key: str
    region: TensorRegion | None
    nbytes: int
    read: Callable[[ItemReader], Tensor | bytes | memoryview]


class Rewrite(NamedTuple):
    """The whole plan: keys of the new checkpoint, the pieces of each file, and paths in the state dict, if known.

    ``tensors`` have no chunks yet. ``heads``: bytes at the start of files, for those of safetensors.
    """

    tensors: Mapping[str, StoredTensor]
    objects: tuple[str, ...]
    files: Mapping[str, Sequence[Piece]]
    paths: Mapping[str, Path]
    exchange: Exchange
    heads: Mapping[str, bytes] = {}

    @property
    def nbytes(self) -> int:
        """Return the size of all pieces in bytes."""
        return sum(self.file_bytes().values())

    def file_bytes(self) -> dict[str, int]:
        """File → the size of its pieces in bytes; of files of DCP, without what is around them."""
        return {
            file: len(self.heads.get(file, b"")) + sum(piece.nbytes for piece in pieces)
            for file, pieces in self.files.items()
        }


def plan_rewrite(checkpoint: Checkpoint, exchange: Exchange) -> Rewrite:
    """Plan the new checkpoint."""
    if checkpoint.refusal:
        raise CheckpointError(checkpoint.refusal)
    return _RewriteBuilder(checkpoint, exchange).rewrite()


class _RewriteBuilder:
    def __init__(self, checkpoint: Checkpoint, exchange: Exchange) -> None:
        self._exchange = exchange
        self._checkpoint = checkpoint
        self._pieces: dict[str, list[Piece]] = {}
        self._split: dict[str, Fusion] = {}
        self._merged: dict[str, Fusion] = {}
        self._tensors: dict[str, StoredTensor] = {}
        self._objects: list[str] = []
        for fusion in exchange.fusions:
            if fusion.fused in checkpoint.tensors:
                self._split[fusion.fused] = fusion
                like = checkpoint.tensors[fusion.fused].properties
                for key, comb in zip(fusion.parts, fusion.combs, strict=True):
                    shape = comb.part_shape(fusion.shape, fusion.dim)
                    self._tensors[key] = StoredTensor(key, shape, fusion.dtype, (), like)
            else:
                self._merged.update(dict.fromkeys(fusion.parts, fusion))
                like = checkpoint.tensors[fusion.parts[0]].properties
                self._tensors[fusion.fused] = StoredTensor(fusion.fused, fusion.shape, fusion.dtype, (), like)

    def rewrite(self) -> Rewrite:
        for file, entries in self._checkpoint.items_by_file().items():
            for key, item in entries:
                if item.transforms and key not in self._exchange.objects and self._exchange.copies.get(key) != ():
                    raise CheckpointError(
                        f"{key} was written through {', '.join(item.transforms)}, which these tools do not undo; load "
                        "the checkpoint with DCP and save it without"
                    )
                if key in self._merged or key in self._split:
                    continue
                content = self._exchange.objects.get(key)
                new_keys = (key,) if content is not None else self._exchange.copies.get(key, (key,))
                for new_key in new_keys:
                    if content is not None:
                        piece = Piece(key, None, len(content), given(content))
                    elif isinstance(item, StoredObject):
                        piece = Piece(new_key, None, item.length_bytes, functools.partial(_object, item))
                    else:
                        tensor = self._checkpoint.tensors[key]
                        self._tensors[new_key] = tensor._replace(key=new_key, chunks=())
                        nbytes, region = item.numel * tensor.dtype.itemsize, TensorRegion(item.offsets, item.sizes)
                        piece = Piece(new_key, region, nbytes, functools.partial(_chunk, item, tensor.dtype))
                    self._add(file, piece)
        for fusion in self._split.values():
            self._add_split(fusion)
        for fusion in dict.fromkeys(self._merged.values()):
            chunks = [self._checkpoint.tensors[part].chunks for part in fusion.parts]
            sources = tuple(map(Index, chunks))
            for file, regions in _merged_regions(fusion, chunks).items():  # by the file that has their beginning
                for piece in (piece for region in regions for piece in gathered(fusion, region, sources)):
                    self._add(file, piece)
        new = {*self._tensors, *self._objects}
        paths = {key: path for key, path in self._checkpoint.paths.items() if key in new}
        paths |= {key: path for key, path in self._exchange.paths.items() if key in new}
        files = {f"__{number}_0.distcp": pieces for number, pieces in enumerate(self._pieces.values())}
        return Rewrite(self._tensors, tuple(dict.fromkeys(self._objects)), files, paths, self._exchange)

    def _add(self, file: str, piece: Piece) -> None:
        if piece.region is None:
            self._objects.append(piece.key)
        self._pieces.setdefault(writer_of(file), []).append(piece)

    def _add_split(self, fusion: Fusion) -> None:
        has: dict[str, dict[str, str]] = {key: {} for key in fusion.parts}  # part → writer → a file of it
        writers: dict[str, str] = {}
        for source in self._checkpoint.tensors[fusion.fused].chunks:
            writers.setdefault(writer_of(source.file), source.file)
            for region, first in _rectangles(fusion, source):
                for part, chunk in pieces_of(fusion, region):
                    key = fusion.parts[part]
                    has[key][writer_of(source.file)] = source.file
                    for small in _cut(chunk, fusion.dtype):
                        read = functools.partial(_carved, fusion.dtype, source, first, small)
                        nbytes = small.numel * fusion.dtype.itemsize
                        self._add(source.file, Piece(key, TensorRegion(small.offsets, small.sizes), nbytes, read))
        for key, own in has.items():
            # A rank that holds fused rows but none of a part has an empty chunk, as it would have saved it itself; DCP
            # keeps one of those that several ranks have.
            without = [file for writer, file in writers.items() if writer not in own]
            shape = self._tensors[key].shape
            if without and shape:
                nothing = nothing_of(shape)
                empty = torch.empty(nothing.sizes, dtype=fusion.dtype)
                self._add(without[0], Piece(key, nothing, 0, given(empty)))


def _rectangles(fusion: Fusion, source: StoredChunk) -> Iterator[tuple[TensorRegion, int]]:
    """Yield what a stored chunk has of the fused tensor, and where in its memory each rectangle begins."""
    if not fusion.is_flat:
        yield TensorRegion(source.offsets, source.sizes), 0
        return
    begin, end = source.offsets[0], source.offsets[0] + source.sizes[0]
    for chunk in chunks_of(fusion.shape, (begin, end)).chunks:
        yield TensorRegion(chunk.offsets, chunk.sizes), chunk.local_start


def pieces_of(fusion: Fusion, region: TensorRegion) -> Iterator[tuple[int, Chunk]]:
    """Divide a rectangle of a fused tensor into its parts; strides and starts are of its row-major buffer."""
    chunk = Chunk(region.offsets, region.sizes, 0, contiguous_strides(region.sizes))
    if not fusion.shape:  # a single element, and no dimension that parts would lie along
        yield 0, chunk
        return
    shard = ShardChunks(fusion.shape, region.sizes, (chunk,))
    for part, comb in enumerate(fusion.combs):
        for piece in part_chunks(shard, fusion.dim, comb).chunks:
            if piece.numel:
                yield part, piece


def _cut(chunk: Chunk, dtype: torch.dtype) -> Iterator[Chunk]:
    for small in stretches(TensorRegion(chunk.offsets, chunk.sizes), LARGEST_PIECE_BYTES // dtype.itemsize):
        moved = zip(small.offsets, chunk.offsets, chunk.local_strides, strict=True)
        start = chunk.local_start + sum((at - first) * stride for at, first, stride in moved)
        yield Chunk(small.offsets, small.sizes, start, chunk.local_strides)


def gathered(
    fusion: Fusion, region: TensorRegion, sources: Sequence[Index[StoredChunk]], cast: torch.dtype | None = None
) -> Iterator[Piece]:
    """Yield a rectangle of a fused tensor in pieces that are put together from the chunks of its parts."""
    dtype = cast or fusion.dtype
    for small in stretches(region, LARGEST_PIECE_BYTES // fusion.dtype.itemsize):
        read = functools.partial(_gathered, fusion, small, sources, dtype)
        yield Piece(fusion.fused, small, small.numel * dtype.itemsize, read)


def _merged_regions(fusion: Fusion, chunks: Sequence[Sequence[StoredChunk]]) -> dict[str, list[TensorRegion]]:
    """File → rectangles of the fused tensor, which together are all of it."""
    if not math.prod(fusion.shape):
        return {chunks[0][0].file: [nothing_of(fusion.shape)]} if chunks[0] else {}
    count, dim = len(fusion.parts), fusion.dim
    takes_turns = all(comb.length == 1 and comb.blocks > 1 for comb in fusion.combs)
    by_file: dict[str, list[TensorRegion]] = {}
    # Where the parts take turns along the dimension, the first one says what is stored where: one row each would be
    # too many chunks. The rows of the others are fetched from wherever they are.
    for number, stored in enumerate(chunks[:1] if takes_turns else chunks):
        for chunk in stored:
            if takes_turns:
                place = (replaced(of, dim, of[dim] * count) for of in (chunk.offsets, chunk.sizes))
                regions = [TensorRegion(*place)] if chunk.numel else []
            else:
                regions = list(fused_regions(chunk, dim, fusion.combs[number]))
            by_file.setdefault(chunk.file, []).extend(regions)
    return {file: joined(regions, fusion.dim) for file, regions in by_file.items() if regions}


def given(content: Given) -> Callable[[ItemReader], Given]:
    """Return what gives this, whatever is read."""
    return lambda reader: content


def _object(item: StoredObject, reader: ItemReader) -> memoryview:
    reader.check_data(item)
    return reader.view(item)


def _chunk(chunk: StoredChunk, dtype: torch.dtype, reader: ItemReader) -> Tensor:
    # A view of the file, which is not aligned: it is only written.
    return typed(reader.bits(chunk, dtype).view(*chunk.sizes, dtype.itemsize), dtype)


def _carved(dtype: torch.dtype, source: StoredChunk, first: int, part: Chunk, reader: ItemReader) -> Tensor:
    bits = reader.bits(source, dtype)
    view = _view(bits, part, first * dtype.itemsize + int(bits.storage_offset()))
    return typed(torch.empty(view.shape, dtype=torch.uint8).copy_(view), dtype)


def _gathered(
    fusion: Fusion, region: TensorRegion, sources: Sequence[Index[StoredChunk]], dtype: torch.dtype, reader: ItemReader
) -> Tensor:
    whole = torch.empty(*region.sizes, fusion.dtype.itemsize, dtype=torch.uint8)
    for part, piece in pieces_of(fusion, region) if region.numel else ():
        into = _view(whole.view(-1, fusion.dtype.itemsize), piece, 0)
        for source in sources[part].overlapping(piece):
            reader.paste(source, fusion.dtype, TensorRegion(piece.offsets, piece.sizes), into)
    return typed(whole, fusion.dtype).to(dtype)


def _view(bits: Tensor, chunk: Chunk, start: int) -> Tensor:
    itemsize = bits.shape[-1]
    strides = (stride * itemsize for stride in chunk.local_strides)
    return bits.as_strided((*chunk.sizes, itemsize), (*strides, 1), start + chunk.local_start * itemsize)


def in_files(pieces: Iterable[Piece], shard_bytes: int) -> Iterator[list[Piece]]:
    """Divide pieces into files, in their order, as many as fit together."""
    shard: list[Piece] = []
    filled = 0
    for piece in pieces:
        if shard and filled + piece.nbytes > shard_bytes:
            yield shard
            shard, filled = [], 0
        shard.append(piece)
        filled += piece.nbytes
    if shard:
        yield shard
