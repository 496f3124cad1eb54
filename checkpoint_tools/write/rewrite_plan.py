"""The plan of a new checkpoint: every item with its place in a file, and what it is made of. No data are read.

::

    Checkpoint, Exchange ──plan_rewrite──▶ Rewrite: files ─▶ items ─▶ kept bytes, given bytes, or filled by tasks
                                                    tasks: rectangles of fused tensors, between old items and new ones

A file of the new checkpoint has the name of the old file whose items it takes, in their order: so who reads and writes
which file stays as it was. Lengths (:mod:`checkpoint_tools.stored.envelope`) and offsets are known beforehand.

=========  ============================================================================================================
direction  task
=========  ============================================================================================================
split      what one stored item has of the fused tensor: read once, row by row, and taken apart into items of the parts
merge      one new item of the fused tensor: put together from items of the parts, wherever they are, written once
=========  ============================================================================================================
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from fsdp_offload.checkpoint import Chunk, ShardChunks, chunks_of
from fsdp_offload.checkpoint.rectangles import contiguous_strides

from ..core.parts import part_chunks
from ..core.regions import Index, TensorRegion, contains, fused_regions, joined, stretches
from ..fused.fusions import Exchange, Fusion
from ..look.inspect import rank_of
from ..stored.envelope import Envelope, envelope_of
from ..stored.reading import Checkpoint, StoredChunk, StoredObject

Shape = tuple[int, ...]
Stored = StoredChunk | StoredObject


class NewTensor(NamedTuple):
    """A key of the new checkpoint that is a tensor."""

    key: str
    shape: Shape
    dtype: torch.dtype
    like: str  # a key of the old checkpoint with its other properties


class Entry(NamedTuple):
    """Metadata of an item: the key, and for tensors the rectangle that it holds."""

    key: str
    region: TensorRegion | None


@dataclass(eq=False)
class NewItem:
    """A stretch of bytes of a new file.

    Attributes:
        entries: what it is; old checkpoints have several empty chunks in one item.
        content: the old item whose bytes it has; other bytes; or what comes around elements that tasks fill in.
        number: of all items, in the order of the files.
        file: where it is; set when the files are laid out, like ``number`` and ``offset_bytes``.
        offset_bytes: where in the file.
    """

    entries: tuple[Entry, ...]
    content: Stored | bytes | Envelope
    number: int = -1
    file: str = ""
    offset_bytes: int = 0

    @property
    def length_bytes(self) -> int:
        """Return the length of the whole item."""
        return len(self.content) if isinstance(self.content, bytes) else self.content.length_bytes

    @property
    def region(self) -> TensorRegion:
        """Return the rectangle that it holds."""
        (entry,) = self.entries
        assert entry.region is not None
        return entry.region

    @property
    def offsets(self) -> Shape:
        """Return the rectangle's offsets."""
        return self.region.offsets

    @property
    def sizes(self) -> Shape:
        """Return the rectangle's sizes."""
        return self.region.sizes


class SplitTask(NamedTuple):
    """A rectangle of a fused tensor that is read from one item, in the order of its memory.

    ``first`` is its first element there, and ``targets`` are the items of each part.
    """

    fusion: Fusion
    region: TensorRegion
    source: StoredChunk
    first: int
    targets: tuple[tuple[NewItem, ...], ...]

    def items(self) -> list[NewItem]:
        """List the items that it fills."""
        return [item for items in self.targets for item in items]


class MergeTask(NamedTuple):
    """A rectangle of a fused tensor that is one new item; ``sources`` are the stored chunks of each part.

    ``dtype`` is that of the new item, if it is another one.
    """

    fusion: Fusion
    region: TensorRegion
    sources: tuple[Index[StoredChunk], ...]
    target: NewItem
    dtype: torch.dtype | None = None

    def items(self) -> list[NewItem]:
        """List the items that it fills."""
        return [self.target]


Task = SplitTask | MergeTask


class Piece(NamedTuple):
    """Share of one part in a rectangle of a fused tensor, as places in that rectangle's memory."""

    part: int
    chunk: Chunk


class Rewrite(NamedTuple):
    """The whole plan.

    Attributes:
        tensors: of the new checkpoint.
        objects: keys of the new checkpoint that are not tensors.
        files: name → items, in the order of their bytes.
        tasks: by the file of which they fill items.
        exchange: of which it is the plan.
    """

    tensors: Mapping[str, NewTensor]
    objects: tuple[str, ...]
    files: Mapping[str, tuple[NewItem, ...]]
    tasks: Mapping[str, tuple[Task, ...]]
    exchange: Exchange

    @property
    def nbytes(self) -> int:
        """Return the size of all files in bytes."""
        return sum(item.length_bytes for items in self.files.values() for item in items)

    def file_bytes(self) -> dict[str, int]:
        """File → its length."""
        return {file: sum(item.length_bytes for item in items) for file, items in self.files.items()}


