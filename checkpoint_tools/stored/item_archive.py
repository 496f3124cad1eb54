"""One stored item, as ``torch.save`` writes it: a zip file of which every byte is accounted for.

::

    item   = record │ record │ … │ directory │ end
    record = header, name, padding │ content │ descriptor (the CRC-32 and the sizes once more)

``torch.load`` and :mod:`zipfile` look at the directory, and believe the rest. Here each header is compared with the
directory, each record ends where the next one begins, and what is left over is what the format and ``torch.save``
write there: a bit that is flipped anywhere around the contents is found. Contents are compared with their CRC-32 by
whoever reads them.
"""

import struct
import zlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

try:
    from isal.isal_zlib import crc32 as _crc32  # ten times as fast as most builds of zlib
except ImportError:
    from zlib import crc32 as _crc32

crc32: Callable[..., int] = _crc32
"""The CRC-32 of bytes, after that of those before: as ``zlib.crc32``."""

STORED, DEFLATED = 0, 8
SMALL_BYTES = 64 << 10
"""Contents of at most so many bytes are compared as soon as an item is opened."""

_END_BYTES = 8 << 10  # of an item's two ends, read at once: all but the elements of a tensor
_BLOCK_BYTES = 1 << 20  # still in a cache when the checksum is taken
_MAX_DIRECTORY_BYTES = 64 << 20  # of an object with half a million tensors
_DESCRIBED, _UTF8 = 0x0008, 0x0800  # flags: sizes come after the content; names are UTF-8
_ZIP64, _PADDING = 0x0001, 0x4246  # extra fields: wide sizes; "FB", torch's padding
_UINT16_MAX, _UINT32_MAX = 0xFFFF, 0xFFFFFFFF
_MADE_BY = (0x031E, 45)  # the versions that torch and Python write into the wide end

_HEADER = struct.Struct("<4s5H3I2H")
_ENTRY = struct.Struct("<4s6H3I5H2I")
_END = struct.Struct("<4s4H2IH")
_WIDE_END = struct.Struct("<4sQ2H2I4Q")
_LOCATOR = struct.Struct("<4sIQI")


class Seekable(Protocol):
    """A source of an item's bytes, at its own offset 0."""

    def seek(self, offset: int, whence: int = 0, /) -> int:
        """As of any file."""
        ...

    def readinto(self, buffer: Any, /) -> int | None:
        """As of any file."""
        ...


class DamagedItemError(Exception):
    """Not what ``torch.save`` writes; the message says in which way."""


class Record(NamedTuple):
    """One file in the zip file.

    Attributes:
        name: without the folder that all of them are in.
        method: how it is compressed.
        crc: the CRC-32 of its content, which is of ``size_bytes``.
        start_bytes: where its ``stored_bytes`` begin in the item.
    """

    name: str
    method: int
    crc: int
    size_bytes: int
    start_bytes: int
    stored_bytes: int


class Archive(NamedTuple):
    """An item's parts.

    Attributes:
        records: in the order of their bytes.
        has_crcs: whether there is anything to compare with: ``torch.serialization.set_crc32_options(False)`` leaves
            zeros.
        directory_crc: the CRC-32 of directory and end, which tell all contents by size and CRC-32: the item's identity.
    """

    records: tuple[Record, ...]
    has_crcs: bool
    directory_crc: int

    def record(self, name: str) -> Record | None:
        """The one of that name."""
        return next((record for record in self.records if record.name == name), None)

    def crc_of(self, record: Record) -> int | None:
        """The checksum that its content is to be compared with."""
        return record.crc if self.has_crcs else None


# --- opening ---------------------------------------------------------------------------------------------------------


def open_item(stream: Seekable, length_bytes: int) -> Archive:
    """Look at everything but the large contents.

    Raises:
        DamagedItemError: something is not as it was written.
    """
    archive = read_framing(stream, length_bytes)
    for record in archive.records:
        if record.size_bytes <= SMALL_BYTES:
            read_record(stream, archive, record)
    return archive


