"""Carry out a plan: read, take apart or put together, and write, block by block, in several threads.

::

    unit ─▶ ByteCopy:  old file ──────────────block by block────────────▶ new file
            Work:      old items ──gather──▶ block of a fused ──scatter──▶ new items
                                             tensor, in memory

A *block* is a stretch of a fused tensor that fits into this thread's share of the memory. Every part that it has lies
in one stretch of an item of that part, so what is written is in order in each item, and its checksum is taken on the
way.
"""

import collections
import contextlib
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from typing import BinaryIO

import torch
from torch import Tensor

from fsdp_offload.checkpoint import Chunk

from ..core.errors import CheckpointError
from ..core.regions import TensorRegion, common, position_in, stretches
from ..core.sizes import MAX_ITEM_BYTES, block_bounds, thread_bytes
from ..look.data_checks import DataChecks
from ..stored.envelope import Envelope, combined_crc
from ..stored.item_archive import crc32, read_framing
from ..stored.items import ItemReader
from ..stored.manifest import Item
from ..stored.reading import Checkpoint, StoredChunk, StoredObject
from ..stored.storage import Window, read_into
from .partial import Filled
from .rewrite_plan import ByteCopy, MergeTask, NewItem, Rewrite, SplitTask, Unit, Work, Write, pieces_of, target_of
from .sinks import OpenFile, Sink

Advance = Callable[[int], object]
RecordUnit = Callable[[int, Sequence[Filled]], object]

LEAST_THREAD_BYTES = 4 * MAX_ITEM_BYTES
"""Least memory of a thread: a quarter of it holds one element."""

_BLOCK_BYTES = 1 << 20  # what was read is still in a cache when it is written
_RUN_BYTES = 64 << 10  # shorter stretches of a stored item are read together with what is between them

# The same bits, of dtypes that torch can copy whatever they mean.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


class _StoppedError(Exception):
    """Another thread has failed, or the user has had enough."""


def perform(
    checkpoint: Checkpoint,
    rewrite: Rewrite,
    units: Sequence[Unit],
    sink: Sink,
    *,
    done: dict[int, list[Filled]],
    record: RecordUnit,
    threads: int,
    max_memory_bytes: int,
    advance: Advance,
) -> dict[str, list[Item]]:
    """Write all files of the new checkpoint, except for its metadata.

    Returns what a manifest says of them: of files of DCP, and of those that have only whole items of ``torch.save``.

    Args:
        checkpoint: to read from.
        rewrite: the plan.
        units: all of its work.
        sink: to write to, prepared.
        done: units that need not be done again, and what they filled.
        record: is told of each unit that is safe on the disk, and what it filled.
        threads: how many units are done at the same time.
        max_memory_bytes: for data, over all threads.
        advance: is told of bytes that are written, from any thread.

    Raises:
        CheckpointError: the source cannot be read, or the memory is too small.
        OSError: the new files cannot be written.
    """
    progress = _Progress(checkpoint, rewrite, units, sink, done)
    for number in done:
        advance(units[number].nbytes)
    progress.finish_files()
    checks = DataChecks(checkpoint)
    crew = _UnitWorkers(checkpoint, checks, sink, progress, record, advance, threads, max_memory_bytes)
    crew.run([unit for unit in units if unit.number not in done])
    checks.check_read(threads)
    if done:  # what an earlier run has read, nobody has compared to the end
        for problem in checks.check_files(checkpoint.items_by_file(), threads):
            raise CheckpointError(problem.text)
    return progress.items


