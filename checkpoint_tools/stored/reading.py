"""Read what a checkpoint of ``torch.distributed.checkpoint`` consists of, as plain data.

::

    folder ──read_metadata──▶ Records ──▶ open_checkpoint ──▶ Checkpoint ──▶ inspect, verify, diff
                                                                   │
                                               items.ItemReader ◀──┘  elements of one stored chunk

Neither a process group nor a GPU is needed, and nothing that the checkpoint contains is run. What is in the files is
not looked at here.
"""

import functools
import gc
import math
import os
import reprlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from ..core.errors import CheckpointError
from ..core.text import MAX_DIMS, MAX_INT64, natural_order, shortened
from .metadata import METADATA_FILE, Manifest, damage, read_manifest, read_metadata
from .storage import Folder, open_folder
from .unpickle import PickledObject

Path = tuple[str | int, ...]
"""Keys and indices that lead to a value in the nested state dict."""

_MAX_NAME = 4096
_MAX_DEPTH = 256  # of a nested state dict
_FLATTENED = (
    "its optimizer state is flattened in the way of Megatron-Core before 0.16; save it there with "
    "distrib_optim_sharding_type='fully_reshardable'"
)
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
    """Transforms of the byte range (``stream.zstd/1``), if any."""
    bare_dtype: torch.dtype | None = None

    @property
    def numel(self) -> int:
        """Count the elements."""
        return math.prod(self.sizes)

    @property
    def place(self) -> tuple[str, int, int]:
        """Return file, offset and length."""
        return self[2:5]


class Properties(NamedTuple):
    """Properties of a tensor beside its dtype, as metadata have them: torch keeps them, and needs none."""

    requires_grad: bool = False
    memory_format: int = 0
    pin_memory: bool = False


class StoredTensor(NamedTuple):
    """A tensor; its chunks are in the order of their offsets."""

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[StoredChunk, ...]
    properties: Properties = Properties()

    @property
    def nbytes(self) -> int:
        """Return the size of the whole tensor's elements in bytes."""
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

    @property
    def place(self) -> tuple[str, int, int]:
        """Return file, offset and length."""
        return self[1:4]


class Layout(NamedTuple):
    """Dtype and shape as stored, and where the first element is in the item if all follow in row-major order."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start_bytes: int | None


class Opened(NamedTuple):
    """Findings of a look into an item that is whole.

    Attributes:
        layout: of a tensor; ``None`` where only ``torch.load`` knows.
        contents: start, stop and CRC-32 of those that were not read; all others have been compared with theirs.
        has_crcs: whether there was anything to compare with.
        around_crc: the CRC-32 of all but these contents, whose own CRC-32 are among it: the item's identity.
    """

    layout: Layout | None
    contents: tuple[tuple[int, int, int], ...]
    has_crcs: bool
    around_crc: int


class CheckpointProblem(NamedTuple):
    """One thing that is wrong with a key or a file."""

    where: str
    text: str


@dataclass(frozen=True)
class Checkpoint:
    """Metadata of a checkpoint, with keys in natural order: layer 2 before layer 10.

    Attributes:
        paths: key → where the value was in the nested state dict, as the planner recorded it; no entry, not recorded.
        problems: what the metadata contradict themselves in. Such chunks are not in ``tensors``.
        version: of the format, or ``None`` as of torch before 2.6.
        notes: what nobody can find out about it, and people should know.
        manifest: of checksums, if there is one; ``problems`` say if it is for other metadata.
        refusal: why it cannot be rewritten, if so.
        opened: by file, offset and length: the items that somebody has looked into already.
    """

    path: str
    folder: Folder
    tensors: Mapping[str, StoredTensor]
    objects: Mapping[str, StoredObject]
    paths: Mapping[str, Path]
    problems: tuple[CheckpointProblem, ...]
    version: str | None
    notes: tuple[str, ...] = ()
    manifest: Manifest | None = None
    refusal: str = ""
    opened: dict[tuple[str, int, int], Opened] = field(default_factory=dict, repr=False, compare=False)

    def items(self) -> Iterator[tuple[str, StoredChunk | StoredObject]]:
        """Yield every stored item with its key."""
        for key, tensor in self.tensors.items():
            for chunk in tensor.chunks:
                yield key, chunk
        yield from self.objects.items()

    def items_by_file(self) -> dict[str, list[tuple[str, StoredChunk | StoredObject]]]:
        """Group the items by file: files in natural order, items in the order of their bytes."""
        by_file: dict[str, list[tuple[str, StoredChunk | StoredObject]]] = {}
        for key, item in self.items():
            by_file.setdefault(item.file, []).append((key, item))
        return {
            file: sorted(by_file[file], key=lambda entry: (entry[1].offset_bytes, entry[1].length_bytes))
            for file in sorted(by_file, key=natural_order)
        }


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Read the metadata of the checkpoint in a local folder or at an fsspec URL."""
    folder, was_enabled = open_folder(path), gc.isenabled()
    gc.disable()  # it would visit millions of new objects that all stay
    try:
        checkpoint = _CheckpointBuilder(read_metadata(folder)).checkpoint(folder)
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        raise damage(folder, f"{type(error).__name__}: {shortened(str(error))}") from error
    finally:
        if was_enabled:
            gc.enable()
    manifest, wrong = read_manifest(folder)
    problems = [] if wrong is None else [CheckpointProblem(METADATA_FILE, wrong)]
    return replace(checkpoint, manifest=manifest, problems=(*checkpoint.problems, *problems))


