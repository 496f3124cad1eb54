"""Check that data were read as they were written: every reader compares their CRC-32.

::

    ItemReader, ByteCopy ──bytes of a file, in any order and by any thread──▶ DataChecks.note ─▶ spans ─┐
                       what nobody has read from its start to its end ──▶ read again ───────────────────┴─▶ compared

A *span* is a range of bytes that was read without a gap. One that is all of a content is compared at once. Several
that are one after the other are compared when all is read: the CRC-32 of two ranges gives that of both together. Where
bytes were read twice, or some of them by an earlier run, the content is read once more by itself.
"""

import bisect
import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from ..core.errors import CheckpointError
from ..core.sizes import block_bounds
from ..stored.envelope import combined_crc
from ..stored.item_archive import crc32
from ..stored.items import ItemReader
from ..stored.reading import Checkpoint, CheckpointProblem, Content
from ..stored.storage import read_into

_BLOCK_BYTES = 1 << 20  # still in a cache when the checksum is taken


class _Span(NamedTuple):
    start: int
    stop: int
    crc: int


class _File:
    """Contents of one file, and the spans read of each."""

    def __init__(self, contents: Sequence[Content]) -> None:
        self.contents = sorted(set(contents))
        self.starts = [content.start_bytes for content in self.contents]
        self.spans: dict[Content, dict[int, _Span]] = {}  # by where they end
        self.compared: set[Content] = set()
        self.read_twice: set[Content] = set()

    def meeting(self, start: int, stop: int) -> Iterator[Content]:
        """List the contents that meet a range."""
        at = max(bisect.bisect_right(self.starts, start) - 1, 0)
        for content in self.contents[at:]:
            if content.start_bytes >= stop:
                return
            if content.stop_bytes > start:
                yield content


class DataChecks:
    """Compares the data of one checkpoint with their checksums, as they are read."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._by_file = checkpoint.items_by_file()
        self._files: dict[str, _File] = {}
        self._lock = threading.Lock()

    def note(self, file: str, at: int, view: memoryview) -> None:
        """Note bytes that were read.

        Raises:
            CheckpointError: they complete a content, and that has another checksum.
        """
        known, stop = self._of(file), at + len(view)
        for content in known.meeting(at, stop):
            start, end = max(at, content.start_bytes), min(stop, content.stop_bytes)
            self._add(file, known, content, start, view[start - at : end - at])

    def _add(self, file: str, known: _File, content: Content, start: int, view: memoryview) -> None:
        with self._lock:
            if content in known.compared:
                return
            spans = known.spans.setdefault(content, {})
            before = spans.pop(start, _Span(start, start, 0))
        span = _Span(before.start, start + len(view), crc32(view, before.crc))
        if (span.start, span.stop) == content[:2]:
            self._compare(file, known, content, span.crc)
            return
        with self._lock:
            if span.stop in spans:
                known.read_twice.add(content)
            spans[span.stop] = span

    def _compare(self, file: str, known: _File, content: Content, crc: int) -> None:
        if crc != content.crc:
            raise CheckpointError(self._text(file, content))
        with self._lock:
            known.compared.add(content)
            known.spans.pop(content, None)

    def _text(self, file: str, content: Content) -> str:
        return (
            f"bytes {content.start_bytes} to {content.stop_bytes} of {self._checkpoint.path}/{file} are damaged: their "
            "CRC-32 is not the one that was written with them; fetch the file again, or use another checkpoint"
        )

    def _of(self, file: str) -> _File:
        with self._lock:
            if file not in self._files:
                self._files[file] = _File(self._contents_of(file))
            return self._files[file]

    def _contents_of(self, file: str) -> list[Content]:
        contents: list[Content] = []
        with ItemReader(self._checkpoint) as reader:
            for _, item in self._by_file.get(file, ()):
                place = file, item.offset_bytes
                if place not in self._checkpoint.opened and not getattr(item, "bare_dtype", None):
                    with contextlib.suppress(CheckpointError):  # its damage is found by all that look into it
                        reader.check(item)
                if place in self._checkpoint.opened:
                    contents += self._checkpoint.opened[place].contents
        return contents

    # --- what is left ---

    def left_bytes(self, files: Iterable[str]) -> int:
        """Count the bytes that :meth:`check_files` still has to read."""
        return sum(content.stop_bytes - content.start_bytes for file in files for content in self._left(file))

    def _left(self, file: str) -> list[Content]:
        known = self._of(file)
        return [content for content in known.contents if content not in known.compared]

    def check_read(self, threads: int) -> None:
        """Compare what was read so far and is not compared yet.

        Raises:
            CheckpointError: something has another checksum.
        """
        left: list[tuple[str, Content]] = []
        for file, known in self._files.items():
            for content, spans in list(known.spans.items()):
                crc = None if content in known.read_twice else _joined(content, spans.values())
                if crc is None:
                    left.append((file, content))
                else:
                    self._compare(file, known, content, crc)
        with ThreadPoolExecutor(max_workers=threads) as pool:
            for problem in pool.map(lambda each: self._read_again(*each), left):
                if problem is not None:
                    raise CheckpointError(problem.text)

    def check_files(
        self, files: Iterable[str], threads: int, advance: Callable[[int], object] = lambda done: None
    ) -> list[CheckpointProblem]:
        """Compare everything in these files that is not compared yet: all that differs."""

        def check(file: str) -> list[CheckpointProblem]:
            found = (self._read_again(file, content, advance) for content in self._left(file))
            return [problem for problem in found if problem is not None]

        with ThreadPoolExecutor(max_workers=threads) as pool:
            return [problem for problems in pool.map(check, files) for problem in problems]

    def _read_again(
        self, file: str, content: Content, advance: Callable[[int], object] = lambda done: None
    ) -> CheckpointProblem | None:
        crc = 0
        block = memoryview(bytearray(min(_BLOCK_BYTES, content.stop_bytes - content.start_bytes)))
        try:
            with self._checkpoint.folder.open(file) as stream:
                stream.seek(content.start_bytes)
                for start, stop in block_bounds(content.stop_bytes - content.start_bytes, len(block)):
                    view = block[: stop - start]
                    if read_into(stream, view) < len(view):
                        return CheckpointProblem(file, f"{self._checkpoint.path}/{file} is cut short; fetch it again")
                    crc = crc32(view, crc)
                    advance(len(view))
        except OSError as error:
            return CheckpointProblem(file, f"{self._checkpoint.path}/{file} cannot be read: {error}")
        try:
            self._compare(file, self._of(file), content, crc)
        except CheckpointError as error:
            return CheckpointProblem(file, str(error))
        return None


def _joined(content: Content, spans: Iterable[_Span]) -> int | None:
    """Combine the CRC-32 of spans that follow each other over a whole content; None for others."""
    at, crc = content.start_bytes, 0
    for span in sorted(spans):
        if span.start != at:
            return None
        at, crc = span.stop, combined_crc(crc, span.crc, span.stop - span.start)
    return crc if at == content.stop_bytes else None
