"""The plan of a new checkpoint: pieces of its tensors and objects, each with how it is read from the old one.

::

    Checkpoint, Exchange ──plan_rewrite──▶ Rewrite: files ─▶ pieces: key, rectangle, read(ItemReader) ─▶ tensor or bytes

=========  ============================================================================================================
direction  piece
=========  ============================================================================================================
split      what one stored item has of a part: a view of the bytes of the fused elements
merge      a rectangle of the fused tensor, put together from the items of the parts, wherever they are
=========  ============================================================================================================

Each rank keeps files of its own, of at most about 1 GiB. No data are read here.
"""

import bisect
import functools
import io
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fsdp_offload.checkpoint import Chunk, ShardChunks, chunks_of
from fsdp_offload.checkpoint.chunks import contiguous_strides

from ..core.regions import Placed, TensorRegion, common, nothing_of, part_chunks, stretches, whole_of
from ..core.text import CheckpointError
from ..fuse.plan import Exchange, Fusion
from ..look.inspect import rank_of
from ..stored.checkpoint import Checkpoint, Path, StoredChunk, StoredObject, StoredTensor
from ..stored.items import ItemReader, typed

LARGEST_PIECE_BYTES = 128 << 20
"""Pieces that are put together in memory are not larger."""

_FILE_BYTES = 1 << 30  # of a rank that has more, several threads write several files

Read = Callable[[ItemReader], Tensor | bytes | memoryview]


class Piece(NamedTuple):
    """Something to write: a rectangle of a tensor, or an object."""

    key: str
    region: TensorRegion | None
    nbytes: int
    read: Read


class Rewrite(NamedTuple):
    """A new checkpoint that is planned, and not yet written."""

    checkpoint: Checkpoint  # the old one, which was found to be whole
    tensors: Mapping[str, StoredTensor]  # of the new one; they have no chunks yet
    objects: tuple[str, ...]
    files: Mapping[str, Sequence[Piece]]  # file → what is written to it
    paths: Mapping[str, Path]  # where values are in the nested state dict, if known
    exchange: Exchange = Exchange()  # the plan that this one follows, if any
    heads: Mapping[str, bytes] = {}  # bytes at the start of files, for those of safetensors
    notes: tuple[str, ...] = ()  # what people should know
    beside: Mapping[str, bytes | None] = {}  # files beside the data, with their new content; None, to copy the old one
    headline: str = ""  # says in a line what is written

    @property
    def keys(self) -> int:
        """Count the keys of the new checkpoint."""
        return len(self.tensors) + len(self.objects)

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
    new = _NewFiles(checkpoint)
    fused = {fusion.fused: fusion for fusion in exchange.fusions if fusion.fused in checkpoint.tensors}
    merged = {part: fusion for fusion in exchange.fusions if fusion.fused not in fused for part in fusion.parts}
    for fusion in exchange.fusions:
        is_split = fusion.fused in fused
        for key, shape in fusion.part_shapes() if is_split else [(fusion.fused, fusion.shape)]:
            new.tensors[key] = StoredTensor(key, shape, fusion.dtype, ())
    for file, entries in checkpoint.items_by_file().items():
        for key, item in entries:
            if key in exchange.objects:
                torch.save(exchange.objects[key], buffer := io.BytesIO())
                content = buffer.getvalue()
                new.add(file, Piece(key, None, len(content), given(content)))
            elif key not in fused and key not in merged:
                for new_key in exchange.copies.get(key, (key,)):
                    new.add_copy(file, new_key, key, item)
    for fusion in fused.values():
        new.add_split(fusion)
    for fusion in dict.fromkeys(merged.values()):
        new.add_merged(fusion)
    paths = {key: path for key, path in {**checkpoint.paths, **exchange.paths}.items() if key in new.keys}
    files = {
        f"__{rank}_{number}.distcp": some
        for rank, pieces in enumerate(new.pieces.values())
        for number, some in enumerate(in_files(pieces, _FILE_BYTES))
    }
    return Rewrite(checkpoint, new.tensors, tuple(new.objects), files, paths, exchange)


