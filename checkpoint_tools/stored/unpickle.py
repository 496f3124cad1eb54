"""Reading pickles without running what they name.

A pickle names functions and classes, and calls them; whoever wrote it chooses which. Here nothing that it names is
looked up. Each allowed name stands for a :class:`PickledObject` that keeps what it was called with, and any other
name is an error, so no code runs but this module's; and what is read is never much larger than the pickle. It also
does not depend on what torch calls its classes today::

    .metadata ──allowed names──▶ Records ──▶ reading.py: tensors and chunks
    data.pkl  ──allowed names──▶ Records ──▶ items.py: where the bytes of a tensor are
"""

import contextlib
import gc
import pickle
import struct
from collections.abc import Callable, Iterator, Mapping, Set
from typing import Any

import torch

from ..core.errors import CheckpointError
from ..core.sizes import MAX_DIMS

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


class ForbiddenNameError(CheckpointError):
    """The pickle asks for something that is not allowed."""


def unpickle_plain(content: bytes) -> Any:
    """Unpickle plain values; each name becomes an empty class, whose objects keep nothing.

    For those who need the plain values in it, or want to know that it can be loaded without harm to this process.

    Raises:
        Exception: whatever is met in bytes that are no pickle, or not one that checkpoints have.
    """
    return _PlainMachine(content, {}, lambda pid: None).run()