def pieces_of(fusion: Fusion, region: TensorRegion) -> Iterator[Piece]:
    """Divide a rectangle of a fused tensor into its parts; strides and starts are of its row-major buffer."""
    chunk = Chunk(region.offsets, region.sizes, 0, contiguous_strides(region.sizes))
    if not fusion.shape:  # a single element, and no dimension that parts would lie along
        yield Piece(0, chunk)
        return
    shard = ShardChunks(fusion.shape, region.sizes, (chunk,))
    for part, comb in enumerate(fusion.combs):
        for piece in part_chunks(shard, fusion.dim, comb).chunks:
            if piece.numel:
                yield Piece(part, piece)


def plan_rewrite(checkpoint: Checkpoint, exchange: Exchange) -> Rewrite:
    """Lay out the new checkpoint."""
    builder = _RewriteBuilder(checkpoint, exchange)
    for file, entries in checkpoint.items_by_file().items():
        for key, item in entries:
            builder.add(file, key, item)
    return builder.rewrite()


class _RewriteBuilder:
    def __init__(self, checkpoint: Checkpoint, exchange: Exchange) -> None:
        self._exchange = exchange
        self._checkpoint = checkpoint
        self._files: dict[str, list[NewItem]] = {}
        self._tasks: dict[str, list[Task]] = {}
        self._kept: dict[tuple[str, str, int], NewItem] = {}
        self._split: dict[str, Fusion] = {}
        self._merged: dict[str, _Merging] = {}
        self._nothing: dict[str, dict[str, bool]] = {}  # part → rank → whether it has something
        self._tensors: dict[str, NewTensor] = {}
        self._objects: list[str] = []
        for fusion in exchange.fusions:
            self._add_fusion(fusion)

    def _add_fusion(self, fusion: Fusion) -> None:
        if fusion.fused in self._checkpoint.tensors:
            self._split[fusion.fused] = fusion
            for key, comb in zip(fusion.parts, fusion.combs, strict=True):
                shape = comb.part_shape(fusion.shape, fusion.dim)
                self._tensors[key] = NewTensor(key, shape, fusion.dtype, fusion.fused)
        else:
            merging = _Merging(fusion, self._checkpoint)
            self._merged.update(dict.fromkeys(fusion.parts, merging))
            self._tensors[fusion.fused] = NewTensor(fusion.fused, fusion.shape, fusion.dtype, fusion.parts[0])

    def add(self, file: str, key: str, item: Stored) -> None:
        """Plan the next item of an old file."""
        if key in self._split and isinstance(item, StoredChunk):
            self._add_split(file, self._split[key], item)
        elif key in self._merged:
            self._add_merged(file, self._merged[key])
        elif key in self._exchange.objects:
            self._objects.append(key)
            self._append(file, NewItem((Entry(key, None),), self._exchange.objects[key]))
        else:
            for new_key in self._exchange.copies.get(key, (key,)):
                self._keep(file, key, new_key, item)

    def _append(self, file: str, item: NewItem) -> None:
        self._files.setdefault(file, []).append(item)

    def _keep(self, file: str, key: str, new_key: str, item: Stored) -> None:
        region = TensorRegion(item.offsets, item.sizes) if isinstance(item, StoredChunk) else None
        if region is None:
            self._objects.append(new_key)
        else:
            tensor = self._checkpoint.tensors[key]
            self._tensors[new_key] = NewTensor(new_key, tensor.shape, tensor.dtype, key)
        entry = Entry(new_key, region)
        known = self._kept.get((new_key, file, item.offset_bytes))
        if known is None:
            self._kept[new_key, file, item.offset_bytes] = made = NewItem((entry,), item)
            self._append(file, made)
        else:
            known.entries += (entry,)

    # --- splitting ---

    def _add_split(self, file: str, fusion: Fusion, source: StoredChunk) -> None:
        targets: list[list[NewItem]] = [[] for _ in fusion.parts]
        tasks = []
        for region, first in _rectangles(fusion, source):
            of_region: list[list[NewItem]] = [[] for _ in fusion.parts]
            for piece in pieces_of(fusion, region):
                entry = Entry(fusion.parts[piece.part], TensorRegion(piece.chunk.offsets, piece.chunk.sizes))
                of_region[piece.part].append(NewItem((entry,), envelope_of(piece.chunk.sizes, fusion.dtype)))
            if region.numel:
                tasks.append(SplitTask(fusion, region, source, first, tuple(map(tuple, of_region))))
            for all_items, items in zip(targets, of_region, strict=True):
                all_items += items
        for key, items in zip(fusion.parts, targets, strict=True):
            for item in items:
                self._append(file, item)
            had = self._nothing.setdefault(key, {})
            had[_writer_of(file)] = bool(items) or had.get(_writer_of(file), False)
        self._tasks.setdefault(file, []).extend(tasks)

    def _add_nothings(self) -> None:
        """Add an empty chunk where a rank holds fused rows but none of a part.

        As the ranks would have saved it themselves; DCP keeps one of those that several ranks have.
        """
        for fusion in self._split.values():
            for key, comb in zip(fusion.parts, fusion.combs, strict=True):
                without = [writer for writer, has in self._nothing.get(key, {}).items() if not has]
                shape = comb.part_shape(fusion.shape, fusion.dim)
                if without and shape:
                    file = next(
                        chunk.file
                        for chunk in self._checkpoint.tensors[fusion.fused].chunks
                        if _writer_of(chunk.file) == without[0]
                    )
                    region = TensorRegion((shape[0], *(0 for _ in shape[1:])), (0, *shape[1:]))
                    self._append(file, NewItem((Entry(key, region),), envelope_of(region.sizes, fusion.dtype)))

    # --- merging ---

    def _add_merged(self, file: str, merging: "_Merging") -> None:
        fusion = merging.fusion
        for region in merging.regions.pop(file, ()):
            entry = Entry(fusion.fused, region)
            item = NewItem((entry,), envelope_of(region.sizes, fusion.dtype))
            self._append(file, item)
            if region.numel:
                self._tasks.setdefault(file, []).append(MergeTask(fusion, region, merging.sources, item))

    # --- the end ---

    def rewrite(self) -> Rewrite:
        """Return the plan, with every item placed."""
        self._add_nothings()
        place_items(self._files)
        return Rewrite(
            tensors=self._tensors,
            objects=tuple(dict.fromkeys(self._objects)),
            files={file: tuple(items) for file, items in self._files.items()},
            tasks={file: tuple(tasks) for file, tasks in self._tasks.items()},
            exchange=self._exchange,
        )