class _NewFiles:
    """Pieces by the rank whose file they go to."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.pieces: dict[int | str, list[Piece]] = {}
        self.tensors: dict[str, StoredTensor] = {}
        self.objects: dict[str, None] = {}

    @property
    def keys(self) -> set[str]:
        return {*self.tensors, *self.objects}

    def add(self, file: str, piece: Piece) -> None:
        if piece.region is None:
            self.objects[piece.key] = None
        self.pieces.setdefault(_writer_of(file), []).append(piece)

    def add_copy(self, file: str, new_key: str, key: str, item: StoredChunk | StoredObject) -> None:
        if isinstance(item, StoredObject):
            self.add(file, Piece(new_key, None, item.length_bytes, functools.partial(_object, item)))
            return
        tensor = self.checkpoint.tensors[key]
        self.tensors[new_key] = tensor._replace(key=new_key, chunks=())
        nbytes, region = item.numel * tensor.dtype.itemsize, TensorRegion(item.offsets, item.sizes)
        everything = Chunk(*region, 0, contiguous_strides(item.sizes))
        self.add(file, Piece(new_key, region, nbytes, functools.partial(_carved, tensor.dtype, item, everything)))

    def add_split(self, fusion: Fusion) -> None:
        stored, empty = self.checkpoint.tensors[fusion.fused].chunks, dict.fromkeys(fusion.parts)
        for source in stored:
            for region, first in _rectangles(fusion, source):
                for part, chunk in _pieces_of(fusion, region):
                    key = fusion.parts[part]
                    empty.pop(key, None)
                    for small in stretches(TensorRegion(chunk.offsets, chunk.sizes), _largest_numel(fusion.dtype)):
                        moved = zip(small.offsets, chunk.offsets, chunk.local_strides, strict=True)
                        start = first + chunk.local_start + sum((at - from_) * step for at, from_, step in moved)
                        cut = Chunk(*small, start, chunk.local_strides)
                        read = functools.partial(_carved, fusion.dtype, source, cut)
                        self.add(source.file, Piece(key, small, small.numel * fusion.dtype.itemsize, read))
        for key in empty if stored and fusion.shape else ():
            nothing = nothing_of(self.tensors[key].shape)
            self.add(stored[0].file, Piece(key, nothing, 0, given(torch.empty(nothing.sizes, dtype=fusion.dtype))))

    def add_merged(self, fusion: Fusion) -> None:
        chunks = [self.checkpoint.tensors[part].chunks for part in fusion.parts]
        sources, stored = tuple(map(_Index, chunks)), [chunk for each in chunks for chunk in each]
        # As large as what a rank has of all parts, and in turns to the same files: loading reads no more than before.
        shares = (len(fusion.parts) * chunk.numel for chunk in stored)
        numel = min(max(shares, default=1), _largest_numel(fusion.dtype))
        files = itertools.cycle(dict.fromkeys(chunk.file for chunk in stored))
        for region, file in zip(stretches(whole_of(fusion.shape), numel), files, strict=False):
            read = functools.partial(_gathered, fusion, region, sources)
            self.add(file, Piece(fusion.fused, region, region.numel * fusion.dtype.itemsize, read))


def _writer_of(file: str) -> int | str:
    """Tell which files of the old checkpoint become one of the new: those of a rank."""
    rank = rank_of(file)
    return file if rank is None else rank


def _rectangles(fusion: Fusion, source: StoredChunk) -> Iterator[tuple[TensorRegion, int]]:
    """Yield what a stored chunk has of the fused tensor, and where in its memory each rectangle begins."""
    if not fusion.is_flat:
        yield TensorRegion(source.offsets, source.sizes), 0
        return
    begin, end = source.offsets[0], source.offsets[0] + source.sizes[0]
    for chunk in chunks_of(fusion.shape, (begin, end)).chunks:
        yield TensorRegion(chunk.offsets, chunk.sizes), chunk.local_start


class _Index:
    """Chunks to look up by what they have in common with a rectangle: fast where dimension 0 is divided."""

    def __init__(self, chunks: Iterable[StoredChunk]) -> None:
        self._chunks = sorted((each for each in chunks if each.numel), key=lambda each: each.offsets)
        self._starts = [(*each.offsets, 0)[0] for each in self._chunks]
        ends = ((*each.offsets, 0)[0] + (*each.sizes, 1)[0] for each in self._chunks)
        self._ends = list(itertools.accumulate(ends, max))

    def overlapping(self, region: Placed) -> list[StoredChunk]:
        """List those that have elements in common with ``region``."""
        begin = (*region.offsets, 0)[0]
        first = bisect.bisect_right(self._ends, begin)
        last = bisect.bisect_left(self._starts, begin + (*region.sizes, 1)[0])
        return [each for each in self._chunks[first:last] if common(each, region) is not None]


def _pieces_of(fusion: Fusion, region: TensorRegion) -> Iterator[tuple[int, Chunk]]:
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


def given(content: bytes | Tensor) -> Read:
    """Return what gives this, whatever is read."""
    return lambda reader: content


def _object(item: StoredObject, reader: ItemReader) -> memoryview:
    reader.check(item, data=True)
    return reader.view(item)


def _carved(dtype: torch.dtype, source: StoredChunk, part: Chunk, reader: ItemReader) -> Tensor:
    view = _view(reader.bits(source, dtype), part)
    if view.is_contiguous():  # written from where it is, as a storage of its own: torch.save writes whole storages
        return typed(torch.from_numpy(view.numpy()), dtype)
    return typed(torch.empty(view.shape, dtype=torch.uint8).copy_(view), dtype)


def _largest_numel(dtype: torch.dtype) -> int:
    return LARGEST_PIECE_BYTES // dtype.itemsize


def _gathered(fusion: Fusion, region: TensorRegion, sources: Sequence[_Index], reader: ItemReader) -> Tensor:
    whole = torch.empty(*region.sizes, fusion.dtype.itemsize, dtype=torch.uint8)
    for part, piece in _pieces_of(fusion, region) if region.numel else ():
        into = _view(whole.view(-1, fusion.dtype.itemsize), piece)
        for source in sources[part].overlapping(piece):
            reader.paste(source, fusion.dtype, TensorRegion(piece.offsets, piece.sizes), into)
    return typed(whole, fusion.dtype)


def _view(bits: Tensor, chunk: Chunk) -> Tensor:
    """View a rectangle in the bytes of elements, one row for each."""
    itemsize = bits.shape[-1]
    strides = (stride * itemsize for stride in chunk.local_strides)
    start = int(bits.storage_offset()) + chunk.local_start * itemsize
    return bits.as_strided((*chunk.sizes, itemsize), (*strides, 1), start)


def in_files(pieces: Iterable[Piece], shard_bytes: int) -> list[list[Piece]]:
    """Divide pieces into files, in their order, as many as fit together."""
    shards: list[list[Piece]] = []
    filled = 0
    for piece in pieces:
        if not shards or filled + piece.nbytes > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(piece)
        filled += piece.nbytes
    return shards
