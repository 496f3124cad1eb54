"""Gradients, and parameters, that tell what is done with them between the backward and ``step()``.

A watched tensor is the same object with the same memory, of a class derived from the one it had. What only looks at
it runs as ever. What scales it, as clipping does, may be put off by whoever watches; what else may write it is
announced first, and so is whatever hands out its memory (views, ``.data``, ``DTensor.to_local()``): what becomes of
that is not seen, and not all of it counts a version (no collective does, nor NumPy, nor some of torch's functions on
DTensors).
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils import _foreach_utils

from .dtensor import LOCAL, is_dtensor_class, local_shard
from .guard import past_torch_function


class Watcher(Protocol):
    """Whoever wants to know what is done with tensors."""

    def reads(self, grads: Sequence[Tensor]) -> None:
        """These are about to be looked at."""

    def writes(self, grads: Sequence[Tensor]) -> None:
        """These are about to be written."""

    def shares(self, grads: Sequence[Tensor]) -> None:
        """Their memory is given to somebody who may write it at any time, and nobody is told."""

    def scales(self, grads: Sequence[Tensor], factor: Tensor | float, multiply: "Multiply") -> Sequence[Tensor]:
        """These are about to be multiplied by ``factor``. Returns those that the watcher multiplies itself.

        It does so by ``multiply(grads, factor)``, later or not at all.
        """


Multiply = Callable[[Sequence[Tensor], Tensor | float], object]


def watch(grad: Tensor, watcher: Watcher) -> None:
    """Tell ``watcher``, which is not kept alive, what is done with ``grad`` from now on."""
    if is_watched(grad):
        grad.__dict__[_WATCHER] = weakref.ref(watcher)
        return
    try:
        grad.__class__ = _class_for(type(grad))
    except TypeError:  # a class with slots, or written in C; its versions are all that there is
        return
    grad.__dict__[_WATCHER] = weakref.ref(watcher)


def unwatch(grad: Tensor) -> None:
    """Undo :func:`watch`; nothing where it is not watched."""
    if is_watched(grad):
        grad.__class__ = type(grad).__bases__[0]
        del grad.__dict__[_WATCHER]


def is_watched(grad: object) -> bool:
    """Return whether :func:`watch` has been called for it."""
    return type(grad) in _BASES


_WATCHER = "_fsdp_offload_watcher"
_BASES: dict[type, type[Tensor]] = {}
_CLASSES: dict[type[Tensor], type[Tensor]] = {}
"""Each class and what it is derived from, both ways. The same every time: torch keeps tables of subclasses."""


def _class_for(cls: Any) -> type[Tensor]:
    if cls not in _CLASSES:

        class Watched(cls):  # type: ignore[misc]
            @classmethod
            def __torch_function__(
                cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
            ) -> Any:
                return _run_watched(func, args, kwargs or {})

        for name in _OFTEN_USED:
            setattr(Watched, name, past_torch_function(name))
        if is_dtensor_class(cls):
            setattr(Watched, LOCAL.__name__, property(_give_local, _put_local))
            Watched.full_tensor = _gather
        Watched.__name__, Watched.__qualname__ = cls.__name__, cls.__qualname__
        _CLASSES[cls], _BASES[Watched] = Watched, cls
        supported: list[Any] = _foreach_utils._foreach_supported_types
        if cls in supported:  # by which clip_grad_norm_ chooses between kernels that round differently
            supported.append(Watched)
    return _CLASSES[cls]


def _run_watched(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    found = list({id(grad): grad for grad in _watched_in((*args, *kwargs.values()))}.values())
    if func in _METADATA:
        return _run_bare(found, func, args, kwargs)
    if _is_scaling(func, args, kwargs):
        return _scale(found, func, args)
    for watcher, grads in _by_watcher(found):
        if getattr(func, "__name__", "") in _READS and "out" not in kwargs:
            watcher.reads(grads)
        elif _is_in_place(func):
            watcher.writes(grads)
        else:
            watcher.shares(grads)
    return _run_bare(found, func, args, kwargs)


def _is_in_place(func: Any) -> bool:
    """Whether there is no result, or what is changed is the result."""
    name = getattr(func, "__name__", "")
    if name.endswith("__"):
        return name.startswith("__i") or name in ("__set__", "__setitem__")
    return name.endswith("_") and name != "set_"


def _share(tensor: Tensor) -> None:
    for watcher, tensors in _by_watcher([tensor]):
        watcher.shares(tensors)


def _give_local(tensor: Tensor) -> Tensor:
    _share(tensor)
    return local_shard(tensor)


def _put_local(tensor: Tensor, local: Tensor) -> None:
    _share(tensor)
    LOCAL.__set__(tensor, local)


def _gather(tensor: Any, **kwargs: Any) -> Tensor:
    """``DTensor.full_tensor``, which only looks, unless this rank has everything."""
    for watcher, tensors in _by_watcher([tensor]):
        watcher.reads(tensors)
    with bare([tensor]):
        full: Tensor = tensor.full_tensor(**kwargs)
    if full.untyped_storage().data_ptr() == local_shard(tensor).untyped_storage().data_ptr():
        _share(tensor)
    return full


def _is_scaling(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Return whether it multiplies gradients, once each, and nothing else that is watched, in place by one number."""
    if func not in _SCALES or len(args) != 2 or kwargs:
        return False
    target, factor = args
    if not isinstance(target, Tensor) and len({id(grad) for grad in target}) != len(target):
        return False
    is_one_number = isinstance(factor, Tensor) and factor.numel() == 1 and factor.dim() == 0
    return (is_one_number and not is_watched(factor)) or type(factor) in (int, float)


