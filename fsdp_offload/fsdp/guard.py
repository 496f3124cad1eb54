"""Guards: temporary subclasses that tensors get, to intercept or refuse uses of them.

The tensor stays the same object: ``is``, ``isinstance``, hashes and existing references see no difference. Guards may
be put on top of each other and taken off in any order. Views that exist already are not guarded, nor is access past
torch's functions (``DTensor._local_tensor``).
"""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

_METHODS_IN_PYTHON = {"to_local", "full_tensor", "redistribute"}  # of DTensor, which are no torch functions
_VALUES = {"data", "T", "H", "mT", "mH", "real", "imag", "_base"}
_GRADIENT = {"grad", "_grad"}
_SETTABLE = {"requires_grad"}
_GUARDS: dict[type[Tensor], "Guard"] = {}  # by class that a guard has derived


@functools.cache
def _guards_of(cls: type) -> list["Guard"]:
    return [_GUARDS[each] for each in cls.__mro__ if each in _GUARDS]


class Guard:
    """Refuses uses of tensors for one reason: computing with one, or saving it, raises."""

    methods = frozenset(
        {
            *("size", "stride", "dim", "ndimension", "numel", "nelement", "element_size", "storage_offset", "__len__"),
            *("is_contiguous", "is_floating_point", "is_complex", "is_signed", "get_device", "untyped_storage"),
            *("requires_grad_", "register_hook", "register_post_accumulate_grad_hook"),
        }
    )
    """Methods that need no values."""

    def __init__(self, name: str, message: str, *, lets_gradients: bool, attributes: Iterable[str] = ()) -> None:
        """Make a guard that allows ``attributes``, at full speed, and ``.grad`` if ``lets_gradients``."""
        self.name = name  # prefix of the class names of guarded tensors
        self.message = message  # of the error; ``{what}`` is the function that was called
        self._refused = _VALUES if lets_gradients else _VALUES | _GRADIENT
        self._setters = _SETTABLE | _GRADIENT if lets_gradients else _SETTABLE
        self._attributes = tuple(attributes)
        self._classes: dict[type[Tensor], type[Tensor]] = {}

    def put_on(self, tensors: Iterable[Tensor]) -> Callable[[], None]:
        """Guard ``tensors`` from now on; return a function that takes the guard off, in any order with other guards."""
        guarded: list[Tensor] = []
        for tensor in tensors:
            if not self.guards(tensor):
                try:
                    tensor.__class__ = self._class_for(type(tensor))
                except TypeError:  # a class with slots, or written in C, cannot be guarded
                    continue
                guarded.append(tensor)
        return functools.partial(self.take_off, guarded)

    def take_off(self, tensors: Iterable[Tensor]) -> None:
        """Remove this guard from ``tensors``; other guards stay."""
        for tensor in tensors:
            tensor.__class__ = self._without(type(tensor))

    def guards(self, tensor: object) -> bool:
        """Return whether this guard is on ``tensor``, alone or below other guards."""
        return self in _guards_of(type(tensor))  # type: ignore[arg-type]  # to mypy, classes have no hash

    def _class_for(self, cls: type[Tensor]) -> type[Tensor]:
        # Derive once from each class: a new class for each use would grow torch's tables of subclasses.
        if cls not in self._classes:
            self._classes[cls] = made = self.derive(cls)
            _GUARDS[made] = self
        return self._classes[cls]

    def _without(self, cls: type[Tensor]) -> type[Tensor]:
        """Return ``cls`` without this guard; guards on top of it stay."""
        guard = _GUARDS.get(cls)
        if guard is None:
            return cls
        below = cls.__bases__[0]
        return below if guard is self else guard._class_for(self._without(below))

    # Overridden by subclasses -----------------------------------------------------------------------------------------

    def on_use(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Answer a function that needs the values of a guarded tensor; this class raises."""
        name = getattr(func, "__name__", repr(func))
        of_attribute = name in ("__get__", "__set__", "__delete__")
        self.refuse(f"tensor.{getattr(func.__self__, '__name__', '?')}" if of_attribute else f"{name}()")

    def on_method(self, tensor: Tensor, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Answer a method of DTensor that is no torch function, as :meth:`on_use`."""
        self.refuse(f"{name}()")

    def refuse(self, what: str) -> NoReturn:
        """Raise the error of this guard."""
        raise RuntimeError(self.message.format(what=what))

    def lets(self, func: Any) -> bool:
        """Return whether ``func`` needs no values."""
        name = getattr(func, "__name__", "")
        of = getattr(getattr(func, "__self__", None), "__name__", "grad")
        if name == "__get__":
            return of not in self._refused
        return of in self._setters if name in ("__set__", "__delete__") else name in self.methods

    def derive(self, cls: Any) -> type[Tensor]:
        """Return a subclass of ``cls`` that asks this guard about each use of its tensors."""
        guard = self

        class Guarded(cls):  # type: ignore[misc]
            @classmethod
            def __torch_function__(
                cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
            ) -> Any:
                if not guard.lets(func):
                    return guard.on_use(func, args, kwargs or {})
                return super().__torch_function__(func, types, args, kwargs or {})

        def show(tensor: Tensor, **_: Any) -> str:
            state = f"{guard.name.lower()}, shape={tuple(tensor.shape)}, dtype={tensor.dtype}, device={tensor.device}"
            return f"{cls.__name__}({state})"

        def call(tensor: Tensor, name: str, /, *args: Any, **kwargs: Any) -> Any:
            return guard.on_method(tensor, name, args, kwargs)

        def past(method: Callable[..., Any], tensor: Tensor, *value: Any) -> Any:
            with torch._C.DisableTorchFunctionSubclass():  # otherwise several times slower
                return method(tensor, *value)

        names = _METHODS_IN_PYTHON & set(dir(cls))
        own: dict[str, Any] = {name: functools.partialmethod(call, name) for name in names}
        for name in self._attributes:
            slot = getattr(Tensor, name)
            methods = slot.__get__, slot.__set__, slot.__delete__
            get, put, delete = (functools.partial(past, method) for method in methods)
            own[name] = property(get, put, delete)
        for name, value in (own | ({"__repr__": show} if self.name else {})).items():
            setattr(Guarded, name, value)
        Guarded.__name__, Guarded.__qualname__ = f"{self.name}{cls.__name__}", f"{self.name}{cls.__qualname__}"
        return Guarded


def unguarded_class(tensor: Tensor) -> type[Tensor]:
    """Return the class of ``tensor`` without guards."""
    return next(cls for cls in type(tensor).__mro__ if cls not in _GUARDS)