def unpickle(content: bytes, allowed: Allowed, persistent_load: Callable[[Any], Any] | None = None) -> Any:
    """Unpickle plain values and :class:`PickledObject`.

    Raises:
        ForbiddenNameError: it names something that is not allowed; the message is that name.
        Exception: whatever is met in bytes that are no pickle, or not one that checkpoints have.
    """
    return _Machine(content, allowed, persistent_load).run()


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """Do something that makes millions of objects which stay: they would set off the garbage collector in vain."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


_MAX_INT_BYTES = 16
_MAX_PLAIN_INT_BYTES = 1024  # generators of random numbers have states of more than 16, and Python prints these
_PROTOCOLS = range(2, 6)
_SCALARS = (str, int, float, bytes, type(None), torch.dtype)


def _size(*arguments: Any) -> tuple[int, ...]:
    """Stand in for ``torch.Size``."""
    (values,) = arguments or ((),)
    if type(values) not in (tuple, list) or len(values) > MAX_DIMS:
        raise pickle.UnpicklingError("a torch.Size is made of something else than a few numbers")
    return tuple(values)


def _dict(*arguments: Any) -> dict[Any, Any]:
    """Stand in for ``OrderedDict``, whose items follow; as arguments, few bytes would copy many."""
    if arguments:
        raise pickle.UnpicklingError("an OrderedDict is made of something")
    return {}


class _Machine:
    """Reads a pickle, opcode by opcode.

    Python's own unpickler trusts the numbers in a pickle: five bytes make it take 64 GB for its memo, and a deeply
    nested key of a dict overflows the stack. Here memory grows with the pickle's length and with nothing else.
    """

    max_int_bytes = _MAX_INT_BYTES

    def __init__(self, content: bytes, allowed: Allowed, persistent_load: Callable[[Any], Any] | None) -> None:
        self._content = content
        self._at = 0
        self._allowed = allowed
        self._persistent_load = persistent_load
        self._stack: list[Any] = []
        self._marks: list[list[Any]] = []
        self._memo: dict[int, Any] = {}
        # Classes of this pickle alone: whatever it does to them, the next one starts afresh.
        self._classes: dict[tuple[str, str], Any] = {}

    def run(self) -> Any:
        """Execute the whole pickle."""
        with without_collections():
            return self._run()

    def _run(self) -> Any:  # noqa: C901  # a call for each opcode would take twice as long
        content, do, memo = self._content, _OPCODES, self._memo
        at, stack = self._at, self._stack
        while True:
            opcode = content[at]
            at += 1
            # Nine in ten opcodes are one of these: without a call each, all take half as long.
            if opcode == _MEMOIZE:
                memo[len(memo)] = stack[-1]
            elif opcode == _BINGET:
                stack.append(memo[content[at]])
                at += 1
            elif opcode == _LONG_BINGET:
                stack.append(memo[_UINT32.unpack_from(content, at)[0]])
                at += 4
            elif opcode == _BININT1:
                stack.append(content[at])
                at += 1
            elif opcode == _EMPTY_TUPLE:
                stack.append(())
            elif opcode in _CALLS and len(stack) > 1 and type(stack[-2]) is type and type(stack[-1]) is tuple:
                arguments = stack.pop()
                made: PickledObject = _new(stack[-1])
                made.arguments = arguments  # not a copy, which many short calls would each make of a long tuple
                stack[-1] = made
            elif opcode == _MARK:
                self._marks.append(stack)
                self._stack = stack = []
            elif opcode == _TUPLE1:
                stack[-1] = (stack[-1],)
            elif opcode == _TUPLE2:
                last = stack.pop()
                stack[-1] = (stack[-1], last)
            elif opcode == _BUILD and isinstance(stack[-2], PickledObject):
                state = stack.pop()
                stack[-1].state = state
            elif opcode == _SETITEMS:
                values, self._stack = stack, self._marks.pop()
                stack = self._stack
                self._set_items(values)
            elif opcode == _NEWFALSE:
                stack.append(False)
            elif opcode == _EMPTY_DICT:
                stack.append({})
            elif opcode == _EMPTY_LIST:
                stack.append([])
            elif opcode == _STOP:
                return stack.pop()
            else:
                run = do[opcode]
                if run is None:
                    raise pickle.UnpicklingError(f"opcode {opcode:#04x}, which no checkpoint has")
                self._at = at
                run(self)
                at, stack = self._at, self._stack

    # --- bytes ---

    def _take(self, count: int) -> bytes:
        start = self._at
        self._at = stop = start + count
        if stop > len(self._content):
            raise pickle.UnpicklingError("it is cut short")
        return self._content[start:stop]

    def _number(self, count: int) -> int:
        return int.from_bytes(self._take(count), "little")

    def _line(self) -> str:
        end = self._content.index(b"\n", self._at)
        line = self._content[self._at : end]
        self._at = end + 1
        return line.decode()

    # --- the stack ---

    def _push(self, value: Any) -> None:
        self._stack.append(value)

    def _popped(self, count: int) -> list[Any]:
        if len(self._stack) < count:
            raise pickle.UnpicklingError("its stack is empty")
        values = self._stack[-count:]
        del self._stack[-count:]
        return values

    def _to_mark(self) -> list[Any]:
        values = self._stack
        self._stack = self._marks.pop()
        return values

    def pop(self) -> None:
        self._stack.pop()

    def pop_mark(self) -> None:
        self._to_mark()

    # --- the memo ---

    def put(self, count: int) -> None:
        place = self._number(count)
        if place >= len(self._content):  # a memo with fewer values than places, for all of which Python takes memory
            raise pickle.UnpicklingError(f"its memo has {place} places")
        self._memo[place] = self._stack[-1]

    # --- values ---

    def protocol(self) -> None:
        if self._number(1) not in _PROTOCOLS:
            raise pickle.UnpicklingError("of an unknown protocol")

    def frame(self) -> None:
        if self._number(8) > len(self._content) - self._at:
            raise pickle.UnpicklingError("it is cut short")

    def signed(self, count: int) -> None:
        self._stack.append(int.from_bytes(self._take(count), "little", signed=True))

    def long(self, count: int) -> None:
        length = self._number(count)
        if length > self.max_int_bytes:
            raise pickle.UnpicklingError(f"a number of {length} bytes")
        self.signed(length)

    def double(self) -> None:
        self._stack.append(struct.unpack(">d", self._take(8))[0])

    def text(self, count: int) -> None:
        self._stack.append(str(self._take(self._number(count)), "utf-8", "surrogatepass"))

    def binary(self, count: int) -> None:
        self._stack.append(self._take(self._number(count)))

    # --- containers ---

    def tuple_of(self, count: int) -> None:
        self._stack.append(tuple(self._popped(count)))

    def tuple_to_mark(self) -> None:
        values = self._to_mark()
        self._stack.append(tuple(values))

    def list_to_mark(self) -> None:
        values = self._to_mark()
        self._stack.append(values)

    def append(self) -> None:
        value = self._stack.pop()
        self._top(list).append(value)

    def appends(self) -> None:
        values = self._to_mark()
        self._top(list).extend(values)

    def setitem(self) -> None:
        self._set_items(self._popped(2))

    def _set_items(self, values: list[Any]) -> None:
        target = self._top(dict)
        if len(values) % 2:
            raise pickle.UnpicklingError("a key without a value")
        keys = values[::2]
        if not {str}.issuperset(map(type, keys)):
            for key in keys:
                _check_key(key)
        target.update(zip(keys, values[1::2], strict=True))

    def dict_to_mark(self) -> None:
        values = self._to_mark()
        self._stack.append({})
        self._set_items(values)

    def additems(self) -> None:
        values = self._to_mark()
        for value in values:
            _check_key(value)
        self._top(set).update(values)

    def frozenset_to_mark(self) -> None:
        values = self._to_mark()
        for value in values:
            _check_key(value)
        self._stack.append(frozenset(values))

    def _top(self, kind: type) -> Any:
        target = self._stack[-1]
        if type(target) is not kind:
            raise pickle.UnpicklingError(f"a {type(target).__name__} where a {kind.__name__} belongs")
        return target

    # --- names and calls ---

    def global_name(self) -> None:
        self._find(self._line(), self._line())

    def stack_global(self) -> None:
        module, name = self._popped(2)
        if type(module) is not str or type(name) is not str:
            raise pickle.UnpicklingError("a name that is no text")
        self._find(module, name)

    def _find(self, module: str, name: str) -> None:
        if (module, name) not in self._classes:
            self._classes[module, name] = self._found(module, name)
        self._stack.append(self._classes[module, name])

    def _found(self, module: str, name: str) -> Any:
        if (module, name) == ("torch", "Size"):
            return _size
        if (module, name) == ("collections", "OrderedDict"):
            return _dict
        if module == "torch" and isinstance(dtype := vars(torch).get(name), torch.dtype):
            return dtype
        if name not in self._allowed.get(module, ()):
            raise ForbiddenNameError(f"{module}.{name}")
        return type(name, (PickledObject,), {"name": name})

    def reduce(self) -> None:
        arguments = self._stack.pop()
        self._call(self._stack.pop(), arguments, {})

    def newobj_ex(self) -> None:
        self._call(*self._popped(3))

    def _call(self, function: Any, arguments: Any, keywords: Any) -> None:
        # Everything that there is to be called is in here: what _found gives. Its only classes are of PickledObject.
        if function is not _size and function is not _dict and type(function) is not type:
            raise pickle.UnpicklingError(f"a {type(function).__name__} is called, and is not callable")
        if type(arguments) is not tuple or type(keywords) is not dict:
            raise pickle.UnpicklingError("a call with arguments as no checkpoint has them")
        if type(function) is not type:
            self._stack.append(function(*arguments[:2]))
            return
        made: PickledObject = _new(function)
        made.arguments = arguments
        self._stack.append(made)

    def build(self) -> None:
        state = self._stack.pop()
        self._set_state(self._stack[-1], state)

    def _set_state(self, target: Any, state: Any) -> None:
        if not isinstance(target, PickledObject):
            raise pickle.UnpicklingError(f"a {type(target).__name__} gets a state")
        target.state = state

    def persistent_id(self) -> None:
        if self._persistent_load is None:
            raise pickle.UnpicklingError("it refers to data outside of itself")
        self._stack.append(self._persistent_load(*self._popped(1)))


class _Opaque(PickledObject):
    """Stand-in for an object of which only the attributes matter."""


class _PlainMachine(_Machine):
    """Names everything, and looks up nothing."""

    max_int_bytes = _MAX_PLAIN_INT_BYTES

    def _found(self, module: str, name: str) -> Any:
        if (module, name) in (("torch", "Size"), ("collections", "OrderedDict")):
            return super()._found(module, name)
        return type(name, (_Opaque,), {"name": name})

    def _top(self, kind: type) -> Any:
        # Items of an object of its own kind: of no interest.
        return kind() if isinstance(self._stack[-1], _Opaque) else super()._top(kind)

    def _set_state(self, target: Any, state: Any) -> None:
        if type(target) is not dict:  # an OrderedDict may have attributes: a module's state dict has _metadata
            super()._set_state(target, state)


def _check_key(key: Any) -> None:
    # The hash of what is nested deeply overflows the stack.
    parts = key if type(key) is tuple else (key,)
    if not all(isinstance(part, (*_SCALARS, PickledObject)) for part in parts):
        raise pickle.UnpicklingError(f"a {type(key).__name__} is a key")


_STOP, _MEMOIZE, _BINGET, _LONG_BINGET, _BININT1, _MARK, _NEWFALSE, _BUILD, _SETITEMS = (
    opcode[0]
    for opcode in (
        *(pickle.STOP, pickle.MEMOIZE, pickle.BINGET, pickle.LONG_BINGET, pickle.BININT1),
        *(pickle.MARK, pickle.NEWFALSE, pickle.BUILD, pickle.SETITEMS),
    )
)
_EMPTY_TUPLE, _TUPLE1, _TUPLE2, _EMPTY_DICT, _EMPTY_LIST = (
    opcode[0] for opcode in (pickle.EMPTY_TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.EMPTY_DICT, pickle.EMPTY_LIST)
)
_CALLS = pickle.NEWOBJ[0], pickle.REDUCE[0]
_new: Callable[[Any], Any] = object.__new__
_UINT32 = struct.Struct("<I")

_OPCODES: list[Callable[[_Machine], None] | None] = [None] * 256
for _opcode, _run in {
    pickle.PROTO: _Machine.protocol,
    pickle.FRAME: _Machine.frame,
    pickle.POP: _Machine.pop,
    pickle.POP_MARK: _Machine.pop_mark,
    pickle.BINPUT: lambda machine: machine.put(1),
    pickle.LONG_BINPUT: lambda machine: machine.put(4),
    pickle.NONE: lambda machine: machine._push(None),
    pickle.NEWTRUE: lambda machine: machine._push(True),
    pickle.BININT: lambda machine: machine.signed(4),
    pickle.BININT2: lambda machine: machine._push(machine._number(2)),
    pickle.LONG1: lambda machine: machine.long(1),
    pickle.LONG4: lambda machine: machine.long(4),
    pickle.BINFLOAT: _Machine.double,
    pickle.SHORT_BINUNICODE: lambda machine: machine.text(1),
    pickle.BINUNICODE: lambda machine: machine.text(4),
    pickle.BINUNICODE8: lambda machine: machine.text(8),
    pickle.SHORT_BINBYTES: lambda machine: machine.binary(1),
    pickle.BINBYTES: lambda machine: machine.binary(4),
    pickle.BINBYTES8: lambda machine: machine.binary(8),
    pickle.TUPLE3: lambda machine: machine.tuple_of(3),
    pickle.TUPLE: _Machine.tuple_to_mark,
    pickle.LIST: _Machine.list_to_mark,
    pickle.APPEND: _Machine.append,
    pickle.APPENDS: _Machine.appends,
    pickle.DICT: _Machine.dict_to_mark,
    pickle.SETITEM: _Machine.setitem,
    pickle.EMPTY_SET: lambda machine: machine._push(set()),
    pickle.ADDITEMS: _Machine.additems,
    pickle.FROZENSET: _Machine.frozenset_to_mark,
    pickle.GLOBAL: _Machine.global_name,
    pickle.STACK_GLOBAL: _Machine.stack_global,
    pickle.REDUCE: _Machine.reduce,
    pickle.NEWOBJ: _Machine.reduce,
    pickle.NEWOBJ_EX: _Machine.newobj_ex,
    pickle.BUILD: _Machine.build,
    pickle.BINPERSID: _Machine.persistent_id,
}.items():
    _OPCODES[_opcode[0]] = _run
