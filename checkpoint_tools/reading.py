"""What a checkpoint of ``torch.distributed.checkpoint`` consists of, as plain data.

::

    folder ──read_metadata──▶ Records ──▶ open_checkpoint ──▶ Checkpoint ──▶ inspect, verify, diff
                                                                   │
                                                   items.Reader ◀──┘  elements of one stored chunk

Neither a process group nor a GPU is needed, and nothing that the checkpoint contains is run. What is in the files is
not looked at here.
"""

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch

from .errors import CheckpointError
from .metadata import damage, read_metadata
from .sizes import natural_order
from .storage import Folder, open_folder
from .unpickle import Record

_VERSIONS = ("1",)  # the major numbers that are understood; torch before 2.6 wrote none


class StoredChunk(NamedTuple):
    """One hyper-rectangle of a tensor, and the byte range of a file that holds it as ``torch.save`` wrote it.

    Or its elements alone, in row-major order, as in safetensors: then ``bare_dtype`` is theirs.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    offset_bytes: int
    length_bytes: int
    transforms: tuple[str, ...] = ()
    """What the byte range went through (``stream.zstd/1``), if anything."""
    bare_dtype: torch.dtype | None = None

    @property
    def numel(self) -> int:
        """How many elements."""
        return math.prod(self.sizes)


class StoredTensor(NamedTuple):
    """A tensor; its chunks are in the order of their offsets."""

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[StoredChunk, ...]

    @property
    def nbytes(self) -> int:
        """Of the elements of the whole tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


class StoredObject(NamedTuple):
    """Anything else that was saved: the byte range that holds it as ``torch.save`` wrote it.

    Or that as ``content``, where the file has it in another form.
    """

    key: str
    file: str
    offset_bytes: int
    length_bytes: int
    transforms: tuple[str, ...] = ()
    content: bytes | None = None


class Problem(NamedTuple):
    """One thing that is wrong with a key or a file."""

    where: str
    text: str