def read_framing(stream: Seekable, length_bytes: int) -> Archive:
    """Find an item's parts; no content is looked at.

    Raises:
        DamagedItemError: something around the contents is not as it was written.
    """
    source = _Source(stream, length_bytes)
    directory_at, directory_end, count = _find_directory(source, length_bytes)
    directory = source.bytes_at(directory_at, length_bytes - directory_at)
    entries = sorted(_entries(directory[: directory_end - directory_at], count), key=lambda entry: entry.header_at)
    records, prefix = [], _prefix_of(entries)
    ends = [entry.header_at for entry in entries[1:]] + [directory_at]
    at = 0
    for entry, end in zip(entries, ends, strict=True):
        if entry.header_at != at:
            raise DamagedItemError("its records do not follow each other")
        records.append(_record(source, entry, end, prefix))
        at = end
    if len({record.name for record in records}) < len(records):
        raise DamagedItemError("it has two records of one name")
    has_crcs = any(record.crc for record in records)
    return Archive(tuple(records), has_crcs, crc32(directory))


class _Source:
    """The bytes of an item; its two ends are read once."""

    def __init__(self, stream: Seekable, length_bytes: int) -> None:
        self._stream = stream
        self._parts: list[tuple[int, bytes]] = []
        if length_bytes <= SMALL_BYTES:
            bounds = [(0, length_bytes)]
        else:
            bounds = [(0, _END_BYTES), (length_bytes - _END_BYTES, _END_BYTES)]
        for at, size in bounds:
            self._parts.append((at, _read(stream, at, size)))

    def bytes_at(self, at: int, size: int) -> bytes:
        for start, content in self._parts:
            if start <= at and at + size <= start + len(content):
                return content[at - start : at - start + size]
        return _read(self._stream, at, size)


def _read(stream: Seekable, at: int, size: int) -> bytes:
    content = bytearray(size)
    if fill(stream, at, memoryview(content)) < size:
        raise DamagedItemError("it is cut short")
    return bytes(content)


def fill(stream: Seekable, at: int, view: memoryview) -> int:
    """Read into ``view`` from ``at`` on. Returns how many bytes there were."""
    stream.seek(at)
    done = 0
    while done < len(view):
        got = stream.readinto(view[done:])
        if not got:
            break
        done += got
    return done


def _find_directory(source: _Source, length_bytes: int) -> tuple[int, int, int]:
    """Find its begin and end, and how many entries it has."""
    end_at = length_bytes - _END.size
    if end_at < 0:
        raise DamagedItemError("it is too short for a zip file")
    mark, disk, first_disk, here, count, size, at, comment = _END.unpack(source.bytes_at(end_at, _END.size))
    if mark != b"PK\5\6" or disk or first_disk or here != count or comment:
        raise DamagedItemError("its end is not that of a zip file")
    directory_end = end_at
    locator_at = end_at - _LOCATOR.size
    locator = source.bytes_at(locator_at, _LOCATOR.size) if locator_at >= _WIDE_END.size else b""
    if locator.startswith(b"PK\6\7"):
        directory_end = locator_at - _WIDE_END.size
        if locator != _LOCATOR.pack(b"PK\6\7", 0, directory_end, 1):
            raise DamagedItemError("its end is not that of a zip file")
        wide = _WIDE_END.unpack(source.bytes_at(directory_end, _WIDE_END.size))
        if wide[:2] != (b"PK\6\6", 44) or wide[2] not in _MADE_BY or wide[3:6] != (45, 0, 0) or wide[6] != wide[7]:
            raise DamagedItemError("its end is not that of a zip file")
        shortened = (min(wide[7], _UINT16_MAX), min(wide[8], _UINT32_MAX), min(wide[9], _UINT32_MAX))
        if (count, size, at) != shortened:
            raise DamagedItemError("its end says two things")
        count, size, at = wide[7:]
    if at + size != directory_end or size > _MAX_DIRECTORY_BYTES or count * _ENTRY.size > size or not count:
        raise DamagedItemError("its directory is not where it should be")
    return at, directory_end, count


class _Entry(NamedTuple):
    """A record as the directory has it."""

    name: bytes
    header_at: int
    twice: tuple[int, ...]  # what the header says too: version, flags, method, time, date
    crc: int
    stored_bytes: int
    size_bytes: int
    short: tuple[int, int]  # both sizes, as they are where there are four bytes for each


