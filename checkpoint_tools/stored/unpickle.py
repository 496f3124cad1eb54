"""Unpickle plain values. A name in a pickle becomes a :class:`PickledObject`; it is not imported or run.

This is Python's unpickler written in Python, limited to the opcodes that checkpoints use. The one written in C may
allocate 64 GB for the memo of a five-byte pickle; here, memory is bounded by the pickle's size, which readers limit.
"""

import functools
import io
import pickle
import tomllib
from collections.abc import Mapping, Set
from importlib import resources
from typing import Any, ClassVar

import torch

from ..core.text import CheckpointError

_PYTHONS: dict[int, Any] = pickle._Unpickler.dispatch
_OPCODES = """
    PROTO STOP MARK POP POP_MARK BINPUT LONG_BINPUT MEMOIZE BINGET LONG_BINGET NONE NEWTRUE NEWFALSE BININT FRAME
    BININT1 BININT2 LONG1 BINFLOAT SHORT_BINUNICODE BINUNICODE BINUNICODE8 SHORT_BINBYTES BINBYTES BINBYTES8 EMPTY_TUPLE
    TUPLE1 TUPLE2 TUPLE3 TUPLE EMPTY_LIST APPEND APPENDS SETITEM SETITEMS GLOBAL STACK_GLOBAL BINPERSID
"""


class PickledObject:
    """Stand-in for an object: ``name`` of its class or function, ``arguments`` of the call, and ``state`` set later."""

    name = ""
    arguments: tuple[Any, ...] = ()
    state: Any = None


class _Opaque(PickledObject):
    """Stand-in for an object of any class; items that the pickle adds to it are dropped."""

    def append(self, *items: Any) -> None:
        pass

    extend = __setitem__ = append


class _Dict(dict[Any, Any], PickledObject):
    name = "dict"

    def __setitem__(self, key: Any, value: Any) -> None:
        _check_hash(key)
        super().__setitem__(key, value)


def _check_hash(key: Any) -> None:
    """Raise for a tuple in a tuple: hashing deeply nested tuples overflows the C stack, here or in torch.load."""
    if type(key) is tuple and any(type(part) is tuple for part in key):
        raise pickle.UnpicklingError("a key is nested")


class ForbiddenNameError(CheckpointError):
    """Raised if a pickle asks for a name that is not allowed; the message is the name."""


@functools.cache
def allowed(what: str) -> Mapping[str, Set[str]]:
    """Return the names that pickles of kind ``what`` may ask for, by module."""
    tables = tomllib.loads(resources.files(__package__).joinpath("names.toml").read_text())
    return {module: frozenset(names) for module, names in tables[what].items()}


def unpickle(content: bytes, allowed: Mapping[str, Set[str]] | None) -> Any:
    """Unpickle; ``allowed``: names by module, None for all names. Bytes that are no pickle may raise any exception."""
    unpickler = _Unpickler(io.BytesIO(content))
    unpickler.allowed = allowed
    return unpickler.load()


class _Unpickler(pickle._Unpickler):
    allowed: Mapping[str, Set[str]] | None
    stack: list[Any]

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return _Dict
        if self.allowed is None:
            return _stand_in(_Opaque, name)
        if module == "torch" and isinstance(dtype := vars(torch).get(name), torch.dtype):
            return dtype
        names = self.allowed.get(module) or self.allowed.get(f"{module.partition('.')[0]}.*") or ()
        if name not in names and "*" not in names:
            raise ForbiddenNameError(f"{module}.{name}")
        return _stand_in(PickledObject, name)

    def persistent_load(self, pid: Any) -> Any:
        return pid

    def call(self) -> None:
        arguments, made = self.stack.pop(), self.stack[-1]
        if isinstance(made, PickledObject) and made.name == "getattr" and made.arguments[1] == "ProcessGroupState":
            made = _stand_in(PickledObject, "ProcessGroupState")  # a nested class
        if not isinstance(made, type) or not issubclass(made, PickledObject) or type(arguments) is not tuple:
            raise pickle.UnpicklingError(f"a {type(made).__name__} is called, and is not callable")
        if made.name == "Size" and len(arguments) == 1 and type(arguments[0]) is tuple:
            self.stack[-1] = arguments[0]
            return
        if made is _Dict and arguments:
            raise pickle.UnpicklingError("an OrderedDict is made of something")
        if made.name == "set":
            for each in (key for values in arguments for key in values):
                _check_hash(each)
        self.stack[-1] = made.__new__(made)
        self.stack[-1].arguments = arguments  # shared, not copied: many calls may have the same long tuple

    def build(self) -> None:
        state, target = self.stack.pop(), self.stack[-1]
        if not isinstance(target, PickledObject):
            raise pickle.UnpicklingError(f"a {type(target).__name__} gets a state")
        target.state = state

    dispatch: ClassVar[dict[int, Any]] = {
        **{ord(code): _PYTHONS[ord(code)] for code in map(vars(pickle).__getitem__, _OPCODES.split())},
        **dict.fromkeys((ord(pickle.REDUCE), ord(pickle.NEWOBJ)), call),
        ord(pickle.BUILD): build,
        ord(pickle.EMPTY_DICT): lambda self: self.append(_Dict()),
        ord(pickle.EMPTY_SET): _PYTHONS[ord(pickle.EMPTY_LIST)],  # a set becomes a list, whose values need no hashes
        ord(pickle.ADDITEMS): _PYTHONS[ord(pickle.APPENDS)],
    }


@functools.lru_cache
def _stand_in(base: type, name: str) -> Any:
    return type(name, (base,), {"name": name})
