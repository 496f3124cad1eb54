"""Gradients between the backward and ``step()``: watched gradients, and gradients that an update has used and freed.

**Watched** tensors (also parameters) notify a watcher before each use: a read, a possible write, or a call that hands
out their memory (views, ``.data``, ``DTensor.to_local()``). Later uses of that memory are not seen, and not all of them
count a version (collectives, NumPy and ``torch._foreach_mul_`` on DTensors do not).

**Spent** gradients are replaced by a stand-in in ``param.grad``: it is too late to clip, scale or log them::

    used ──the step ends, and no other reference is left──▶ freed ──zero_()──▶ zeroed: zeros without memory
"""

import enum
import functools
import inspect
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, Protocol, cast

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils import _foreach_utils
from torch.utils._pytree import tree_leaves

from .dtensor import LOCAL, call_counted, local_shard
from .guard import Guard


class Watcher(Protocol):
    """Callbacks for uses of watched tensors."""

    def reads(self, tensors: Sequence[Tensor]) -> None:
        """Handle that ``tensors`` are about to be read."""

    def writes(self, tensors: Sequence[Tensor]) -> None:
        """Handle that ``tensors`` are about to be written."""

    def shares(self, tensors: Sequence[Tensor]) -> None:
        """Handle that memory of ``tensors`` is handed out, and may be written unseen at any time."""


# Names of functions whose results share no memory with their arguments.
_READS = frozenset(
    {
        *("_foreach_norm", "norm", "vector_norm", "linalg_norm", "linalg_vector_norm", "_foreach_abs"),
        *("isnan", "isinf", "isfinite", "abs", "square", "sum", "mean", "std", "var", "max", "min", "amax", "amin"),
        *("any", "all", "count_nonzero", "item", "tolist", "equal", "dot", "clone", "__repr__"),
    }
)
_WATCHER = "_fsdp_offload_watcher"