@dataclass(frozen=True)
class Checkpoint:
    """What the metadata say. Keys are in natural order: layer 2 before layer 10.

    Attributes:
        path: as given by the user.
        folder: through which its files are read.
        tensors: by key.
        objects: by key.
        paths: key → where the value was in the nested state dict, as the planner recorded it; no entry, not recorded.
        problems: what the metadata contradict themselves in. Such chunks are not in ``tensors``.
        version: of the format, or ``None`` as of torch before 2.6.
        notes: what nobody can find out about it, and people should know.
    """

    path: str
    folder: Folder
    tensors: Mapping[str, StoredTensor]
    objects: Mapping[str, StoredObject]
    paths: Mapping[str, tuple[str | int, ...]]
    problems: tuple[Problem, ...]
    version: str | None
    notes: tuple[str, ...] = ()

    def items(self) -> Iterator[tuple[str, StoredChunk | StoredObject]]:
        """Everything that is stored, with its key."""
        for key, tensor in self.tensors.items():
            for chunk in tensor.chunks:
                yield key, chunk
        yield from self.objects.items()

    def items_by_file(self) -> dict[str, list[tuple[str, StoredChunk | StoredObject]]]:
        """The same by file, files in natural order, and in each in the order of its bytes."""
        by_file: dict[str, list[tuple[str, StoredChunk | StoredObject]]] = {}
        for key, item in self.items():
            by_file.setdefault(item.file, []).append((key, item))
        return {
            file: sorted(by_file[file], key=lambda entry: (entry[1].offset_bytes, entry[1].length_bytes))
            for file in sorted(by_file, key=natural_order)
        }


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Read the metadata of the checkpoint in a local folder or at an fsspec URL.

    Raises:
        CheckpointError: there is none, it cannot be read, or it contains what no checkpoint needs.
    """
    folder = open_folder(path)
    metadata = read_metadata(folder)
    version = metadata.get("version")
    if version is not None and str(version).split(".")[0] not in _VERSIONS:
        raise CheckpointError(
            f"{folder.path} has version {version} of the checkpoint format, and these tools know 1.x; use newer tools, "
            "or load and save it again with the torch that wrote it"
        )
    try:
        return _Builder(metadata).checkpoint(folder, version)
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        raise damage(folder, f"{type(error).__name__}: {error}") from error


# --- from records to nouns --------------------------------------------------------------------------------------------


class _Place(NamedTuple):
    file: str
    offset_bytes: int
    length_bytes: int
    transforms: tuple[str, ...]


class _Builder:
    """From the records of the metadata to nouns; what does not fit is noted on the way."""

    def __init__(self, metadata: Record) -> None:
        self.metadata = metadata
        self.problems: list[Problem] = []
        self.places: dict[tuple[str, tuple[int, ...] | None], _Place] = {}
        self.used: set[tuple[str, tuple[int, ...] | None]] = set()

    def checkpoint(self, folder: Folder, version: str | None) -> Checkpoint:
        storage = self.metadata.get("storage_data")
        entries = self.metadata.get("state_dict_metadata")
        if not isinstance(entries, dict) or not isinstance(storage, dict):
            raise TypeError("it does not say which keys there are, or in which files")
        for index, info in storage.items():
            self._add_place(index, info)
        tensors, objects = {}, {}
        for key in sorted(entries, key=natural_order):
            entry = entries[key]
            if entry.name == "TensorStorageMetadata":
                tensors[key] = self._tensor(key, entry)
            elif entry.name == "BytesStorageMetadata" and (place := self._place(key, None)) is not None:
                objects[key] = StoredObject(key, *place)
            elif entry.name != "BytesStorageMetadata":
                raise TypeError(f"{key} is a {entry.name}")
        self._note_unused(set(entries))
        return Checkpoint(
            path=folder.path,
            folder=folder,
            tensors=tensors,
            objects=objects,
            paths=_planner_paths(self.metadata.get("planner_data"), set(entries)),
            problems=tuple(self.problems),
            version=version,
        )

    def _add_place(self, index: Record, info: Record) -> None:
        offset = index.get("offset")
        place = _Place(
            str(info.get("relative_path")),
            _count(info.get("offset")),
            _count(info.get("length")),
            tuple(map(str, info.get("transform_descriptors") or ())),
        )
        where = (cast(str, index.get("fqn")), None if offset is None else _counts(offset))
        if leaves_the_folder(place.file):
            self.used.add(where)  # said here, and nothing else about it
            self.problems.append(Problem(where[0], f"its data would be in {place.file!r}, outside of the checkpoint"))
        elif where in self.places:
            self.problems.append(Problem(where[0], f"its data at {where[1]} are in two places"))
        else:
            self.places[where] = place

    def _tensor(self, key: str, entry: Record) -> StoredTensor:
        shape = _counts(entry.get("size"))
        dtype = _dtype(entry.get("properties"))
        chunks = []
        for record in entry.get("chunks"):
            offsets, sizes = _counts(record.get("offsets")), _counts(record.get("sizes"))
            if not len(offsets) == len(sizes) == len(shape):
                self.problems.append(Problem(key, f"a chunk of {len(sizes)} dimensions in a tensor of {len(shape)}"))
            elif (place := self._place(key, offsets)) is not None:
                chunks.append(StoredChunk(offsets, sizes, *place))
        return StoredTensor(key, shape, dtype, tuple(sorted(chunks)))

    def _place(self, key: str, offsets: tuple[int, ...] | None) -> _Place | None:
        place = self.places.get((key, offsets))
        if place is None and (key, offsets) not in self.used:
            at = "" if offsets is None else f" for its chunk at {offsets}"
            self.problems.append(Problem(key, f"the metadata do not say where the data are{at}"))
        self.used.add((key, offsets))
        return place

    def _note_unused(self, keys: set[str]) -> None:
        for key, offsets in self.places.keys() - self.used:
            what = "is stored" if key not in keys else f"has data at {offsets}"
            self.problems.append(Problem(key, f"{what}, but the metadata do not say what they are"))
        self.problems.sort()


def _count(value: object) -> int:
    if not isinstance(value, int) or value < 0:
        raise TypeError(f"a size or an offset is {value!r}")
    return value


def _counts(value: Any) -> tuple[int, ...]:
    return tuple(_count(each) for each in value)


def _dtype(properties: Record) -> torch.dtype:
    # A tuple that begins with the dtype; or a dict of attributes, as torch before 2.3 wrote it.
    state = properties.state
    dtype = state[0] if isinstance(state, tuple) else properties.get("dtype")
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"a dtype is {dtype!r}")
    return dtype


def leaves_the_folder(file: str) -> bool:
    """Whether a name of a file in a checkpoint is of one outside of it."""
    parts = file.replace("\\", "/").split("/")
    return not file or ".." in parts or parts[0] == "" or ":" in parts[0]


def _planner_paths(planner_data: object, keys: set[str]) -> dict[str, tuple[str | int, ...]]:
    # DefaultSavePlanner's {flat key: path}. Other planners may keep anything here.
    if not isinstance(planner_data, dict):
        return {}
    return {
        key: path
        for key, path in planner_data.items()
        if key in keys and isinstance(path, tuple) and all(isinstance(part, str | int) for part in path)
    }