class _UnitWorkers:
    """Threads that do units, and as many that wait for the disk, so that the others do not have to.

    What they have in common is whether to stop: one of them has failed, or the user has had enough.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        checks: DataChecks,
        sink: Sink,
        progress: "_Progress",
        record: RecordUnit,
        advance: Advance,
        threads: int,
        max_memory_bytes: int,
    ) -> None:
        self._sink = sink
        self._progress = progress
        self._record = record
        self._threads = threads
        self._stop = threading.Event()
        memory_bytes = thread_bytes(max_memory_bytes, threads, LEAST_THREAD_BYTES)
        self._make_worker: Callable[[], _Worker] = lambda: _Worker(
            checkpoint, checks, sink, self._stop, advance, memory_bytes
        )
        # Units that are done and not yet safe: more would only be more to do again after a kill.
        self._room = threading.Semaphore(2 * threads)
        self._saved: list[Future[None]] = []

    def run(self, units: Sequence[Unit]) -> None:
        """Run all units; raise the first error of any thread when all have stopped."""
        queue = _Queue(units)
        with _pool(self._threads, "save") as saver, _pool(self._threads, "rewrite") as pool:
            try:
                _raise_first([pool.submit(self._work, queue, saver) for _ in range(self._threads)])
                _raise_first(self._saved)
            except BaseException:
                self._stop.set()
                for each in (pool, saver):
                    each.shutdown(wait=True, cancel_futures=True)
                _raise_first(self._saved)  # what made the others stop
                raise

    def _work(self, queue: "_Queue", saver: ThreadPoolExecutor) -> None:
        worker = self._make_worker()
        try:
            unit = queue.take(None)
            while unit is not None:
                self._room.acquire()
                worker.look_up()
                filled = worker.do(unit)
                self._saved.append(saver.submit(self._save, unit, filled))
                unit = queue.take(unit)
        finally:
            worker.close()

    def _save(self, unit: Unit, filled: Sequence[Filled]) -> None:
        try:
            for file in unit.files:
                self._sink.sync(file)
            self._progress.complete(unit, filled, self._record)
        except BaseException:
            self._stop.set()
            raise
        finally:
            self._room.release()


class _Queue:
    """Units by the file that they write to. Threads keep to a file each, while there are enough files.

    Writers of one file wait for each other in the kernel, and each reads its own file from front to back.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        self._lock = threading.Lock()
        self._left: dict[str, collections.deque[Unit]] = {}
        for unit in units:
            self._left.setdefault(_file_of(unit), collections.deque()).append(unit)
        self._busy = dict.fromkeys(self._left, 0)

    def take(self, before: Unit | None) -> Unit | None:
        """Return the next unit for a thread that has done ``before``, or None."""
        with self._lock:
            if before is not None:
                self._busy[_file_of(before)] -= 1
            files = [file for file, units in self._left.items() if units]
            if not files:
                return None
            if before is not None and _file_of(before) in files:
                file = _file_of(before)
            else:
                file = min(files, key=lambda each: self._busy[each])
            self._busy[file] += 1
            return self._left[file].popleft()


def _file_of(unit: Unit) -> str:
    return min(unit.files)


def _pool(threads: int, name: str) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=threads, thread_name_prefix=name)


def _raise_first(futures: Iterable[Future[None]]) -> None:
    finished, _ = wait([*futures], return_when=FIRST_EXCEPTION)
    errors = [future.exception() for future in finished if not future.cancelled()]
    for error in errors:
        if error is not None and not isinstance(error, _StoppedError):
            raise error
    if any(errors):
        raise _StoppedError


