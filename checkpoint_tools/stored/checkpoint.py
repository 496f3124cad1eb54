"""Plain data: a checkpoint, its tensors and objects, and the items of files that hold them."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from ..core.regions import TensorRegion
from ..core.text import natural_order
from .storage import Folder

Path = tuple[str | int, ...]
"""Keys and indices that lead to a value in the nested state dict."""


class StoredChunk(NamedTuple):
    """A rectangle of a tensor: bytes of a file by ``torch.save``, or with ``bare_dtype`` the elements alone."""

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
    """A tensor; its chunks are in the order of their offsets."""

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[StoredChunk, ...]

    @property
    def nbytes(self) -> int:
        """Return the size of the whole tensor's elements in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


class StoredObject(NamedTuple):
    """Any other value: bytes of a file by ``torch.save``, or their copy ``content`` if the file has another form."""

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
"""A key, and an item that is stored for it."""


class Layout(NamedTuple):
    """Dtype and shape as stored, and the place of the first element if all follow in row-major order."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start_bytes: int | None


class Opened(NamedTuple):
    """Findings in an item that was opened and is whole."""

    layout: Layout | None  # of a tensor; None if only torch.load can read it
    contents: tuple[tuple[int, int, int], ...]  # start, stop and CRC-32 of contents not compared yet
    has_crcs: bool
    around_crc: int  # CRC-32 of all but large contents; covers their CRC-32, so it identifies the item


Item = tuple[int, int, int]
"""Offset and length of an item of a file, and the CRC-32 of the item without large contents."""


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
    own_files: tuple[str, ...] | None  # that have no data; None for a single file of safetensors
    version: str | None = None  # of DCP's format; None before torch 2.6
    sidecars: tuple[str, ...] = ()  # other files that belong to it, once it was found to be whole
    key_prefix: str = ""  # of the model's keys here; its safetensors lack it
    model_keys: frozenset[str] = frozenset()  # keys of tensors in safetensors of a model
    notes: tuple[str, ...] = ()  # for people: facts that the files do not tell
    manifest: Mapping[str, tuple[Item, ...]] | None = None  # file → its items, if sealed (perhaps with other metadata)
    archives: frozenset[str] = frozenset()  # files of torch.save whose checksums were compared
    refusal: str = ""  # why it cannot be rewritten, or empty
    # By file, offset and length: the items that have been opened already.
    opened: dict[tuple[str, int, int], Opened] = field(default_factory=dict, repr=False, compare=False)

    def items(self) -> Iterator[Entry]:
        """Yield every stored item with its key."""
        for key, tensor in self.tensors.items():
            for chunk in tensor.chunks:
                yield key, chunk
        yield from self.objects.items()

    def items_by_file(self) -> dict[str, list[Entry]]:
        """Group the items by file: files in natural order, items in the order of their bytes."""
        by_file: dict[str, list[Entry]] = {}
        for key, item in self.items():
            by_file.setdefault(item.file, []).append((key, item))
        return {
            file: sorted(by_file[file], key=lambda entry: (entry[1].offset_bytes, entry[1].length_bytes))
            for file in sorted(by_file, key=natural_order)
        }
