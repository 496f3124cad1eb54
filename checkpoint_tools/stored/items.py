"""Reading what is stored: whole, or a range of elements at a time.

A chunk lies in its byte range as a zip file by ``torch.save``: a small pickle that says what the tensor is, and the
memory of the tensor, uncompressed. Mostly that memory is the elements in row-major order, and any part of them can be
read with one ``read``. What is stored otherwise (strided, compressed, of another byte order) is read as a whole, by
``torch.load``, and then the part is taken.

Items begin wherever the last one ended, so the elements are not aligned in the file, and are not mapped into memory.
"""

import io
from collections.abc import Callable
from typing import Any, BinaryIO, cast

import torch
from torch import Tensor

from ..core.errors import CheckpointError, UnreadableObjectError
from ..core.sizes import human_bytes
from ..core.values import MAX_VALUES, has_more_values
from .archive import DamagedError, Layout, check_contents, check_pickle, open_archive, read_layout
from .item_archive import SMALL_BYTES, STORED
from .reading import Checkpoint, Content, Opened, StoredChunk, StoredObject
from .storage import Window, read_into

Note = Callable[[str, int, memoryview], object]

_OPEN_FILES = 8
_KNOWN_LAYOUTS = 256


class ItemReader:
    """Reads from one checkpoint. One for each thread: it keeps files open, and the last item that it read as a whole.

    Args:
        checkpoint: to read from.
        max_whole_bytes: items that cannot be read in parts, and are larger than this, are an error.
        note: is told of elements that were read: the file, from which byte on, and the bytes.
    """

    def __init__(self, checkpoint: Checkpoint, max_whole_bytes: int | None = None, note: Note | None = None) -> None:
        self._note = note
        self._checkpoint = checkpoint
        self._max_whole_bytes = max_whole_bytes
        self._streams: dict[str, BinaryIO] = {}
        self._layouts: dict[StoredChunk, Layout | None] = {}
        self._whole: tuple[StoredChunk, Tensor] | None = None

    def __enter__(self) -> "ItemReader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files and forget what was read."""
        for stream in self._streams.values():
            stream.close()
        self._streams.clear()
        self._layouts.clear()
        self._whole = None

    def forget(self) -> None:
        """Give back the memory of the last item that was read as a whole."""
        self._whole = None

    def layout(self, chunk: StoredChunk) -> Layout | None:
        """Read the layout of a stored tensor, without its elements; None where only ``torch.load`` knows.

        Raises:
            CheckpointError: it is not a whole file of ``torch.save``, or not of the chunk's sizes.
        """
        if chunk.bare_dtype is not None:
            return Layout(chunk.bare_dtype, chunk.sizes, chunk.offset_bytes)
        if chunk not in self._layouts:
            layout = self._look_into(chunk)
            if layout is not None:
                self._check_sizes(chunk, layout.shape)
            if len(self._layouts) >= _KNOWN_LAYOUTS:
                self._layouts.clear()
            self._layouts[chunk] = layout
        return self._layouts[chunk]

    def read_rows(self, chunk: StoredChunk, start: int, stop: int) -> Tensor:
        """Read rows ``start`` to ``stop`` of the chunk's first dimension; a scalar is one row.

        Raises:
            CheckpointError: they cannot be read.
            IndexError: there are no such rows.
        """
        rows, inner = (chunk.sizes[0], chunk.sizes[1:]) if chunk.sizes else (1, ())
        if not 0 <= start <= stop <= rows:
            raise IndexError(f"rows {start} to {stop} of a chunk of {rows}")
        row_numel = torch.Size(inner).numel()
        elements = self.read_elements(chunk, start * row_numel, stop * row_numel)
        return elements.reshape((stop - start, *inner) if chunk.sizes else ())

    def read_elements(self, chunk: StoredChunk, start: int, stop: int, out: Tensor | None = None) -> Tensor:
        """Read elements ``start`` to ``stop`` in row-major order.

        Args:
            chunk: of which.
            start: the first element.
            stop: the one after the last.
            out: where to put them: one-dimensional, contiguous, of so many elements of the chunk's dtype. Without it,
                new memory of this size is taken.

        Raises:
            CheckpointError: they cannot be read, or are of another dtype than ``out``.
        """
        layout = self.layout(chunk)
        if layout is None or layout.start_bytes is None:
            elements = self._whole_item(chunk).flatten()[start:stop]
            return self._into(chunk, elements.dtype, len(elements), out).copy_(elements)
        elements = self._into(chunk, layout.dtype, stop - start, out)
        if start < stop:
            # Any dtype can be viewed as bytes; numpy does not have all of them.
            view = elements.view(torch.uint8).numpy().data
            stream = self._open(chunk.file)
            stream.seek(layout.start_bytes + start * layout.dtype.itemsize)
            if read_into(stream, view) < len(view):
                raise CheckpointError(f"{self._file(chunk)} is cut short; fetch it again, or use another checkpoint")
            if self._note is not None:
                self._note(chunk.file, layout.start_bytes + start * layout.dtype.itemsize, view)
        return elements

    def read_chunk(self, chunk: StoredChunk) -> Tensor:
        """Read a whole chunk."""
        return self.read_elements(chunk, 0, chunk.numel).reshape(chunk.sizes)

    def read_object(self, stored: StoredObject) -> Any:
        """Read an object that ``torch.load(weights_only=True)`` accepts.

        Raises:
            CheckpointError: it is damaged, or consists of more.
        """
        value = self._load(stored)
        if has_more_values(value, MAX_VALUES):
            raise CheckpointError(f"an object in {self._file(stored)} has more than {MAX_VALUES:,} values")
        return value

    def read_bytes(self, item: StoredChunk | StoredObject) -> bytes:
        """Read an item's bytes as stored."""
        if isinstance(item, StoredChunk) and item.length_bytes <= SMALL_BYTES:
            stream = self._open(item.file)  # without a window, in a third of the time
            stream.seek(item.offset_bytes)
            content = stream.read(item.length_bytes)
        else:
            content = self._window(item).read()  # which takes memory for what is there, whatever the length
        if len(content) < item.length_bytes:
            raise CheckpointError(f"{self._file(item)} is cut short; fetch it again, or use another checkpoint")
        return content

    def check(self, item: StoredChunk | StoredObject) -> Layout | None:
        """Check that an item is a whole file of ``torch.save``, without reading its large contents.

        Returns:
            As :meth:`layout`; nothing for objects: what they are is not looked at.

        Raises:
            CheckpointError: it is not.
        """
        if isinstance(item, StoredChunk):
            return self.layout(item)
        self._look_into(item)
        return None

    # --- inside ---

    def _look_into(self, item: StoredChunk | StoredObject) -> Layout | None:
        if item.transforms:
            return None
        window, layout = self._window(item), None
        try:
            if isinstance(item, StoredChunk):
                layout, archive = read_layout(window)
            else:
                archive = open_archive(window)
            if any(record.method != STORED for record in archive.records):
                check_contents(window, archive)  # what cannot be compared in parts
        except DamagedError as error:
            raise self._damaged(item, str(error)) from error
        if isinstance(item, StoredChunk) or item.content is None:
            contents = tuple(
                Content(start, start + record.stored_bytes, record.crc)
                for record in archive.records
                if record.size_bytes > SMALL_BYTES and record.method == STORED and archive.has_crcs
                for start in (item.offset_bytes + record.start_bytes,)
            )
            known = Opened(contents, archive.has_crcs, archive.directory_crc)
            self._checkpoint.opened[item.file, item.offset_bytes] = known
        return layout

    def _into(self, chunk: StoredChunk, dtype: torch.dtype, numel: int, out: Tensor | None) -> Tensor:
        if out is None:
            return torch.empty(numel, dtype=dtype)
        if out.dtype != dtype:
            raise self._damaged(chunk, f"{dtype} where {out.dtype} is expected")
        assert out.shape == (numel,)
        return out

    def _whole_item(self, chunk: StoredChunk) -> Tensor:
        if self._whole is None or self._whole[0] != chunk:
            if self._max_whole_bytes is not None and chunk.length_bytes > self._max_whole_bytes:
                raise CheckpointError(
                    f"an item of {human_bytes(chunk.length_bytes)} in {self._file(chunk)} is not stored row by row, "
                    f"and can only be read as a whole; allow more than {human_bytes(self._max_whole_bytes)} for it"
                )
            self._whole = None  # before the next one is read
            tensor = self._load(chunk)
            if not isinstance(tensor, Tensor):
                raise self._damaged(chunk, f"a {type(tensor).__name__} where a tensor is expected")
            self._check_sizes(chunk, tuple(tensor.shape))
            self._whole = chunk, tensor.detach().contiguous()
        return self._whole[1]

    def _load(self, item: StoredChunk | StoredObject) -> Any:
        if item.transforms:
            raise CheckpointError(
                f"an item in {self._file(item)} was written through {', '.join(item.transforms)}, which these tools do "
                "not undo; load the checkpoint with DCP and save it without"
            )
        window = self._window(item)
        try:
            archive = open_archive(window)
            check_contents(window, archive)
            check_pickle(window, archive)
        except DamagedError as error:
            raise self._damaged(item, str(error)) from error
        window.seek(0)
        try:
            return torch.load(cast(Any, window), map_location="cpu", weights_only=True)
        except Exception as error:  # a damaged archive can raise anything
            text = str(error)
            if "weights_only" in text or "Weights only" in text:
                raise UnreadableObjectError(
                    f"an object in {self._file(item)} consists of more than tensors and plain values, and is not "
                    "loaded: unpickling it could run anything"
                ) from error
            raise self._damaged(item, text.partition("\n")[0]) from error

    def _window(self, item: StoredChunk | StoredObject) -> Window:
        if isinstance(item, StoredObject) and item.content is not None:
            return Window(io.BytesIO(item.content), 0, len(item.content))
        return Window(self._open(item.file), item.offset_bytes, item.length_bytes)

    def _open(self, file: str) -> BinaryIO:
        stream = self._streams.pop(file, None)
        if stream is None:
            if len(self._streams) >= _OPEN_FILES:
                self._streams.pop(next(iter(self._streams))).close()
            try:
                stream = self._checkpoint.folder.open(file)
            except OSError as error:
                raise CheckpointError(f"{self._checkpoint.path}/{file} cannot be opened: {error}") from error
        self._streams[file] = stream  # the last one is the one to be closed last
        return stream

    def _file(self, item: StoredChunk | StoredObject) -> str:
        return f"{self._checkpoint.path}/{item.file}"

    def _damaged(self, item: StoredChunk | StoredObject, what: str) -> CheckpointError:
        return CheckpointError(
            f"bytes {item.offset_bytes} to {item.offset_bytes + item.length_bytes} of {self._file(item)} are not what "
            f"torch.save writes ({what}); fetch the file again, or use another checkpoint"
        )

    def _check_sizes(self, chunk: StoredChunk, shape: tuple[int, ...]) -> None:
        if shape != chunk.sizes:
            raise self._damaged(chunk, f"a tensor of shape {shape} where one of {chunk.sizes} is expected")