class _Progress:
    """Completion of files: one that several units fill is closed when its last unit is done.

    Attributes:
        items: of the complete files, as a manifest has them.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        rewrite: Rewrite,
        units: Sequence[Unit],
        sink: Sink,
        done: dict[int, list[Filled]],
    ) -> None:
        self.items: dict[str, list[Item]] = {}
        self._checkpoint = checkpoint
        self._rewrite = rewrite
        self._sink = sink
        self._remaining = dict.fromkeys(rewrite.files, 0)
        self._filled: dict[int, list[Filled]] = {}
        self._lock = threading.Lock()
        for unit in units:
            if unit.number in done:
                self._note(done[unit.number])
            else:
                for file in unit.files:
                    self._remaining[file] += 1

    def complete(self, unit: Unit, filled: Sequence[Filled], record: RecordUnit) -> None:
        """Record that a unit is safe on the disk."""
        with self._lock:
            record(unit.number, filled)
            self._note(filled)
            for file in unit.files:
                self._remaining[file] -= 1
            ready = [file for file in unit.files if self._remaining[file] == 0]
        for file in ready:
            self._finish(file)

    def finish_files(self) -> None:
        """Finish files of which nothing remains to be written; a kill may have prevented that."""
        for file, remaining in self._remaining.items():
            if remaining == 0:
                self._finish(file)

    def _note(self, filled: Iterable[Filled]) -> None:
        for each in filled:
            self._filled.setdefault(each.item, []).append(each)

    def _finish(self, file: str) -> None:
        late = [item for item in self._rewrite.files[file] if item.number in self._filled]
        if late:
            target = self._sink.open(file)
            try:
                for item in late:
                    _close_item(target, item, self._crc(item))
            finally:
                target.close()
            self._sink.sync(file)
        items = self._rewrite.files[file]
        if all(map(_is_of_torch_save, items)):
            with contextlib.closing(self._sink.reopen(file)) as stream:
                self.items[file] = [self._listed(stream, item) for item in items]
        self._sink.finish(file)

    def _listed(self, stream: BinaryIO, item: NewItem) -> Item:
        content, known = item.content, None
        if isinstance(content, StoredChunk | StoredObject):
            known = self._checkpoint.opened.get((content.file, content.offset_bytes))
        if known is not None:
            crc = known.directory_crc
        else:  # written here, perhaps by an earlier run
            crc = read_framing(Window(stream, item.offset_bytes, item.length_bytes), item.length_bytes).directory_crc
        return Item(item.offset_bytes, item.length_bytes, crc)

    def _crc(self, item: NewItem) -> int:
        crc, at = 0, 0
        for filled in sorted(self._filled[item.number], key=lambda each: each.start):
            assert filled.start == at, f"{item.entries}: {filled} where {at} is expected"
            crc = combined_crc(crc, filled.crc, filled.length)
            at += filled.length
        assert isinstance(item.content, Envelope)
        assert at == item.content.data_bytes, f"{item.entries}: {at} bytes"
        return crc


def _is_of_torch_save(item: NewItem) -> bool:
    content = item.content
    if isinstance(content, Envelope):
        return bool(content.records)
    return isinstance(content, bytes) or not content.transforms


def _close_item(target: OpenFile, item: NewItem, crc: int) -> None:
    """Write what is around the elements."""
    envelope = item.content
    assert isinstance(envelope, Envelope)
    target.write(item.offset_bytes, envelope.head)
    target.write(item.offset_bytes + len(envelope.head) + envelope.data_bytes, envelope.tail(crc))


class _Worker:
    """One thread, with its memory and its open files."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        checks: DataChecks,
        sink: Sink,
        stop: threading.Event,
        advance: Advance,
        memory_bytes: int,
    ) -> None:
        # A quarter for the block, one for what is packed, or read between what is needed; and the rest for items that
        # only torch.load can read, which it has twice.
        nbytes = min(memory_bytes // 4, _BLOCK_BYTES)
        self._block = torch.empty(nbytes, dtype=torch.uint8)
        self._scratch = torch.empty(nbytes, dtype=torch.uint8)
        self._checkpoint = checkpoint
        self._checks = checks
        self._reader = ItemReader(checkpoint, max_whole_bytes=memory_bytes // 4, note=checks.note)
        self._sink = sink
        self._stop = stop
        self._advance = advance
        self._files: dict[str, OpenFile] = {}

    def close(self) -> None:
        self._reader.close()

    def do(self, unit: Unit) -> list[Filled]:
        """Do a unit; return what it filled of items that others fill too."""
        filled: list[Filled] = []
        try:
            for step in unit.steps:
                if isinstance(step, Work):
                    filled += self._work(step)
                elif isinstance(step, ByteCopy):
                    self._copy(step)
                else:
                    self._write(step)
        finally:
            files, self._files = self._files, {}
            for file in files.values():
                file.close()
        return filled

    def _target(self, file: str) -> OpenFile:
        if file not in self._files:
            self._files[file] = self._sink.open(file)
        return self._files[file]

    def look_up(self) -> None:
        """Go on only if nobody has called a halt."""
        if self._stop.is_set():
            raise _StoppedError

    # --- bytes ---

    def _write(self, step: Write) -> None:
        self._target(step.file).write(step.offset_bytes, step.content)
        self._advance(len(step.content))

    def _copy(self, step: ByteCopy) -> None:
        # Not os.copy_file_range: without reflinks it took up to half as much time of the processor again.
        target = self._target(step.file)
        with self._checkpoint.folder.open(step.source_file) as source:
            source.seek(step.source_bytes)
            for start, stop in block_bounds(step.length_bytes, len(self._block)):
                self.look_up()
                view = self._block.numpy().data[: stop - start]
                if read_into(source, view) < len(view):
                    raise CheckpointError(
                        f"{self._checkpoint.path}/{step.source_file} is cut short; fetch it again, or use another "
                        "checkpoint"
                    )
                self._checks.note(step.source_file, step.source_bytes + start, view)
                target.write(step.offset_bytes + start, view)
                self._advance(len(view))

    # --- fused tensors ---

    def _work(self, step: Work) -> list[Filled]:
        crcs: dict[int, Filled] = {}
        task = step.task
        for block in stretches(step.region, len(self._block) // task.fusion.dtype.itemsize):
            self.look_up()
            memory = self._block[: block.numel * task.fusion.dtype.itemsize]
            if isinstance(task, SplitTask):
                self._split(task, block, memory, crcs)
            else:
                self._merge(task, block, memory, crcs)
            self._advance(len(memory))
        if not step.closes:
            return list(crcs.values())
        for item in task.items():
            _close_item(self._target(item.file), item, crcs[item.number].crc)
        return []

    def _split(self, task: SplitTask, block: TensorRegion, memory: Tensor, crcs: dict[int, Filled]) -> None:
        dtype = task.fusion.dtype
        first = task.first + position_in(task.region, block.offsets)
        self._reader.read_elements(task.source, first, first + block.numel, memory.view(dtype))
        bits = memory.view(_BITS[dtype.itemsize])
        for part, chunk in pieces_of(task.fusion, block):
            item = target_of(task.targets[part], chunk)
            position = position_in(item, chunk.offsets)
            self._put(item, position * dtype.itemsize, self._packed(_view(bits, chunk)), crcs)

    def _merge(self, task: MergeTask, block: TensorRegion, memory: Tensor, crcs: dict[int, Filled]) -> None:
        dtype = task.fusion.dtype
        bits = memory.view(_BITS[dtype.itemsize])
        for part, chunk in pieces_of(task.fusion, block):
            into = _view(bits, chunk)
            for source in task.sources[part].overlapping(chunk):
                both = common(source, chunk)
                assert both is not None
                inside = into
                for dim, (at, size) in enumerate(zip(both.offsets, both.sizes, strict=True)):
                    inside = inside.narrow(dim, at - chunk.offsets[dim], size)
                self._fetch(source, both, dtype, inside)
        if task.dtype is not None:
            memory = memory.view(dtype).to(task.dtype).view(torch.uint8)
        itemsize = (task.dtype or dtype).itemsize
        self._put(task.target, position_in(task.region, block.offsets) * itemsize, memory, crcs)

    def _packed(self, view: Tensor) -> Tensor:
        """Return the elements' bytes without gaps."""
        if not view.is_contiguous():
            packed = self._scratch[: view.numel() * view.itemsize].view(view.dtype).view(view.shape)
            view = packed.copy_(view)
        return _flat(view).view(torch.uint8)

    def _put(self, item: NewItem, position_bytes: int, content: Tensor, crcs: dict[int, Filled]) -> None:
        assert isinstance(item.content, Envelope)
        view = content.numpy().data
        before = crcs.get(item.number, Filled(item.number, position_bytes, 0, 0))
        assert before.start + before.length == position_bytes
        crc = crc32(view, before.crc) if item.content.records else 0
        crcs[item.number] = before._replace(length=before.length + len(view), crc=crc)
        self._target(item.file).write(item.offset_bytes + len(item.content.head) + position_bytes, view)

    def _fetch(self, source: StoredChunk, region: TensorRegion, dtype: torch.dtype, into: Tensor) -> None:
        """Read a rectangle of a stored chunk; in few reads if it is stored in many short stretches."""
        if not region.numel:
            return
        last = tuple(at + size - 1 for at, size in zip(region.offsets, region.sizes, strict=True))
        first, end = position_in(source, region.offsets), position_in(source, last) + 1
        fits = (end - first) * dtype.itemsize <= len(self._scratch)
        is_one = end - first == region.numel
        if is_one and into.is_contiguous():
            self._reader.read_elements(source, first, end, _flat(into).view(dtype))
        elif fits and (is_one or _run_numel(source, region) * dtype.itemsize < _RUN_BYTES):
            span = self._scratch[: (end - first) * dtype.itemsize]
            self._reader.read_elements(source, first, end, span.view(dtype))
            into.copy_(span.view(into.dtype).as_strided(region.sizes, _strides_in(source)))
        else:
            dim = next(dim for dim, size in enumerate(region.sizes) if size > 1)
            half = region.sizes[dim] // 2
            for start, size in ((0, half), (half, region.sizes[dim] - half)):
                self._fetch(source, _narrowed(region, dim, start, size), dtype, into.narrow(dim, start, size))


def _view(bits: Tensor, chunk: Chunk) -> Tensor:
    return bits.as_strided(chunk.sizes, chunk.local_strides, bits.storage_offset() + chunk.local_start)


def _flat(view: Tensor) -> Tensor:
    # Not view(-1): of a single element, that has any stride.
    return view.as_strided((view.numel(),), (1,))


def _narrowed(region: TensorRegion, dim: int, start: int, size: int) -> TensorRegion:
    offsets = (*region.offsets[:dim], region.offsets[dim] + start, *region.offsets[dim + 1 :])
    return TensorRegion(offsets, (*region.sizes[:dim], size, *region.sizes[dim + 1 :]))


def _strides_in(source: StoredChunk) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(source.sizes):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def _run_numel(source: StoredChunk, region: TensorRegion) -> int:
    """Count how many elements of a rectangle are adjacent in the chunk."""
    numel = 1
    for whole, size in zip(reversed(source.sizes), reversed(region.sizes), strict=True):
        numel *= size
        if size < whole:
            break
    return numel
