"""Plain data: a checkpoint, its tensors and objects, and their *items*, the byte ranges of files that store them."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from ..core.regions import TensorRegion
from ..core.text import natural_order
from .storage import Folder

Path = tuple[str | int, ...]
"""Dict keys and list indices that lead to a value in the nested state dict."""


class StoredChunk(NamedTuple):
    """A rectangle of a tensor, and its bytes in ``file``: as ``torch.save`` wrote them, or raw, of ``bare_dtype``."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    offset_bytes: int
    length_bytes: int
    bare_dtype: torch.dtype | None = None

    @property
    def region(self) -> TensorRegion:
        """Return the rectangle."""
        return TensorRegion(self.offsets, self.sizes)

    @property
    def numel(self) -> int:
        """Count the elements."""
        return math.prod(self.sizes)

    @property
    def place(self) -> tuple[str, int, int]:
        """Return file, offset and length."""
        return self[2:5]


class StoredTensor(NamedTuple):
    """A tensor, and its chunks in the order of their offsets."""

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[StoredChunk, ...]

    @property
    def nbytes(self) -> int:
        """Return the size of the whole tensor's elements in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


class StoredObject(NamedTuple):
    """A value other than a tensor: bytes in a file, as ``torch.save`` wrote them, or such bytes in ``content``."""

    file: str
    offset_bytes: int
    length_bytes: int
    content: bytes | None = None

    @property
    def place(self) -> tuple[str, int, int]:
        """Return file, offset and length."""
        return self[:3]


Stored = StoredChunk | StoredObject
Entry = tuple[str, Stored]
"""A key, and one item that is stored for it."""


class Layout(NamedTuple):
    """Stored dtype and shape; ``start_bytes``: the first element's offset in the item, None if not row-major."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start_bytes: int | None


class Opened(NamedTuple):
    """Findings in an item that was opened and found to be whole."""

    layout: Layout | None  # of a tensor; None for objects, and for tensors that only torch.load can read
    contents: tuple[tuple[int, int, int], ...]  # start, stop and CRC-32 of large contents that were not compared yet
    has_crcs: bool
    around_crc: int  # CRC-32 of all but large contents, whose stored CRC-32 it covers; so it identifies the item


Item = tuple[int, int, int]
"""Offset and length of an item in its file, and its ``around_crc``: the CRC-32 of all but large contents."""


class CheckpointProblem(NamedTuple):
    """A problem of a key or a file."""

    where: str
    text: str


@dataclass(frozen=True)
class Checkpoint:
    """Metadata of a checkpoint, with keys in natural order: layer 2 before layer 10."""

    path: str
    folder: Folder
    tensors: Mapping[str, StoredTensor]
    objects: Mapping[str, StoredObject]
    paths: Mapping[str, Path]  # key → where the value was in the nested state dict, if the planner recorded it
    problems: tuple[CheckpointProblem, ...]  # contradictions in the metadata; such chunks are left out
    own_files: tuple[str, ...] | None  # metadata, indices, files of ranks: no sidecars; None: one file of safetensors
    version: str | None = None  # of DCP's format; None before torch 2.6
    sidecars: tuple[str, ...] = ()  # other files that belong to the checkpoint; listed by ``rewrite.whole``
    key_prefix: str = ""  # of the model's keys here, which have no prefix in safetensors
    model_keys: frozenset[str] = frozenset()  # keys of the model's tensors in safetensors or in files of ranks
    notes: tuple[str, ...] = ()  # for people: facts that the files do not tell
    manifest: Mapping[str, tuple[Item, ...]] | None = None  # file → its items, if sealed; .metadata may be newer
    archives: frozenset[str] = frozenset()  # files of torch.save whose checksums were compared
    refusal: str = ""  # why the checkpoint cannot be rewritten, or empty
    # Items that have been opened already, by file, offset and length.
    opened: dict[tuple[str, int, int], Opened] = field(default_factory=dict, repr=False, compare=False)

    def items(self) -> Iterator[Entry]:
        """Yield every stored item with its key."""
        for key, tensor in self.tensors.items():
            for chunk in tensor.chunks:
                yield key, chunk
        yield from self.objects.items()

    def items_by_file(self) -> dict[str, list[Entry]]:
        """Group the items by file: files in natural order, items by their offset in the file."""
        by_file: dict[str, list[Entry]] = {}
        for key, item in self.items():
            by_file.setdefault(item.file, []).append((key, item))
        return {
            file: sorted(by_file[file], key=lambda entry: (entry[1].offset_bytes, entry[1].length_bytes))
            for file in sorted(by_file, key=natural_order)
        }