def _scale(found: Sequence[Tensor], func: Any, args: Sequence[Any]) -> Any:
    target, factor = args
    is_one = isinstance(target, Tensor)

    def multiply(grads: Sequence[Tensor], by: Tensor | float) -> object:
        return _run_bare(grads, func, (grads[0] if is_one else list(grads), by), {})

    taken = {id(grad) for watcher, grads in _by_watcher(found) for grad in watcher.scales(grads, factor, multiply)}
    if is_one:
        return target if id(target) in taken else _run_bare(found, func, args, {})
    left = [grad for grad in target if id(grad) not in taken]
    if left:
        _run_bare([grad for grad in found if id(grad) not in taken], func, (left, factor), {})
    return list(target)


def _watched_in(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, list | tuple):
            yield from _watched_in(value)
        elif isinstance(value, dict):
            yield from _watched_in(value.values())
        elif is_watched(value):
            yield value


def _by_watcher(grads: Sequence[Tensor]) -> list[tuple[Watcher, list[Tensor]]]:
    found: dict[int, tuple[Watcher, list[Tensor]]] = {}
    for grad in grads:
        reference = grad.__dict__.get(_WATCHER)  # gone where an earlier watcher has let go of it
        watcher = None if reference is None else reference()
        if watcher is not None:
            found.setdefault(id(watcher), (watcher, []))[1].append(grad)
    return list(found.values())


def _run_bare(found: Sequence[Tensor], func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    with bare(found):
        return func(*args, **kwargs)


@contextmanager
def bare(grads: Iterable[Tensor]) -> Iterator[None]:
    """Within it, gradients have the class that they had, and nobody is told."""
    watched = [grad for grad in grads if is_watched(grad)]
    before = [type(grad) for grad in watched]
    for grad, cls in zip(watched, before, strict=True):
        grad.__class__ = _BASES[cls]
    try:
        yield
    finally:
        for grad, cls in zip(watched, before, strict=True):
            if type(grad) is _BASES[cls] and _WATCHER in grad.__dict__:
                grad.__class__ = cls


_METADATA = frozenset(
    getattr(Tensor, name).__get__
    for name in (
        *("_version", "device", "dtype", "grad", "grad_fn", "is_cpu", "is_cuda", "is_leaf", "is_meta", "is_quantized"),
        *("is_sparse", "itemsize", "layout", "nbytes", "ndim", "requires_grad", "shape"),
    )
) | {
    getattr(Tensor, name)
    for name in ("size", "stride", "dim", "numel", "element_size", "is_contiguous", "is_floating_point", "is_complex")
}

_OFTEN_USED = ("grad", "_version", "device", "dtype", "requires_grad", "shape")
"""Of these, none is a value: they are made as fast as of any other tensor."""

_SCALES = frozenset({torch._foreach_mul_, Tensor.mul_, Tensor.__imul__})

_READS = frozenset(
    {
        *("_foreach_norm", "norm", "vector_norm", "linalg_norm", "linalg_vector_norm", "_foreach_abs"),
        *("isnan", "isinf", "isfinite", "abs", "square", "sum", "mean", "std", "var", "max", "min", "amax", "amin"),
        *("any", "all", "count_nonzero", "item", "tolist", "equal", "dot", "clone", "__repr__", "__len__"),
    }
)
"""Names of functions whose results share no memory with what they are given."""
