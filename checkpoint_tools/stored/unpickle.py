"""Reading pickles without running what they name.

A pickle names functions and classes, and calls them; its author chooses which. Python's unpickler in Python (the
one in C takes 64 GB for the memo of a pickle of five bytes) runs here with the opcodes that checkpoints have. Each
allowed name stands for a :class:`PickledObject` that keeps what it was called with, and any other name is an error::

    .metadata ──allowed names──▶ PickledObjects ──▶ reading.py: tensors and chunks
    data.pkl  ──allowed names──▶ PickledObjects ──▶ items.py: where the bytes of a tensor are

The size of what is read bounds the memory.
"""

import contextlib
import gc
import io
import pickle
from collections.abc import Callable, Iterator, Mapping, Set
from typing import Any

import torch

from ..core.errors import CheckpointError
from ..core.text import MAX_DIMS

Allowed = Mapping[str, Set[str]]
"""Module → names in it."""

_PATHS = {"Path", "PosixPath", "WindowsPath", "PurePath", "PurePosixPath", "PureWindowsPath"}

# What DCP of torch 2.1 to 2.13, and torch_dist of Megatron-Core 0.13 to 0.16, write into .metadata.
METADATA_NAMES: Allowed = {
    "torch.distributed.checkpoint.metadata": {
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
    # Enums of Python up to 3.11.3 are pickled as getattr(class, name). Here it is a PickledObject, as all others.
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


class PickledObject:
    """Stand-in for an object of a pickle.

    Attributes:
        name: of the class or function.
        arguments: that it was called with.
        state: that was set afterwards; a dict of attributes, mostly.
    """

    name = ""
    arguments: tuple[Any, ...] = ()
    state: Any = None

    def get(self, name: str, default: Any = None) -> Any:
        """Return an attribute of the object."""
        return self.state.get(name, default) if isinstance(self.state, dict) else default


class _Opaque(PickledObject):
    """Stand-in for an object of any class, whose items are dropped."""

    def extend(self, items: Any) -> None:
        pass

    append = extend

    def __setitem__(self, key: Any, value: Any) -> None:
        pass


class ForbiddenNameError(CheckpointError):
    """The pickle asks for a name that is not allowed."""


def unpickle(content: bytes, allowed: Allowed | None, persistent_load: Callable[[Any], Any] = lambda pid: None) -> Any:
    """Unpickle plain values and :class:`PickledObject`.

    Args:
        content: the pickle.
        allowed: the names in it; ``None`` allows all, for plain values beside objects of any class.
        persistent_load: makes what stands for data outside of the pickle.

    Raises:
        ForbiddenNameError: it names something that is not allowed; the message is that name.
        Exception: any, for bytes that are no pickle, or not one that checkpoints have.
    """
    with without_collections():
        return _Unpickler(content, allowed, persistent_load).load()


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """Turn the garbage collector off: it would visit millions of new objects that all stay."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


_SCALARS = (str, int, float, bytes, type(None), torch.dtype, PickledObject)
_OPCODES = """
    PROTO FRAME STOP MARK POP POP_MARK BINPUT LONG_BINPUT MEMOIZE BINGET LONG_BINGET NONE NEWTRUE NEWFALSE BININT
    BININT1 BININT2 LONG1 BINFLOAT SHORT_BINUNICODE BINUNICODE BINUNICODE8 SHORT_BINBYTES BINBYTES BINBYTES8
    EMPTY_TUPLE TUPLE1 TUPLE2 TUPLE3 TUPLE EMPTY_LIST APPEND APPENDS EMPTY_DICT SETITEM SETITEMS EMPTY_SET
    ADDITEMS GLOBAL STACK_GLOBAL REDUCE NEWOBJ BUILD BINPERSID
"""


def _size(values: Any = ()) -> tuple[int, ...]:
    """Stand in for ``torch.Size``."""
    if type(values) not in (tuple, list) or len(values) > MAX_DIMS:
        raise pickle.UnpicklingError("a torch.Size is made of something else than a few numbers")
    return tuple(values)


def _dict() -> dict[Any, Any]:
    """Stand in for ``OrderedDict``, whose items follow; as arguments, few bytes would copy many."""
    return {}


class _Opcodes(dict[int, Callable[[Any], None]]):
    def __missing__(self, code: int) -> Any:
        raise pickle.UnpicklingError(f"opcode {code:#04x}, which no checkpoint has")


class _Unpickler(pickle._Unpickler):
    stack: list[Any]
    memo: dict[int, Any]
    read: Callable[[int], bytes]

    def __init__(self, content: bytes, allowed: Allowed | None, persistent_load: Callable[[Any], Any]) -> None:
        self._stream = io.BytesIO(content)
        super().__init__(self._stream)
        self._allowed = allowed
        self._length = len(content)
        self._classes: dict[tuple[str, str], Any] = {}  # of this pickle alone: the next one starts afresh
        self._persistent_load = persistent_load

    def load(self) -> Any:
        # pickle's own loop reads each byte through a buffer of frames, which takes half of the time.
        self.metastack: list[list[Any]] = []
        self.stack, self.proto = [], 0
        self.append = self.stack.append
        read = self.read = self._stream.read
        self.readline = self._stream.readline
        dispatch = self.dispatch
        try:
            while True:
                dispatch[read(1)[0]](self)
        except pickle._Stop as stop:  # type: ignore[attr-defined]
            return stop.value

    def persistent_load(self, pid: Any) -> Any:
        return self._persistent_load(pid)

    def find_class(self, module: str, name: str) -> Any:
        known = self._classes.get((module, name))
        if known is None:
            known = self._classes[module, name] = self._found(module, name)
        return known

    def _found(self, module: str, name: str) -> Any:
        if (module, name) in (("torch", "Size"), ("collections", "OrderedDict")):
            return _size if name == "Size" else _dict
        if self._allowed is None:
            return type(name, (_Opaque,), {"name": name})
        if module == "torch" and isinstance(dtype := vars(torch).get(name), torch.dtype):
            return dtype
        if name not in self._allowed.get(module, ()):
            raise ForbiddenNameError(f"{module}.{name}")
        return type(name, (PickledObject,), {"name": name})

    def call(self) -> None:
        arguments, function = self.stack.pop(), self.stack.pop()
        if type(arguments) is not tuple:
            raise pickle.UnpicklingError("a call with arguments as no checkpoint has them")
        if type(function) is type:
            made: Any = object.__new__(function)
            made.arguments = arguments  # not a copy, which many short calls would each make of a long tuple
            self.stack.append(made)
        elif function is _size or function is _dict:
            self.stack.append(function(*arguments[:2]))
        else:
            raise pickle.UnpicklingError(f"a {type(function).__name__} is called, and is not callable")

    def build(self) -> None:
        state = self.stack.pop()
        target = self.stack[-1]
        if isinstance(target, PickledObject):
            target.state = state
        elif type(target) is not dict:  # an OrderedDict may have attributes: a module's state dict has _metadata
            raise pickle.UnpicklingError(f"a {type(target).__name__} gets a state")

    def frame(self) -> None:
        # Nothing here needs the frame; Python's own unpickler in C refuses one that is cut short.
        if int.from_bytes(self.read(8), "little") > self._length - self._stream.tell():
            raise pickle.UnpicklingError("it is cut short")

    def long_binput(self) -> None:
        # As in C, where the memo is an array: what torch could not load is refused.
        place = int.from_bytes(self.read(4), "little")
        if place >= self._length:
            raise pickle.UnpicklingError(f"its memo has {place} places")
        self.memo[place] = self.stack[-1]

    dispatch = _Opcodes(
        {code: pickle._Unpickler.dispatch[code] for name in _OPCODES.split() for code in getattr(pickle, name)}
    )


def _with_plain_keys(opcode: bytes, keys: slice) -> Callable[[Any], None]:
    """Run an opcode with keys at the top of the stack: the hash of one that is nested deeply overflows the C stack."""
    run = pickle._Unpickler.dispatch[opcode[0]]

    def checked(machine: Any) -> None:
        for key in machine.stack[keys]:
            if type(key) is not str:
                for part in key if type(key) is tuple else (key,):
                    if not isinstance(part, _SCALARS):
                        raise pickle.UnpicklingError(f"a {type(key).__name__} is a key")
        run(machine)

    return checked


_Unpickler.dispatch |= {
    pickle.REDUCE[0]: _Unpickler.call,
    pickle.NEWOBJ[0]: _Unpickler.call,
    pickle.BUILD[0]: _Unpickler.build,
    pickle.FRAME[0]: _Unpickler.frame,
    pickle.LONG_BINPUT[0]: _Unpickler.long_binput,
    pickle.SETITEM[0]: _with_plain_keys(pickle.SETITEM, slice(-2, None, 2)),
    pickle.SETITEMS[0]: _with_plain_keys(pickle.SETITEMS, slice(0, None, 2)),
    pickle.ADDITEMS[0]: _with_plain_keys(pickle.ADDITEMS, slice(0, None)),
}
