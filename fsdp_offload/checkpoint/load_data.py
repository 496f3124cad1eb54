"""The data of a checkpoint, compared with their checksums as a load reads them.

::

    FileSystemReader.read_data ──▶ torch.load ──▶ CheckedStream.readinto ──▶ file
                                                        │
                                                        └── item opened ─▶ contents: their CRC-32, as the bytes pass

The last byte of a content is handed over when its checksum is right: ``torch.load`` fails otherwise, and nothing of
that item has reached the state dict.
"""

import bisect
import io
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch.distributed.checkpoint.filesystem import FileSystemBase

from .item_archive import (
    SMALL_BYTES,
    STORED,
    Archive,
    DamagedItemError,
    Record,
    check_record,
    crc32,
    open_item,
    wrong_crc,
)

_BLOCK_BYTES = 1 << 20  # still in a cache when the checksum is taken


class StoredItem(NamedTuple):
    """An item's place in its file, and what a manifest says of it."""

    offset_bytes: int
    length_bytes: int
    directory_crc: int | None


class DamagedDataError(RuntimeError):
    """Bytes were read that are not those that were written."""


@contextmanager
def checked_streams(reader: Any, items_by_path: Mapping[str, Iterable[StoredItem]]) -> Iterator["_CheckedFileSystem"]:
    """Have a ``FileSystemReader`` compare what it reads. Items that are not named are not looked at."""
    fs = reader.fs
    reader.fs = checked = _CheckedFileSystem(fs, items_by_path)
    try:
        yield checked
    finally:
        reader.fs = fs


class _CheckedFileSystem:
    """A file system for reading.

    Attributes:
        without_crcs: how many items had nothing to compare with.
    """

    def __init__(self, fs: FileSystemBase, items_by_path: Mapping[str, Iterable[StoredItem]]) -> None:
        self._fs = fs
        self._items = {path: sorted(items) for path, items in items_by_path.items()}
        self.without_crcs = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fs, name)

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        with self._fs.create_stream(path, mode) as stream:
            checked = CheckedStream(stream, str(path), self._items.get(str(path), []))
            yield checked
            checked.close()
            self.without_crcs += checked.without_crcs


class CheckedStream(io.RawIOBase):
    """A file with items, read by one thread: each is opened when something of it is read for the first time.

    Attributes:
        without_crcs: how many items had nothing to compare with.
    """

    def __init__(self, stream: Any, path: str, items: list[StoredItem]) -> None:
        self._stream = stream
        self._path = path
        self._items = items
        self._starts = [item.offset_bytes for item in items]
        self._at = 0
        self._opened: StoredItem | None = None
        self._contents: list[_Content] = []
        self.without_crcs = 0

    def readable(self) -> bool:
        """It is."""
        return True

    def seekable(self) -> bool:
        """It is."""
        return True

    def tell(self) -> int:
        """As of any file."""
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """As of any file."""
        self._at = int(self._stream.seek(offset, whence)) if whence == io.SEEK_END else offset + (whence and self._at)
        return self._at

    def readinto(self, buffer: Any) -> int:
        """As of any file.

        Raises:
            DamagedDataError: what was read is not what was written.
        """
        view = memoryview(buffer).cast("B")
        self._open_item_at(self._at)
        self._stream.seek(self._at)
        done = 0
        while done < len(view):
            part = view[done : done + _BLOCK_BYTES]
            got = self._stream.readinto(part)
            if not got:
                break
            self._note(self._at, part[:got])
            self._at += got
            done += got
        return done

    def _open_item_at(self, at: int) -> None:
        number = bisect.bisect_right(self._starts, at) - 1
        item = self._items[number] if number >= 0 else None
        if item is None or item is self._opened or at >= item.offset_bytes + item.length_bytes:
            return
        self._finish()
        window = _Window(self._stream, item.offset_bytes)
        try:
            archive = open_item(window, item.length_bytes)
        except DamagedItemError as error:
            raise self._damaged(item, str(error)) from error
        if item.directory_crc not in (None, archive.directory_crc):
            raise self._damaged(item, "it is another item than the checkpoint was saved with")
        self._opened = item
        self.without_crcs += not archive.has_crcs
        self._contents = [
            _Content(archive, record, item.offset_bytes + record.start_bytes)
            for record in archive.records
            if archive.has_crcs and record.size_bytes > SMALL_BYTES
        ]

    def _note(self, at: int, view: memoryview) -> None:
        for content in self._contents:
            try:
                content.note(at, view)
            except DamagedItemError as error:
                assert self._opened is not None
                raise self._damaged(self._opened, str(error)) from error

    def _finish(self) -> None:
        """Compare by itself what was read in another order than that of its bytes."""
        item, contents = self._opened, self._contents
        self._opened, self._contents = None, []
        for content in contents:
            if content.is_begun and not content.is_compared:
                assert item is not None
                try:
                    check_record(_Window(self._stream, item.offset_bytes), content.archive, content.record)
                except DamagedItemError as error:
                    raise self._damaged(item, str(error)) from error

    def close(self) -> None:
        """Compare what is left; the file itself is closed by whoever has opened it."""
        if not self.closed:
            self._finish()
        super().close()

    def _damaged(self, item: StoredItem, what: str) -> DamagedDataError:
        end = item.offset_bytes + item.length_bytes
        return DamagedDataError(
            f"bytes {item.offset_bytes} to {end} of {self._path} are not what was saved: {what}. Fetch the file again, "
            "or use another checkpoint"
        )


class _Content:
    """A large content, and how far it was read from its start on."""

    def __init__(self, archive: Archive, record: Record, start_bytes: int) -> None:
        self.archive = archive
        self.record = record
        self._start = self._next = start_bytes
        self._stop = start_bytes + record.stored_bytes
        self._crc = 0
        self.is_begun = False
        self.is_compared = False

    def note(self, at: int, view: memoryview) -> None:
        if at >= self._stop or at + len(view) <= self._start or self.is_compared:
            return
        self.is_begun = True
        if self.record.method != STORED or not at <= self._next < at + len(view):
            return
        part = view[self._next - at : self._stop - at]
        self._crc = crc32(part, self._crc)
        self._next += len(part)
        if self._next == self._stop:
            if self._crc != self.record.crc:
                raise wrong_crc(self.record)
            self.is_compared = True


class _Window:
    """A file from some byte on."""

    def __init__(self, stream: Any, offset_bytes: int) -> None:
        self._stream = stream
        self._offset_bytes = offset_bytes

    def seek(self, offset: int, whence: int = 0) -> int:
        assert whence == io.SEEK_SET
        return int(self._stream.seek(self._offset_bytes + offset)) - self._offset_bytes

    def readinto(self, buffer: Any) -> int:
        return int(self._stream.readinto(buffer))