class _Watch(Guard):
    """Notifies the watchers of a tensor, then lets it be used."""

    methods = Guard.methods - {"untyped_storage"}  # it gives access to the values

    def on_use(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Notify the watchers of all watched arguments of ``func``, then run it."""
        found = list(dict.fromkeys(filter(_WATCH.guards, tree_leaves((args, kwargs)))))
        name = getattr(func, "__name__", "")
        if name in _READS and "out" not in kwargs:
            _tell("reads", found)
        else:  # a function in place has no result, or returns the argument that it writes
            of_operator = name.startswith("__i") or name in ("__set__", "__setitem__")
            is_in_place = of_operator if name.endswith("__") else name.endswith("_") and name != "set_"
            _tell("writes" if is_in_place else "shares", found)
        with bare(found):
            return call_counted(func, args, kwargs)

    def on_method(self, tensor: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Notify and run as :meth:`on_use`. ``full_tensor`` only reads, unless this rank has the whole tensor."""
        _tell("reads" if name == "full_tensor" else "shares", [tensor])
        with bare([tensor]):
            result: Tensor = getattr(tensor, name)(*args, **kwargs)
        own = local_shard(tensor).untyped_storage()
        if name == "full_tensor" and result.untyped_storage().data_ptr() == own.data_ptr():
            _tell("shares", [tensor])
        return result

    def derive(self, cls: Any) -> type[Tensor]:
        """Return a class as other guards do, which torch treats as ``cls`` when it chooses an implementation."""
        made = super().derive(cls)
        if issubclass(cls, DTensor):
            setattr(made, LOCAL.__name__, property(_give_local, _put_local))
        if cls in _foreach_utils._foreach_supported_types:
            _FOREACH.append(made)
            let_foreach(True)
        return made


_FOREACH: list[Any] = []


def let_foreach(is_let: bool) -> None:
    """Add the classes of watched gradients to torch's list for foreach kernels, or remove them, process-wide.

    clip_grad_norm_ chooses by this list between kernels that round differently.
    """
    supported: list[Any] = _foreach_utils._foreach_supported_types
    supported[:] = [cls for cls in supported if cls not in _FOREACH] + (_FOREACH if is_let else [])


_OFTEN = ("grad", "_version", "device", "dtype", "requires_grad", "shape")
_WATCH = _Watch("", "", lets_gradients=True, attributes=_OFTEN)  # the class keeps its name


def watch(tensors: Iterable[Tensor], watcher: Watcher) -> list[Tensor]:
    """Notify ``watcher`` (held weakly) of uses of ``tensors``; return those that it did not watch before."""
    if _FOREACH and _FOREACH[0] not in _foreach_utils._foreach_supported_types:  # gone with the last optimizer
        let_foreach(True)
    reference = weakref.ref(watcher)  # the same object each time, while there is only one
    new = [one for one in tensors if vars(one).get(_WATCHER) is not reference]
    _WATCH.put_on(new)
    for tensor in filter(_WATCH.guards, new):  # others, of classes with slots or in C, count versions of writes
        vars(tensor)[_WATCHER] = reference
    return new


def unwatch(tensors: Sequence[Tensor]) -> None:
    for tensor in tensors:
        vars(tensor).pop(_WATCHER, None)
    _WATCH.take_off(tensors)


def is_watched(tensor: Tensor, watcher: Watcher) -> bool:
    """Return whether ``watcher`` watches ``tensor``."""
    return _WATCHER in vars(tensor) and vars(tensor)[_WATCHER]() is watcher


@contextmanager
def bare(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Give watched tensors their original class inside the block, without notifications."""
    watched = list(filter(_WATCH.guards, tensors))
    _WATCH.take_off(watched)
    try:
        yield
    finally:
        _WATCH.put_on([tensor for tensor in watched if _WATCHER in vars(tensor)])


def _tell(what: str, tensors: Iterable[Tensor]) -> None:
    """Call method ``what`` of each watcher once, with the tensors that it watches."""
    watched: dict[Watcher, list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        reference = vars(tensor).get(_WATCHER)  # missing if an earlier watcher has unwatched it
        if reference is not None and (watcher := reference()) is not None:
            watched[watcher].append(tensor)
    for watcher, its_own in watched.items():
        getattr(watcher, what)(its_own)


def let_read(read: Callable[[], Any]) -> Any:
    """Run ``read``, in which ``fully_shard`` reads parameters, without notifications: before_gather has been called."""
    before = getattr(_HERE, "reads", None)
    try:
        _HERE.reads = inspect.currentframe()
        return read()
    finally:
        _HERE.reads = before


_HERE = threading.local()  # threads may read at once, and end in any order


def _give_local(tensor: Tensor) -> Tensor:
    reads = getattr(_HERE, "reads", None)
    frame = None if reads is None else inspect.currentframe()
    while frame is not None and frame is not reads:  # an interrupt may have left the frame of a call that has ended
        frame = frame.f_back
    if frame is None:
        _HERE.reads = None
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
    """Stages of a spent gradient, each with the error that a use of it raises."""

    USED = USED_UP
    FREED = _FREED_UP
    ZEROED = f"{_FREED_UP} It was zeroed since."


class SpentGradient(Tensor):
    """A tensor with a gradient's shape, dtype and device, without memory. Allows metadata and, once freed, zero_()."""

    stage = _Stage.USED

    @staticmethod
    def __new__(cls, like: Tensor) -> "SpentGradient":
        made: SpentGradient = Tensor._make_wrapper_subclass(cls, like.shape, dtype=like.dtype, device=like.device)
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run ``func`` if it needs only metadata; otherwise raise."""
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
        """Explain why attributes of a DTensor, such as ``to_local``, are missing."""
        raise AttributeError(f"SpentGradient has no attribute {name!r}: {self.stage.value}")


def _is_in(stages: Collection[_Stage], param: Tensor) -> bool:
    """Return whether a parameter's gradient is still the spent one, in one of ``stages``."""
    return isinstance(param.grad, SpentGradient) and param.grad.stage in stages


has_no_memory = functools.partial(_is_in, (*_Stage,))
is_spent = functools.partial(_is_in, (_Stage.USED, _Stage.FREED))
is_freed = functools.partial(_is_in, (_Stage.FREED,))
is_zeroed = functools.partial(_is_in, (_Stage.ZEROED,))


def note_freed(param: Tensor) -> None:
    """Mark the gradient as freed: the step that used it has ended, and no other reference is left."""
    grad = param.grad
    if isinstance(grad, SpentGradient) and grad.stage is _Stage.USED:
        grad.stage = _Stage.FREED


def zero_spent(param: Tensor) -> None:
    """Mark a spent gradient as zeroed. The user may then clear or replace it."""
    if isinstance(param.grad, SpentGradient):
        param.grad.stage = _Stage.ZEROED


def refuse_freed(params: Iterable[Tensor]) -> None:
    """Raise if a backward is about to add to freed gradients."""
    if any(map(is_freed, params)):
        raise RuntimeError(_FREED_UP)


@contextmanager
def zeroed_lifted(params: Iterable[Tensor]) -> Iterator[None]:
    """Set zeroed gradients to ``None`` inside the block, so that reductions do not add to them; then restore them."""
    zeroed = [(param, param.grad) for param in params if is_zeroed(param)]
    for param, _ in zeroed:
        param.grad = None
    try:
        yield
    finally:
        for param, grad in zeroed:
            if param.grad is None:
                param.grad = grad