def _rectangles(fusion: Fusion, source: StoredChunk) -> Iterator[tuple[TensorRegion, int]]:
    """Yield what a stored chunk has of the fused tensor, and where in its memory each rectangle begins."""
    if not fusion.is_flat:
        yield TensorRegion(source.offsets, source.sizes), 0
        return
    begin, end = source.offsets[0], source.offsets[0] + source.sizes[0]
    for chunk in chunks_of(fusion.shape, (begin, end)).chunks:
        yield TensorRegion(chunk.offsets, chunk.sizes), chunk.local_start


def _writer_of(file: str) -> str:
    rank = rank_of(file)
    return file if rank is None else str(rank)


class _Merging:
    """Future places of a fused tensor made of parts."""

    def __init__(self, fusion: Fusion, checkpoint: Checkpoint) -> None:
        self.fusion = fusion
        chunks = [checkpoint.tensors[part].chunks for part in fusion.parts]
        self.sources = tuple(map(Index, chunks))
        self.regions = _merged_regions(fusion, chunks)


def _merged_regions(fusion: Fusion, chunks: Sequence[Sequence[StoredChunk]]) -> dict[str, list[TensorRegion]]:
    """File → rectangles of the fused tensor, which together are all of it."""
    if not math.prod(fusion.shape):
        nothing = TensorRegion((fusion.shape[0], *(0 for _ in fusion.shape[1:])), (0, *fusion.shape[1:]))
        return {chunks[0][0].file: [nothing]} if chunks[0] else {}
    takes_turns = all(comb.length == 1 and comb.blocks > 1 for comb in fusion.combs)
    by_file: dict[str, list[TensorRegion]] = {}
    # Where the parts take turns along the dimension, the first one says what is stored where: one row each would be
    # too many chunks. The rows of the others are fetched from wherever they are.
    for number, stored in enumerate(chunks[:1] if takes_turns else chunks):
        for chunk in stored:
            regions = _turns(chunk, fusion) if takes_turns else fused_regions(chunk, fusion.dim, fusion.combs[number])
            by_file.setdefault(chunk.file, []).extend(regions)
    return {file: joined(regions, fusion.dim) for file, regions in by_file.items() if regions}


def _turns(chunk: StoredChunk, fusion: Fusion) -> Iterable[TensorRegion]:
    if chunk.numel:
        count, dim = len(fusion.parts), fusion.dim
        at, size = chunk.offsets[dim] * count, chunk.sizes[dim] * count
        yield TensorRegion(
            (*chunk.offsets[:dim], at, *chunk.offsets[dim + 1 :]), (*chunk.sizes[:dim], size, *chunk.sizes[dim + 1 :])
        )