def _entries(directory: bytes, count: int) -> list[_Entry]:
    entries = []
    at, kind = 0, None
    for _ in range(count):
        if at + _ENTRY.size > len(directory):
            raise DamagedItemError("its directory is cut short")
        mark, made, *fields = _ENTRY.unpack_from(directory, at)
        twice, (crc, stored, size, name_length, extra_length, comment, disk, inner, outer, header_at) = (
            tuple(fields[:5]),
            fields[5:],
        )
        at += _ENTRY.size
        name, extra = directory[at : at + name_length], directory[at + name_length : at + name_length + extra_length]
        at += name_length + extra_length
        # What no header repeats is the same for all records.
        if mark != b"PK\1\2" or comment or disk or (kind is not None and kind != (made, inner, outer)):
            raise DamagedItemError("its directory is not that of a zip file")
        kind = made, inner, outer
        short = stored, size
        wide = _wide_fields(extra, allows_padding=False)
        size, stored, header_at = (
            wide.pop(0) if value == _UINT32_MAX and wide else value for value in (size, stored, header_at)
        )
        if wide:
            raise DamagedItemError("its directory has sizes that nothing needs")
        entries.append(_Entry(name, header_at, twice, crc, stored, size, short))
    if at != len(directory):
        raise DamagedItemError("its directory is longer than its entries")
    return entries


def _wide_fields(extra: bytes, *, allows_padding: bool) -> list[int]:
    """The numbers of eight bytes in an extra field, which has nothing else but torch's padding."""
    wide: list[int] = []
    at = 0
    while at < len(extra):
        if at + 4 > len(extra):
            raise DamagedItemError("an extra field of it is cut short")
        tag, size = struct.unpack_from("<2H", extra, at)
        content = extra[at + 4 : at + 4 + size]
        at += 4 + size
        is_padding = allows_padding and tag == _PADDING and content == b"Z" * size
        if at > len(extra) or not (is_padding or (tag == _ZIP64 and size % 8 == 0 and size <= 24 and not wide)):
            raise DamagedItemError("an extra field of it is neither padding nor sizes")
        if tag == _ZIP64:
            wide = list(struct.unpack(f"<{size // 8}Q", content))
    return wide


def _prefix_of(entries: list[_Entry]) -> bytes:
    """The folder that all records are in."""
    prefix = entries[0].name.partition(b"/")[0] + b"/"
    if not all(entry.name.startswith(prefix) for entry in entries):
        raise DamagedItemError("its records are not in one folder")
    return prefix


def _record(source: _Source, entry: _Entry, end: int, prefix: bytes) -> Record:
    try:
        name = entry.name[len(prefix) :].decode()
    except UnicodeDecodeError as error:
        raise DamagedItemError("a name in it is not UTF-8") from error
    start = _check_header(source, entry, name)
    _, flags, method, *_ = entry.twice
    if method not in (STORED, DEFLATED) or flags & ~(_DESCRIBED | _UTF8):
        raise DamagedItemError(f"its record {name} is compressed or encrypted in an unknown way")
    if method == STORED and entry.stored_bytes != entry.size_bytes:
        raise DamagedItemError(f"its record {name} has two sizes")
    behind = end - start - entry.stored_bytes
    if behind < 0:
        raise DamagedItemError(f"its record {name} is cut short")
    if flags & _DESCRIBED:
        _check_descriptor(source.bytes_at(end - behind, min(behind, 25)), entry, name)
    elif behind:
        raise DamagedItemError(f"behind its record {name} is something else")
    return Record(name, method, entry.crc, entry.size_bytes, start, entry.stored_bytes)