_Place = tuple[str, int, int, tuple[str, ...]]
"""File, offset, length, transforms."""


class _CheckpointBuilder:
    """Build a checkpoint from the metadata's records, noting what does not fit."""

    def __init__(self, metadata: PickledObject) -> None:
        self.metadata = metadata
        self.problems: list[CheckpointProblem] = []
        self.places: dict[tuple[str, tuple[int, ...] | None], _Place] = {}
        self.used: set[tuple[str, tuple[int, ...] | None]] = set()

    def checkpoint(self, folder: Folder) -> Checkpoint:
        metadata = self.metadata
        version = metadata.get("version")
        if version is not None and not (isinstance(version, str) and version.partition(".")[0] in _VERSIONS):
            told = shortened(version, 20) if isinstance(version, str) else "an unknown version"
            raise CheckpointError(
                f"{folder.path} has version {told} of the checkpoint format, and these tools know 1.x; use newer "
                "tools, or load and save it again with the torch that wrote it"
            )
        storage, entries = metadata.get("storage_data"), metadata.get("state_dict_metadata")
        if not isinstance(entries, dict) or not isinstance(storage, dict):
            raise TypeError("it does not say which keys there are, or in which files")
        for index, info in storage.items():
            self._place_item(_state(index, "MetadataIndex"), _state(info, "_StorageInfo"))
        tensors, objects = {}, {}
        for key in sorted(map(_text, entries), key=natural_order):
            name = _record(entries[key]).name
            if name == "TensorStorageMetadata":
                tensors[key] = self._tensor(key, _state(entries[key], name))
            elif name == "BytesStorageMetadata" and (place := self._place(key, None)) is not None:
                objects[key] = StoredObject(key, *place)
            elif name != "BytesStorageMetadata":
                raise TypeError(f"{key} is a {name}")
        for key, offsets in self.places.keys() - self.used:
            what = "is stored" if key not in entries else f"has data at {offsets}"
            self._note(key, f"{what}, but the metadata do not say what they are")
        self.problems.sort()
        paths = _planner_paths(metadata.get("planner_data"), set(entries))
        for key, path in paths.items():  # a damaged name is damaged wherever the pickle refers to it, but not there
            flat = ".".join(map(str, path))
            if flat != key:
                what = f"was saved as {shortened(flat)}, by its path in the state dict"
                self._note(key, f"{what}; one of the two names is damaged")
        flattened = metadata.get("mcore_data")
        return Checkpoint(
            path=folder.path,
            folder=folder,
            tensors=tensors,
            objects=objects,
            paths=paths,
            problems=tuple(self.problems),
            version=version,
            refusal=_FLATTENED if isinstance(flattened, dict) and any(flattened.values()) else "",
        )

    def _note(self, key: str, text: str) -> None:
        self.problems.append(CheckpointProblem(key, text))

    def _place_item(self, index: dict[str, Any], info: dict[str, Any]) -> None:
        offset, file = index.get("offset"), _text(info.get("relative_path"))
        transforms = tuple(map(_text, _few(info.get("transform_descriptors") or ())))
        place = file, _count(info.get("offset")), _count(info.get("length")), transforms
        where = _text(index.get("fqn")), None if offset is None else _counts(offset)
        is_outside = leaves_the_folder(file)
        if is_outside or not is_name(file):
            self.used.add(where)  # said here, and nothing else about it
            what = "outside of the checkpoint" if is_outside else "which no file is named"
            self._note(where[0], f"its data would be in {shortened(file)!r}, {what}")
        elif where in self.places:
            self._note(where[0], f"its data at {where[1]} are in two places")
        else:
            self.places[where] = place

    def _tensor(self, key: str, entry: dict[str, Any]) -> StoredTensor:
        shape = _counts(entry.get("size"))
        if math.prod(shape) > MAX_INT64:
            raise ValueError(f"{shortened(key)} would have more elements than can be counted")
        dtype, properties = _properties(_record(entry.get("properties"), "TensorProperties"))
        chunks = []
        stored = entry.get("chunks")
        if not isinstance(stored, list | tuple):
            raise TypeError("a tensor has no list of chunks")
        for found in stored:
            chunk = _state(found, "ChunkStorageMetadata")
            offsets, sizes = _counts(chunk.get("offsets")), _counts(chunk.get("sizes"))
            if not len(offsets) == len(sizes) == len(shape):
                self._note(key, f"a chunk of {len(sizes)} dimensions in a tensor of {len(shape)}")
            elif (place := self._place(key, offsets)) is not None:
                chunks.append(StoredChunk(offsets, sizes, *place))
        return StoredTensor(key, shape, dtype, tuple(sorted(chunks)), properties)

    def _place(self, key: str, offsets: tuple[int, ...] | None) -> _Place | None:
        place = self.places.get((key, offsets))
        if place is None and (key, offsets) not in self.used:
            at = "" if offsets is None else f" for its chunk at {offsets}"
            self._note(key, f"the metadata do not say where the data are{at}")
        self.used.add((key, offsets))
        return place