# --- units of work ---------------------------------------------------------------------------------------------------


class ByteCopy(NamedTuple):
    """Bytes of an old file that are taken over."""

    source_file: str
    source_bytes: int
    file: str
    offset_bytes: int
    length_bytes: int


class Write(NamedTuple):
    """Bytes that are known."""

    file: str
    offset_bytes: int
    content: bytes


class Work(NamedTuple):
    """A rectangle of a task. ``closes``: it fills its items alone, so that it also writes what is around them."""

    task: Task
    region: TensorRegion
    closes: bool


Step = ByteCopy | Write | Work


class Unit(NamedTuple):
    """Work of one thread, recorded when it is safe on the disk."""

    number: int
    steps: tuple[Step, ...]
    files: frozenset[str]
    nbytes: int


_UNIT_BYTES = 256 << 20
_MIN_UNIT_BYTES = 4 << 20
_UNITS = 64


def unit_bytes_of(nbytes: int) -> int:
    """Choose the size of units: enough units for all threads, and never too many to record."""
    return max(min(nbytes // _UNITS, _UNIT_BYTES), _MIN_UNIT_BYTES)


def units_of(rewrite: Rewrite, unit_bytes: int) -> list[Unit]:
    """List all work in the order of the files; it depends on the plan alone, not on memory or threads."""
    units: list[Unit] = []
    steps: list[Step] = []
    filled = 0

    def close() -> None:
        nonlocal steps, filled
        if steps:
            units.append(Unit(len(units), tuple(steps), frozenset(_files_of(steps)), filled))
        steps, filled = [], 0

    for file, items in rewrite.files.items():
        for step, nbytes in [*_byte_steps(items, unit_bytes), *_work_steps(rewrite.tasks.get(file, ()), unit_bytes)]:
            if filled and filled + nbytes > unit_bytes:
                close()
            steps.append(step)
            filled += nbytes
    close()
    return units


def _files_of(steps: Iterable[Step]) -> Iterator[str]:
    for step in steps:
        if isinstance(step, Work):
            yield from (item.file for item in step.task.items())
        else:
            yield step.file


def _work_steps(tasks: Iterable[Task], unit_bytes: int) -> Iterator[tuple[Work, int]]:
    for task in tasks:
        itemsize = task.fusion.dtype.itemsize
        regions = list(stretches(task.region, unit_bytes // itemsize))
        for region in regions:
            yield Work(task, region, closes=len(regions) == 1), region.numel * itemsize


def _byte_steps(items: Iterable[NewItem], unit_bytes: int) -> Iterator[tuple[Step, int]]:
    """Known and kept bytes; kept items that follow each other in both files are one step, up to the size of a unit."""
    run: ByteCopy | None = None
    for item in items:
        content = item.content
        if isinstance(content, Stored):
            step = ByteCopy(content.file, content.offset_bytes, item.file, item.offset_bytes, content.length_bytes)
            if run is not None and _follows(run, step):
                run = run._replace(length_bytes=run.length_bytes + step.length_bytes)
            else:
                yield from _cut(run, unit_bytes)
                run = step
        elif isinstance(content, bytes):
            yield Write(item.file, item.offset_bytes, content), len(content)
        elif content.data_bytes == 0:
            whole = content.head + content.tail(0)
            yield Write(item.file, item.offset_bytes, whole), len(whole)
    yield from _cut(run, unit_bytes)


def _follows(run: ByteCopy, step: ByteCopy) -> bool:
    return (
        run.source_file == step.source_file
        and run.source_bytes + run.length_bytes == step.source_bytes
        and run.offset_bytes + run.length_bytes == step.offset_bytes
    )


def _cut(run: ByteCopy | None, unit_bytes: int) -> Iterator[tuple[ByteCopy, int]]:
    if run is None:
        return
    for start in range(0, run.length_bytes, unit_bytes):
        length = min(unit_bytes, run.length_bytes - start)
        moved = run._replace(
            source_bytes=run.source_bytes + start, offset_bytes=run.offset_bytes + start, length_bytes=length
        )
        yield moved, length


def target_of(items: Sequence[NewItem], piece: Chunk) -> NewItem:
    """Return the task's item for the part that has ``piece``."""
    return items[0] if len(items) == 1 else next(item for item in items if contains(item, piece))


def place_items(files: Mapping[str, Sequence[NewItem]]) -> None:
    """Give every item its number, and its place behind the others of its file."""
    number = 0
    for file, items in files.items():
        offset = 0
        for item in items:
            item.number, item.file, item.offset_bytes = number, file, offset
            number, offset = number + 1, offset + item.length_bytes
