"""Tensors that must not be used for a while: whoever computes with one, or saves it, is told so.

While it is guarded, a tensor has a class of its own, derived from the one it had, whose functions refuse to run. The
object stays the same: ``is``, ``isinstance``, hashes, and whoever holds it see no difference. Views that exist already
are tensors of their own, which nobody guards; what is reached past torch's functions (``DTensor._local_tensor``) is not
guarded either.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

# What a tensor knows without its values.
_METHODS = {
    *("size", "stride", "dim", "ndimension", "numel", "nelement", "element_size", "storage_offset", "__len__"),
    *("is_contiguous", "is_floating_point", "is_complex", "is_signed", "get_device", "untyped_storage"),
    *("requires_grad_", "register_hook", "register_post_accumulate_grad_hook"),
}
_METHODS_IN_PYTHON = {"to_local", "full_tensor", "redistribute"}
"""Methods of DTensor that are no torch functions."""

_VALUES = {"data", "T", "H", "mT", "mH", "real", "imag"}
_GRADIENT = {"grad", "_grad"}
_SETTABLE = {"requires_grad"}


class Guard:
    """One reason for which tensors must not be used.

    Args:
        name: becomes part of the class name that the tensors have meanwhile.
        message: of the error; ``{what}`` is the name of the function that was called.
        lets_gradients: whether ``.grad`` may still be read and set.
        attributes: of those that may be used, the ones that are used often: they are made as fast as without a guard.
    """

    def __init__(self, name: str, message: str, *, lets_gradients: bool, attributes: Iterable[str] = ()) -> None:
        self.name = name
        self._message = message
        self._refused = _VALUES if lets_gradients else _VALUES | _GRADIENT
        self._setters = _GRADIENT if lets_gradients else frozenset()
        self.attributes = tuple(attributes)
        self._classes: dict[type[Tensor], type[Tensor]] = {}

    def put_on(self, tensors: Iterable[Tensor]) -> Callable[[], None]:
        """Refuse to use ``tensors`` from now on; returns what ends it, whichever guard of a tensor ends first."""
        guarded: list[Tensor] = []
        for tensor in dict.fromkeys(tensors):
            cls = type(tensor)
            if self.guards(tensor):
                continue
            try:
                tensor.__class__ = self._class_for(cls)
            except TypeError:  # a class with slots, or written in C: it fails as torch lets it fail
                continue
            guarded.append(tensor)

        return partial(self.take_off, guarded)

    def take_off(self, tensors: Iterable[Tensor]) -> None:
        """Let ``tensors`` be used again; other guards of theirs stay."""
        for tensor in tensors:
            tensor.__class__ = self._without(type(tensor))

    def guards(self, tensor: Tensor) -> bool:
        """Return whether it guards ``tensor`` now, alone or below other guards."""
        return any(_GUARDS.get(cls) is self for cls in type(tensor).__mro__)

    def on_use(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Answer a function that needs the values of a guarded tensor.

        Raises:
            RuntimeError: always, unless a guard of another kind does something else.
        """
        self.refuse(_name_of(func))

    def on_method(self, tensor: Tensor, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Answer a method of DTensor that is no torch function, as :meth:`on_use`."""
        self.refuse(f"{name}()")

    def refuse(self, what: str) -> NoReturn:
        """Raise its error.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(self._message.format(what=what))

    def attribute(self, name: str) -> property:
        """Return the attribute of guarded tensors that is one of ``attributes``."""
        return past_torch_function(name)

    def _class_for(self, cls: type[Tensor]) -> type[Tensor]:
        # The same every time: a new one for each use would grow torch's tables of subclasses.
        if cls not in self._classes:
            self._classes[cls] = _derive(cls, self)
            _GUARDS[self._classes[cls]] = self
        return self._classes[cls]

    def _without(self, cls: type[Tensor]) -> type[Tensor]:
        """``cls`` without this guard; guards that came later stay."""
        guard = _GUARDS.get(cls)
        if guard is None:
            return cls
        below = cls.__bases__[0]
        return below if guard is self else guard._class_for(self._without(below))

    def lets(self, func: Any) -> bool:
        """Return whether ``func`` needs no values."""
        name = getattr(func, "__name__", "")
        of = getattr(getattr(func, "__self__", None), "__name__", "grad")
        if name == "__get__":
            return of not in self._refused
        if name in ("__set__", "__delete__"):
            return of in self._setters or of in _SETTABLE
        return name in _METHODS


class WriteWatch(Guard):
    """Lets tensors be used. Their version shows every write, also what may come through ``.data``, which has its own.

    Args:
        name: becomes part of the class name that the tensors have meanwhile.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name, "", lets_gradients=True)

    def on_use(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run ``func``; taking or setting ``.data`` counts as a write."""
        with torch._C.DisableTorchFunctionSubclass():
            if getattr(func, "__self__", None) is Tensor.data:
                increment_version(args[0])
            return func(*args, **kwargs)

    def on_method(self, tensor: Tensor, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run it."""
        return getattr(self._without(type(tensor)), name)(tensor, *args, **kwargs)


_GUARDS: dict[type[Tensor], Guard] = {}
"""The guard of each class that one has derived."""


def unguarded_class(tensor: Tensor) -> type[Tensor]:
    """Return the class that ``tensor`` has below all of its guards."""
    cls = type(tensor)
    while cls in _GUARDS:
        cls = cls.__bases__[0]
    return cls


def _derive(cls: Any, guard: Guard) -> type[Tensor]:
    class Guarded(cls):  # type: ignore[misc]
        @classmethod
        def __torch_function__(
            cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            if not guard.lets(func):
                return guard.on_use(func, args, kwargs or {})
            return super().__torch_function__(func, types, args, kwargs or {})

        def __repr__(self, **_: Any) -> str:
            state = guard.name.lower()
            return f"{cls.__name__}({state}, shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"

    def method(name: str) -> Callable[..., Any]:
        return lambda self, *args, **kwargs: guard.on_method(self, name, args, kwargs)

    for name in _METHODS_IN_PYTHON & set(dir(cls)):
        setattr(Guarded, name, method(name))
    for name in guard.attributes:
        setattr(Guarded, name, guard.attribute(name))
    Guarded.__name__, Guarded.__qualname__ = f"{guard.name}{cls.__name__}", f"{guard.name}{cls.__qualname__}"
    return Guarded


def past_torch_function(name: str) -> property:
    """An attribute of tensors past ``__torch_function__``, which takes several times as long as the attribute."""
    of_tensor = getattr(Tensor, name)

    def get(tensor: Tensor) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return of_tensor.__get__(tensor)

    def put(tensor: Tensor, value: Any) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            of_tensor.__set__(tensor, value)

    def delete(tensor: Tensor) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            of_tensor.__delete__(tensor)

    return property(get, put, delete)


def _name_of(func: Any) -> str:
    name = getattr(func, "__name__", repr(func))
    if name in ("__get__", "__set__", "__delete__"):
        return f"tensor.{getattr(func.__self__, '__name__', '?')}"
    return f"{name}()"
