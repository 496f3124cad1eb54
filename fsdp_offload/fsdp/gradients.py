"""Gradients between the backward and ``step()``: watched ones, and those that an update has used and let go of.

**Watched** tensors (parameters, too) tell what is done with them. What only looks at one runs as ever. What may write
it is announced first, and so is whatever hands out its memory (views, ``.data``, ``DTensor.to_local()``): what becomes
of that is not seen, and not all of it counts a version (no collective does, nor NumPy, nor ``torch._foreach_mul_`` on
DTensors).

**Spent** ones have a stand-in in ``param.grad``, as clipping, scaling or logging them would come too late::

    used ──its step has ended, and nobody has kept it──▶ freed ──zero_()──▶ zeroed: zeros without memory
"""

import enum
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, Protocol, cast

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils import _foreach_utils
from torch.utils._pytree import tree_leaves

from .dtensor import LOCAL, call_counted, local_shard
from .guard import Guard


class Watcher(Protocol):
    """Whoever wants to know what is done with tensors."""

    def reads(self, tensors: Sequence[Tensor]) -> None:
        """These are about to be looked at."""

    def writes(self, tensors: Sequence[Tensor]) -> None:
        """These are about to be written."""

    def shares(self, tensors: Sequence[Tensor]) -> None:
        """Their memory is given to somebody who may write it at any time, and nobody is told."""


# Names of functions whose results share no memory with what they are given.
_READS = frozenset(
    {
        *("_foreach_norm", "norm", "vector_norm", "linalg_norm", "linalg_vector_norm", "_foreach_abs"),
        *("isnan", "isinf", "isfinite", "abs", "square", "sum", "mean", "std", "var", "max", "min", "amax", "amin"),
        *("any", "all", "count_nonzero", "item", "tolist", "equal", "dot", "clone", "__repr__"),
    }
)
_WATCHER = "_fsdp_offload_watcher"