def _check_header(source: _Source, entry: _Entry, name: str) -> int:
    """Compare it with the directory. Returns where the content begins."""
    mark, *fields = _HEADER.unpack(source.bytes_at(entry.header_at, _HEADER.size))
    twice, (crc, stored, size, name_length, extra_length) = tuple(fields[:5]), fields[5:]
    if mark != b"PK\3\4":
        raise DamagedItemError(f"its record {name} is not where it should be")
    rest = source.bytes_at(entry.header_at + _HEADER.size, name_length + extra_length)
    wide = _wide_fields(rest[name_length:], allows_padding=True)
    is_described = bool(twice[1] & _DESCRIBED)
    found = crc, (stored, size)
    known = [(entry.crc, entry.short)] + [(entry.crc, (_UINT32_MAX,) * 2)] * bool(wide)
    if is_described:  # all three come after the content, and are zero here
        known = [(0, (0, 0)), (0, (_UINT32_MAX,) * 2), *known]
    if (
        twice != entry.twice
        or rest[:name_length] != entry.name
        or found not in known
        or not {0, entry.size_bytes, entry.stored_bytes, entry.header_at}.issuperset(wide)
    ):
        raise DamagedItemError(f"the header of its record {name} and its directory say two things")
    return int(entry.header_at + _HEADER.size + name_length + extra_length)


def _check_descriptor(found: bytes, entry: _Entry, name: str) -> None:
    sizes = entry.stored_bytes, entry.size_bytes
    expected = [struct.pack("<4sI2Q", b"PK\7\10", entry.crc, *sizes)]
    if max(sizes) <= _UINT32_MAX:
        expected.append(struct.pack("<4s3I", b"PK\7\10", entry.crc, *sizes))
    if found not in expected:
        raise DamagedItemError(f"what follows its record {name} and its directory say two things")


# --- contents --------------------------------------------------------------------------------------------------------


def read_record(stream: Seekable, archive: Archive, record: Record, max_bytes: int = SMALL_BYTES) -> bytes:
    """The content of a record, compared with its CRC-32.

    Raises:
        DamagedItemError: it is another one, or longer than ``max_bytes``.
    """
    if record.size_bytes > max_bytes or record.stored_bytes > max_bytes:
        raise DamagedItemError(f"its record {record.name} has {record.size_bytes:,} bytes, of at most {max_bytes:,}")
    content = _read(stream, record.start_bytes, record.stored_bytes)
    if record.method == DEFLATED:
        content = b"".join(_inflated(iter([content]), record))
    expected = archive.crc_of(record)
    if expected is not None and crc32(content) != expected:
        raise wrong_crc(record)
    return content


def check_record(
    stream: Seekable, archive: Archive, record: Record, advance: Callable[[int], object] = lambda done: None
) -> None:
    """Compare the content of a record with its CRC-32, a block at a time.

    Raises:
        DamagedItemError: it is another one.
    """
    blocks = _blocks(stream, record, advance)
    crc = 0
    for block in blocks if record.method == STORED else _inflated(blocks, record):
        crc = crc32(block, crc)
    expected = archive.crc_of(record)
    if expected is not None and crc != expected:
        raise wrong_crc(record)


def _blocks(stream: Seekable, record: Record, advance: Callable[[int], object]) -> Iterator[memoryview]:
    block = memoryview(bytearray(min(_BLOCK_BYTES, record.stored_bytes)))
    for at in range(0, record.stored_bytes, _BLOCK_BYTES):
        part = block[: min(_BLOCK_BYTES, record.stored_bytes - at)]
        if fill(stream, record.start_bytes + at, part) < len(part):
            raise DamagedItemError("it is cut short")
        advance(len(part))
        yield part


def _inflated(blocks: Iterator[Any], record: Record) -> Iterator[bytes]:
    """Inflate deflated blocks, one at a time, and never more than the record has."""
    state = zlib.decompressobj(-zlib.MAX_WBITS)
    left = record.size_bytes
    try:
        for block in blocks:
            pending = bytes(block)
            while pending:
                content = state.decompress(pending, _BLOCK_BYTES)
                pending = state.unconsumed_tail
                left -= len(content)
                if left < 0 or (not content and not pending and not state.eof and state.unused_data):
                    raise DamagedItemError(f"its record {record.name} is longer than it says")
                yield content
    except zlib.error as error:
        raise DamagedItemError(f"its record {record.name} cannot be inflated: {error}") from error
    if left or not state.eof or state.unused_data:
        raise DamagedItemError(f"its record {record.name} is not as long as it says")


def wrong_crc(record: Record) -> DamagedItemError:
    """The error for a content that is not the one that was written."""
    return DamagedItemError(f"the content of its record {record.name} has another CRC-32: its bytes have changed")