# What others have written: nothing of it is printed or taken apart before it is known to be small.


_ATTRIBUTES = {
    "MetadataIndex": {"fqn", "offset", "index"},
    "_StorageInfo": {"relative_path", "offset", "length", "transform_descriptors"},
    "TensorStorageMetadata": {"properties", "size", "chunks"},
    "ChunkStorageMetadata": {"offsets", "sizes"},
}
"""Of the objects that are read. With others, torch would set what its classes do not know, or not find what they do."""


def _record(value: object, name: str | None = None) -> PickledObject:
    if not isinstance(value, PickledObject) or (name is not None and value.name != name):
        found = value.name if isinstance(value, PickledObject) else type(value).__name__
        raise TypeError(f"a {found} where {'an object' if name is None else f'a {name}'} is expected")
    return value


def _state(value: object, name: str) -> dict[str, Any]:
    """Return the attributes of an object of this class."""
    state, known = _record(value, name).state or {}, _ATTRIBUTES[name]
    if not isinstance(state, dict) or not state.keys() <= known:
        raise TypeError(f"a {name} has other attributes than {', '.join(sorted(known))}")
    return state


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"a {type(value).__name__} where a text is expected")
    return value


def _few(values: object) -> tuple[Any, ...]:
    if not isinstance(values, list | tuple) or len(values) > MAX_DIMS:
        raise TypeError(f"a {type(values).__name__} where a few values are expected")
    return tuple(values)