class _Watch(Guard):
    """Lets tensors be used, and tells their watchers first."""

    methods = Guard.methods - {"untyped_storage"}  # whoever has it has the values

    def on_use(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Tell the watchers of all tensors that ``func`` is given, then run it."""
        found = list(dict.fromkeys(filter(_WATCH.guards, tree_leaves((args, kwargs)))))
        name = getattr(func, "__name__", "")
        if name in _READS and "out" not in kwargs:
            _tell("reads", found)
        else:
            _tell("writes" if _is_in_place(name) else "shares", found)
        with bare(found):
            return call_counted(func, args, kwargs)

    def on_method(self, tensor: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """As :meth:`on_use`. ``full_tensor`` only looks, unless this rank has everything."""
        _tell("reads" if name == "full_tensor" else "shares", [tensor])
        with bare([tensor]):
            result: Tensor = getattr(tensor, name)(*args, **kwargs)
        own = local_shard(tensor).untyped_storage()
        if name == "full_tensor" and result.untyped_storage().data_ptr() == own.data_ptr():
            _tell("shares", [tensor])
        return result

    def derive(self, cls: Any) -> type[Tensor]:
        """As for other guards; torch's choice between implementations does not see the class."""
        made = super().derive(cls)
        if issubclass(cls, DTensor):
            setattr(made, LOCAL.__name__, property(_give_local, _put_local))
        if cls in _foreach_utils._foreach_supported_types:
            _FOREACH.append(made)
            let_foreach(True)
        return made


_FOREACH: list[Any] = []


def let_foreach(is_let: bool) -> None:
    """Let torch use foreach kernels for watched gradients, or no longer; the list is the whole process's.

    By it clip_grad_norm_ chooses between kernels that round differently.
    """
    supported: list[Any] = _foreach_utils._foreach_supported_types
    supported[:] = [cls for cls in supported if cls not in _FOREACH] + (_FOREACH if is_let else [])


_OFTEN = ("grad", "_version", "device", "dtype", "requires_grad", "shape")
_WATCH = _Watch("", "", lets_gradients=True, attributes=_OFTEN)  # the class keeps its name


def watch(tensors: Iterable[Tensor], watcher: Watcher) -> list[Tensor]:
    """Tell ``watcher``, which is not kept alive, what is done with ``tensors``; returns those that it did not watch."""
    if _FOREACH and _FOREACH[0] not in _foreach_utils._foreach_supported_types:  # since the last optimizer was removed
        let_foreach(True)
    reference = weakref.ref(watcher)  # the same object each time, while there is only one
    new = [one for one in tensors if vars(one).get(_WATCHER) is not reference]
    _WATCH.put_on(new)
    for tensor in filter(_WATCH.guards, new):  # of others the class has slots, or is written in C: they have versions
        vars(tensor)[_WATCHER] = reference
    return new


def unwatch(tensors: Sequence[Tensor]) -> None:
    for tensor in tensors:
        vars(tensor).pop(_WATCHER, None)
    _WATCH.take_off(tensors)


def is_watched(tensor: Tensor, watcher: Watcher) -> bool:
    """Return whether ``watcher`` is told, and not one that is gone."""
    return _WATCHER in vars(tensor) and vars(tensor)[_WATCHER]() is watcher


@contextmanager
def bare(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Within it, tensors have the class that they had, and nobody is told."""
    watched = list(filter(_WATCH.guards, tensors))
    _WATCH.take_off(watched)
    try:
        yield
    finally:
        _WATCH.put_on([tensor for tensor in watched if _WATCHER in vars(tensor)])


def _is_in_place(name: str) -> bool:
    """Return whether there is no result, or the result is the argument that is changed."""
    if name.endswith("__"):
        return name.startswith("__i") or name in ("__set__", "__setitem__")
    return name.endswith("_") and name != "set_"


def _tell(what: str, tensors: Iterable[Tensor]) -> None:
    """Call that method of each watcher, once, with the tensors that it watches."""
    watched: dict[Watcher, list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        reference = vars(tensor).get(_WATCHER)  # gone where an earlier watcher has let go of it
        if reference is not None and (watcher := reference()) is not None:
            watched[watcher].append(tensor)
    for watcher, its_own in watched.items():
        getattr(watcher, what)(its_own)


def let_read(read: Callable[[], Any]) -> Any:
    """Let ``fully_shard`` read parameters in this thread; no watcher is told: a gather has been announced already."""
    before, _HERE.reads = getattr(_HERE, "reads", False), True
    try:
        return read()
    finally:
        _HERE.reads = before


_HERE = threading.local()  # threads may read at once, and end in any order


def _give_local(tensor: Tensor) -> Tensor:
    if not getattr(_HERE, "reads", False):
        _tell("shares", [tensor])
    return cast(Tensor, LOCAL.__get__(tensor))


def _put_local(tensor: Tensor, local: Tensor) -> None:
    _tell("shares", [tensor])
    LOCAL.__set__(tensor, local)


# Spent gradients ------------------------------------------------------------------------------------------------------

USED_UP = (
    "this gradient was used in the backward already (OffloadPolicy(overlap='iteration')). A loop that clips has to "
    "call fsdp_offload.clip_grad_norm_(optimizer, max_norm) from the first step on, and needs room for all gradients. "
    "A loop that does anything else with gradients has to use overlap='forward'."
)
_FREED_UP = (
    "this gradient was used in the backward and freed (OffloadPolicy(parameters=True, overlap='iteration')). Call "
    "zero_grad() after each step(), or use overlap='forward' to look at gradients or go on adding to them."
)


class _Stage(enum.Enum):
    """The life of a spent gradient, each with the error of whoever uses it."""

    USED = USED_UP
    FREED = _FREED_UP
    ZEROED = f"{_FREED_UP} It was zeroed since."


class SpentGradient(Tensor):
    """Has the shape, dtype and device of a gradient, and no memory: refuses all but metadata, and zeroes once freed."""

    stage = _Stage.USED

    @staticmethod
    def __new__(cls, like: Tensor) -> "SpentGradient":
        made: SpentGradient = Tensor._make_wrapper_subclass(cls, like.shape, dtype=like.dtype, device=like.device)
        return made

    def __init__(self, like: Tensor) -> None:
        pass

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Let ``func`` have metadata, or refuse."""
        if _WATCH.lets(func):
            return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        grad = next(one for one in tree_leaves((args, kwargs)) if isinstance(one, SpentGradient))
        if func is not Tensor.zero_ or grad.stage is _Stage.USED:
            raise RuntimeError(grad.stage.value)
        grad.stage = _Stage.ZEROED
        return grad

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise RuntimeError(USED_UP)

    def __getattr__(self, name: str) -> NoReturn:
        """Say why there is none: what a DTensor has beside a tensor, ``to_local()`` for one."""
        raise AttributeError(f"SpentGradient has no attribute {name!r}: {self.stage.value}")


def _in_stages(*stages: _Stage) -> Callable[[Tensor], bool]:
    """Return a test of parameters: whether the gradient is in one of ``stages``, not cleared nor exchanged since."""
    return lambda param: isinstance(param.grad, SpentGradient) and param.grad.stage in stages


has_no_memory = _in_stages(*_Stage)
is_spent = _in_stages(_Stage.USED, _Stage.FREED)
is_freed = _in_stages(_Stage.FREED)
is_zeroed = _in_stages(_Stage.ZEROED)


def spend(param: Tensor) -> None:
    """Exchange the gradient of ``param``; whoever calls this keeps it."""
    param.grad = SpentGradient(param)


def note_freed(param: Tensor) -> None:
    """The step that used the gradient has ended, and nobody has kept it."""
    grad = param.grad
    if isinstance(grad, SpentGradient) and grad.stage is _Stage.USED:
        grad.stage = _Stage.FREED


def zero_spent(param: Tensor) -> None:
    """Zero a gradient that is gone. Whoever clears or exchanges it then need not tell anybody."""
    if isinstance(param.grad, SpentGradient):
        param.grad.stage = _Stage.ZEROED


def refuse_freed(params: Iterable[Tensor]) -> None:
    """Raise an error if a backward is about to add to gradients that are gone."""
    if any(map(is_freed, params)):
        raise RuntimeError(_FREED_UP)


@contextmanager
def zeroed_lifted(params: Iterable[Tensor]) -> Iterator[None]:
    """Within it, zeroed gradients are none: a reduction would add to them. They are back where no others have come."""
    zeroed = [(param, param.grad) for param in params if is_zeroed(param)]
    for param, _ in zeroed:
        param.grad = None
    try:
        yield
    finally:
        for param, grad in zeroed:
            if param.grad is None:
                param.grad = grad
