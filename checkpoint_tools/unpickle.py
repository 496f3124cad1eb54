"""Reading pickles without running what they name.

A pickle names functions and classes, and calls them; whoever wrote it chooses which. Here nothing that it names is
looked up. Each allowed name stands for a :class:`Record` that keeps what it was called with, and any other name is an
error, so no code runs but this module's. It also does not depend on what torch calls its classes today::

    .metadata ──allowed names──▶ Records ──▶ reading.py: tensors and chunks
    data.pkl  ──allowed names──▶ Records ──▶ items.py: where the bytes of a tensor are
"""

import io
import pickle
from collections.abc import Callable, Mapping, Set
from typing import Any

import torch

from .errors import CheckpointError

Allowed = Mapping[str, Set[str]]
"""Module → names in it."""

_METADATA = "torch.distributed.checkpoint.metadata"
_PATHS = {"Path", "PosixPath", "WindowsPath", "PurePath", "PurePosixPath", "PureWindowsPath"}

# What DCP of torch 2.1 to 2.13, and torch_dist of Megatron-Core 0.13 to 0.16, write into .metadata.
METADATA_NAMES: Allowed = {
    _METADATA: {
        *("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "MetadataIndex"),
        *("TensorProperties", "_MEM_FORMAT_ENCODING", "StorageMeta"),
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    # Megatron-Core keeps the plans of all ranks beside the metadata, and up to 0.15 its own classes of both.
    "torch.distributed.checkpoint.planner": {
        *("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData"),
    },
    "megatron.core.dist_checkpointing.strategies.torch": {"MCoreMetadata", "MCoreSavePlan"},
    # Where TensorProperties was before torch 2.3.
    "torch.distributed._shard.sharded_tensor.metadata": {"TensorProperties", "MEM_FORMAT_ENCODING"},
    "torch.serialization": {"_get_layout"},
    "pathlib": _PATHS,
    "pathlib._local": _PATHS,  # Python 3.13
    # Enums of Python up to 3.11.3 are pickled as getattr(class, name). As all others it is a Record here: no getattr.
    "builtins": {"getattr"},
    "__builtin__": {"getattr"},
}

# What torch.save writes for a tensor.
TENSOR_NAMES: Allowed = {
    "torch._utils": {"_rebuild_tensor_v2", "_rebuild_tensor_v3", "_rebuild_parameter"},
    "torch.storage": {"UntypedStorage"},
    "torch": {
        *("DoubleStorage", "FloatStorage", "HalfStorage", "BFloat16Storage", "LongStorage", "IntStorage"),
        *("ShortStorage", "CharStorage", "ByteStorage", "BoolStorage", "ComplexDoubleStorage", "ComplexFloatStorage"),
    },
}


class Record:
    """What stands for an object of a pickle.

    Attributes:
        name: of the class or function.
        arguments: that it was called with.
        state: that was set afterwards; a dict of attributes, mostly.
    """

    name = ""
    arguments: tuple[Any, ...]
    state: Any

    def __new__(cls, *arguments: Any) -> "Record":
        """A call, by whatever opcode."""
        self = super().__new__(cls)
        self.arguments = arguments
        self.state = None
        return self

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def get(self, name: str, default: Any = None) -> Any:
        """An attribute of what it stands for."""
        return self.state.get(name, default) if isinstance(self.state, dict) else default


class ForbiddenNameError(CheckpointError):
    """The pickle asks for something that is not allowed."""


class _Unpickler(pickle.Unpickler):
    def __init__(self, content: bytes, allowed: Allowed, persistent_load: Callable[[Any], Any] | None) -> None:
        super().__init__(io.BytesIO(content))
        self._allowed = allowed
        self._persistent_load = persistent_load
        # Classes of this pickle alone: whatever it does to them, the next one starts afresh.
        self._classes: dict[tuple[str, str], type[Record]] = {}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch", "Size"):
            return tuple
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        if module == "torch" and isinstance(dtype := vars(torch).get(name), torch.dtype):
            return dtype
        if name not in self._allowed.get(module, ()):
            raise ForbiddenNameError(f"{module}.{name}")
        return self._classes.setdefault((module, name), type(name, (Record,), {"name": name}))

    def persistent_load(self, pid: Any) -> Any:
        if self._persistent_load is None:
            raise pickle.UnpicklingError("it refers to data outside of itself")
        return self._persistent_load(pid)


class _Opaque(Record):
    """What stands for an object of which nothing but its attributes is of interest."""

    def __setitem__(self, key: Any, value: Any) -> None:
        """Of a dict of its own kind."""

    def append(self, value: Any) -> None:
        """Of a list of its own kind."""

    def extend(self, values: Any) -> None:
        """The same."""


class _PlainUnpickler(_Unpickler):
    """Names everything, looks up nothing: each name is an empty class of its own."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in (("torch", "Size"), ("collections", "OrderedDict")):
            return super().find_class(module, name)
        return self._classes.setdefault((module, name), type(name, (_Opaque,), {"name": name}))


def unpickle_plain(content: bytes) -> Any:
    """What a pickle holds, whatever it names: for the plain values in it, such as the attributes of a namespace.

    Raises:
        Exception: whatever the unpickler meets in bytes that are no pickle.
    """
    return _PlainUnpickler(content, {}, lambda pid: None).load()


def unpickle(content: bytes, allowed: Allowed, persistent_load: Callable[[Any], Any] | None = None) -> Any:
    """What a pickle holds, of plain values and :class:`Record`.

    Raises:
        ForbiddenNameError: it names something that is not allowed; the message is that name.
        Exception: whatever the unpickler meets in bytes that are no pickle.
    """
    return _Unpickler(content, allowed, persistent_load).load()