def _count(value: object) -> int:
    if type(value) is not int or not 0 <= value <= MAX_INT64:
        raise TypeError(f"a size or an offset is {reprlib.repr(value)}")
    return value


def _counts(values: object) -> tuple[int, ...]:
    if type(values) is not tuple or len(values) > MAX_DIMS:
        return tuple(map(_count, _few(values)))
    for value in values:  # without a call for each: there are millions
        if type(value) is not int or not 0 <= value <= MAX_INT64:
            _count(value)
    return values


_LAYOUTS = {(str(value),) for value in vars(torch).values() if isinstance(value, torch.layout)}
_MEMORY_FORMATS = range(4)  # of torch's enum
_MEMORY_FORMAT_NAMES = ("TORCH_CONTIGUOUS_FORMAT", "TORCH_CHANNELS_LAST", "TORCH_PRESERVE_FORMAT")


def _properties(record: PickledObject) -> tuple[torch.dtype, Properties]:
    """Read a tensor's properties, checked as torch does when it loads the metadata.

    They are a tuple that begins with the dtype; or a dict of attributes, as torch before 2.3 wrote it.
    """
    state = record.state
    dtype = state[0] if isinstance(state, tuple) and state else record.get("dtype")
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"a dtype is a {type(dtype).__name__}")
    if not isinstance(state, tuple):
        return dtype, Properties()
    if len(state) != 5:
        raise TypeError(f"TensorProperties of {len(state)} values, of which there are 5")
    _, layout, requires_grad, memory_format, pin_memory = state
    if not isinstance(layout, PickledObject) or layout.name != "_get_layout" or layout.arguments not in _LAYOUTS:
        raise TypeError("a layout is none of torch's")
    if type(requires_grad) is not bool or type(pin_memory) is not bool:
        raise TypeError("requires_grad or pin_memory is no bool")
    arguments = memory_format.arguments if isinstance(memory_format, PickledObject) else ()
    if arguments and memory_format.name.endswith("MEM_FORMAT_ENCODING") and arguments[0] in _MEMORY_FORMATS:
        return dtype, Properties(requires_grad, arguments[0], pin_memory)
    if arguments and memory_format.name == "getattr" and arguments[-1] in _MEMORY_FORMAT_NAMES:  # before Python 3.11.4
        return dtype, Properties(requires_grad, _MEMORY_FORMAT_NAMES.index(arguments[-1]), pin_memory)
    raise TypeError("a memory format is none of torch's")


@functools.lru_cache
def leaves_the_folder(file: str) -> bool:
    """Tell whether a file's name leads out of the checkpoint's folder."""
    parts = file.replace("\\", "/").split("/")
    return not file or ".." in parts or parts[0] == "" or ":" in parts[0]


@functools.lru_cache
def is_name(file: str) -> bool:
    """Tell whether a file can have this name."""
    return "\0" not in file and len(file) < _MAX_NAME and not any("\ud800" <= letter <= "\udfff" for letter in file)


def _planner_paths(planner_data: object, keys: set[str]) -> dict[str, Path]:
    # DefaultSavePlanner's {flat key: path}. Other planners may keep anything here.
    if not isinstance(planner_data, dict):
        return {}
    if any(type(key) is not str for key in planner_data) and any(key in keys for key in planner_data):
        raise TypeError("a path in the state dict belongs to no key")
    return {
        key: path
        for key, path in planner_data.items()
        if key in keys
        and isinstance(path, tuple)
        and len(path) <= _MAX_DEPTH
        and all(type(part) is str or (type(part) is int and abs(part) <= MAX_INT64) for part in path)
    }
