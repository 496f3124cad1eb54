"""The stand-in in ``param.grad`` for a gradient that an update in the backward has used: to do anything with it fails.

Clipping, scaling or logging it would come too late, and some of torch's ways to write a gradient leave no trace
(``torch._foreach_mul_`` on DTensors does not count a version).
"""

import weakref
from collections.abc import Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any, NoReturn

from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakTensorKeyDictionary

_lifted: MutableMapping[Tensor, "ZeroedGradient"] = WeakTensorKeyDictionary()
"""Gradients that :func:`lift_zeroed` has taken away, by parameter."""


class SpentGradient(Tensor):
    """Has the shape, dtype and device of a gradient, and no memory.

    Attributes:
        freed_of: the parameter, once its step has ended and the gradient is gone for good: zeroing it is fine then.
    """

    freed_of: "weakref.ref[Tensor] | None"

    @staticmethod
    def __new__(cls, like: Tensor) -> "SpentGradient":
        """Make one like a parameter, whose gradient it may then be."""
        made: SpentGradient = Tensor._make_wrapper_subclass(cls, like.shape, dtype=like.dtype, device=like.device)
        return made

    def __init__(self, like: Tensor) -> None:
        self.freed_of = None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer what does not need the values, and refuse the rest."""
        if func in _METADATA:
            return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        spent = [arg for arg in pytree.tree_leaves((args, kwargs or {})) if isinstance(arg, SpentGradient)]
        freed = any(one.freed_of is not None for one in spent)
        if freed and func in _ZEROING:
            (self,) = spent
            param = self.freed_of() if func is Tensor.zero_ and self.freed_of is not None else None
            if param is not None and param.grad is self:
                zero_spent(param)
            return None if func is _GRAD_FN else self
        raise RuntimeError(_FREED if freed else _MESSAGE)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Refuse."""
        raise RuntimeError(_MESSAGE)

    def __getattr__(self, name: str) -> NoReturn:
        """Say why there is none: what a DTensor has beside a tensor, ``to_local()`` for one."""
        freed = self.__dict__.get("freed_of") is not None
        raise AttributeError(f"SpentGradient has no attribute {name!r}: {_FREED if freed else _MESSAGE}")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return "SpentGradient()"


class ZeroedGradient(SpentGradient):
    """A gradient that was gone when it was zeroed: it has no memory until a step finds that no other has come."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """As :class:`SpentGradient`; it may be zeroed again."""
        if func in _ZEROING:
            return None if func is _GRAD_FN else args[0]
        return super().__torch_function__(func, types, args, kwargs)


_METADATA = frozenset(
    getattr(Tensor, name).__get__ for name in ("_version", "device", "dtype", "is_sparse", "layout", "shape")
)

USED_UP = _MESSAGE = (
    "this gradient was used in the backward already (OffloadPolicy(overlap='iteration')), and whatever is done with it "
    "before step() comes too late. A loop that clips has to call fsdp_offload.clip_grad_norm_(optimizer, max_norm) "
    "from the first step on, and needs room for all gradients, so that updates can be taken back. A loop that does "
    "anything else with gradients has to use overlap='forward'."
)


_GRAD_FN: Any = getattr(Tensor, "grad_fn").__get__  # noqa: B009
_ZEROING = frozenset({_GRAD_FN, Tensor.requires_grad_, Tensor.detach_, Tensor.zero_})
"""What ``zero_grad(set_to_none=False)`` of a module does with a gradient."""

_FREED = (
    "this gradient was used in the backward and freed (OffloadPolicy(parameters=True, overlap='iteration')). Call "
    "zero_grad() after each step(); a loop that looks at gradients, or goes on adding to them, has to use "
    "overlap='forward'."
)


def zero_spent(param: Tensor) -> None:
    """Zero a gradient that is gone. Whoever clears or exchanges it then need not tell anybody."""
    param.grad = ZeroedGradient(param)


def is_zeroed(param: Tensor) -> bool:
    """Return whether :func:`zero_spent` has been called, and nobody has cleared or exchanged the gradient since."""
    return type(param.grad) is ZeroedGradient


def lift_zeroed(params: Iterable[Tensor]) -> None:
    """Let a reduction make gradients of these: it would add them to what is there."""
    for param in params:
        _lifted.pop(param, None)  # of a backward that has failed
        if is_zeroed(param):
            _lifted[param], param.grad = param.grad, None  # type: ignore[assignment]


def put_zeroed_back(params: Iterable[Tensor]) -> None:
    """The reduction has ended. Undo :func:`lift_zeroed` where it has made none."""
    for param in params:
        zeroed = _lifted.pop(param, None)
        if zeroed is not None and param.grad is None:
            param.grad = zeroed


def note_freed(param: Tensor) -> None:
    """The step that used the gradient has ended, and nobody has kept it."""
    if isinstance(param.grad, SpentGradient):
        param.grad.freed_of = weakref.ref(param)


def is_freed(param: Tensor) -> bool:
    """Return whether :func:`note_freed` has been called, and nobody has cleared the gradient since."""
    grad = param.grad
    return type(grad) is SpentGradient and grad.freed_of is not None


def refuse_freed(params: Iterable[Tensor]) -> None:
    """Raise an error if a backward is about to add to gradients that are gone."""
    if any(map(is_freed, params)):
        raise RuntimeError(_FREED)


def spend(param: Tensor) -> None:
    """Exchange the gradient of ``param``; whoever calls this keeps it."""
    param.grad = SpentGradient(param)


def is_spent(param: Tensor) -> bool:
    """Return whether :func:`spend` has been called, and nobody has exchanged the gradient since."""
    return type(param.grad) is SpentGradient


@contextmanager
def without_gradients(params: Iterable[Tensor]) -> Iterator[None]:
    """Within it, these have no gradients: neither those of theirs nor stand-ins."""
    kept = [(param, param.grad) for param in params]
    for param, _ in kept:
        param.grad = None
    try:
        yield
    finally:
        for param, grad in kept:
            param.grad = grad
