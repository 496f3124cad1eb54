"""Gradients, and parameters, that tell what is done with them between the backward and ``step()``.

What only looks at a watched tensor runs as ever. What may write it is announced first, and so is whatever hands out its
memory (views, ``.data``, ``DTensor.to_local()``): what becomes of that is not seen, and not all of it counts a version
(no collective does, nor NumPy, nor some of torch's functions on DTensors).
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils import _foreach_utils

from .dtensor import LOCAL, local_shard
from .guard import Guard


class Watcher(Protocol):
    """Whoever wants to know what is done with tensors."""

    def reads(self, tensors: Sequence[Tensor]) -> None:
        """These are about to be looked at."""

    def writes(self, tensors: Sequence[Tensor]) -> None:
        """These are about to be written."""

    def shares(self, tensors: Sequence[Tensor]) -> None:
        """Their memory is given to somebody who may write it at any time, and nobody is told."""


_READS = frozenset(
    {
        *("_foreach_norm", "norm", "vector_norm", "linalg_norm", "linalg_vector_norm", "_foreach_abs"),
        *("isnan", "isinf", "isfinite", "abs", "square", "sum", "mean", "std", "var", "max", "min", "amax", "amin"),
        *("any", "all", "count_nonzero", "item", "tolist", "equal", "dot", "clone", "__repr__"),
    }
)
"""Names of functions whose results share no memory with what they are given."""

_WATCHER = "_fsdp_offload_watcher"


class _Watch(Guard):
    """Lets tensors be used, and tells their watchers first."""

    methods = Guard.methods - {"untyped_storage"}  # whoever has it has the values

    def on_use(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Tell the watchers of all tensors that ``func`` is given, then run it."""
        found = list({id(tensor): tensor for tensor in _watched_in((*args, *kwargs.values()))}.values())
        name = getattr(func, "__name__", "")
        if name in _READS and "out" not in kwargs:
            _tell("reads", found)
        else:
            _tell("writes" if _is_in_place(name) else "shares", found)
        with bare(found):
            return func(*args, **kwargs)

    def on_method(self, tensor: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """As :meth:`on_use`. ``full_tensor`` only looks, unless this rank has everything."""
        _tell("reads" if name == "full_tensor" else "shares", [tensor])
        with bare([tensor]):
            result: Tensor = getattr(tensor, name)(*args, **kwargs)
        if name == "full_tensor" and _address(result) == _address(local_shard(tensor)):
            _tell("shares", [tensor])
        return result

    def derive(self, cls: Any) -> type[Tensor]:
        """As for other guards; torch's choice between implementations does not see the class."""
        made = super().derive(cls)
        if issubclass(cls, DTensor):
            setattr(made, LOCAL.__name__, property(_give_local, _put_local))
        supported: list[Any] = _foreach_utils._foreach_supported_types
        if cls in supported:  # by which clip_grad_norm_ chooses between kernels that round differently
            supported.append(made)
        return made


# Without a name, the derived classes have that of the class they are derived from.
_WATCH = _Watch(
    "", "", lets_gradients=True, attributes=("grad", "_version", "device", "dtype", "requires_grad", "shape")
)


def watch(tensor: Tensor, watcher: Watcher) -> None:
    """Tell ``watcher``, which is not kept alive, what is done with ``tensor`` from now on."""
    _WATCH.put_on([tensor])
    if is_watched(tensor):  # else its class has slots, or is written in C; its versions are all that there is
        vars(tensor)[_WATCHER] = weakref.ref(watcher)


def unwatch(tensor: Tensor) -> None:
    """Undo :func:`watch`; nothing where it is not watched."""
    vars(tensor).pop(_WATCHER, None)
    _WATCH.take_off([tensor])


is_watched: Callable[[object], bool] = _WATCH.guards


@contextmanager
def bare(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Within it, tensors have the class that they had, and nobody is told."""
    watched = [tensor for tensor in tensors if is_watched(tensor)]
    _WATCH.take_off(watched)
    try:
        yield
    finally:
        _WATCH.put_on(tensor for tensor in watched if _WATCHER in vars(tensor))


def _is_in_place(name: str) -> bool:
    """Whether there is no result, or what is changed is the result."""
    if name.endswith("__"):
        return name.startswith("__i") or name in ("__set__", "__setitem__")
    return name.endswith("_") and name != "set_"


def _watched_in(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, list | tuple):
            yield from _watched_in(value)
        elif isinstance(value, dict):
            yield from _watched_in(value.values())
        elif is_watched(value):
            yield value


def _tell(what: str, tensors: Sequence[Tensor]) -> None:
    """Call that method of each watcher, once, with the tensors that it watches."""
    by_watcher: dict[int, tuple[Watcher, list[Tensor]]] = {}
    for tensor in tensors:
        reference = vars(tensor).get(_WATCHER)  # gone where an earlier watcher has let go of it
        watcher = None if reference is None else reference()
        if watcher is not None:
            by_watcher.setdefault(id(watcher), (watcher, []))[1].append(tensor)
    for watcher, its_own in by_watcher.values():
        getattr(watcher, what)(its_own)


def _give_local(tensor: Tensor) -> Tensor:
    _tell("shares", [tensor])
    return local_shard(tensor)


def _put_local(tensor: Tensor, local: Tensor) -> None:
    _tell("shares", [tensor])
    LOCAL.__set__(tensor, local)


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
