"""The stand-in in ``param.grad`` for a gradient that an update in the backward has used: to do anything with it fails.

Clipping, scaling or logging it would come too late, and some of torch's ways to write a gradient leave no trace
(``torch._foreach_mul_`` on DTensors does not count a version).

    used ──its step has ended, and nobody has kept it──▶ freed ──zero_()──▶ zeroed: zeros without memory
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from torch import Tensor

from .guard import Guard

USED_UP = (
    "this gradient was used in the backward already (OffloadPolicy(overlap='iteration')), and whatever is done with it "
    "before step() comes too late. A loop that clips has to call fsdp_offload.clip_grad_norm_(optimizer, max_norm) "
    "from the first step on, and needs room for all gradients, so that updates can be taken back. A loop that does "
    "anything else with gradients has to use overlap='forward'."
)

_FREED_UP = (
    "this gradient was used in the backward and freed (OffloadPolicy(parameters=True, overlap='iteration')). Call "
    "zero_grad() after each step(); a loop that looks at gradients, or goes on adding to them, has to use "
    "overlap='forward'."
)


class _Spent(Guard):
    """Refuses all but metadata."""

    methods = Guard.methods - {"untyped_storage"}


class _Freed(_Spent):
    """Lets a gradient be zeroed, too."""

    def on_use(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Zero it, or refuse."""
        if func is not Tensor.zero_:
            self.refuse("")
        _become(_ZEROED, args[0])
        return args[0]


_USED = _Spent("Used", USED_UP, lets_gradients=True)
_FREED = _Freed("Freed", _FREED_UP, lets_gradients=True)
_ZEROED = _Freed("Zeroed", _FREED_UP, lets_gradients=True)


class SpentGradient(Tensor):
    """Has the shape, dtype and device of a gradient, and no memory."""

    @staticmethod
    def __new__(cls, like: Tensor) -> "SpentGradient":
        """Make one like a parameter, whose gradient it may then be."""
        made: SpentGradient = Tensor._make_wrapper_subclass(cls, like.shape, dtype=like.dtype, device=like.device)
        return made

    def __init__(self, like: Tensor) -> None:
        pass

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Refuse."""
        raise RuntimeError(USED_UP)

    def __getattr__(self, name: str) -> NoReturn:
        """Say why there is none: what a DTensor has beside a tensor, ``to_local()`` for one."""
        why = USED_UP if _USED.guards(self) else _FREED_UP
        raise AttributeError(f"SpentGradient has no attribute {name!r}: {why}")


def _become(guard: Guard, grad: Tensor) -> None:
    for other in (_USED, _FREED, _ZEROED):
        other.take_off([grad])
    guard.put_on([grad])


def spend(param: Tensor) -> None:
    """Exchange the gradient of ``param``; whoever calls this keeps it."""
    grad = SpentGradient(param)
    _become(_USED, grad)
    param.grad = grad


def note_freed(param: Tensor) -> None:
    """The step that used the gradient has ended, and nobody has kept it."""
    grad = param.grad
    if grad is not None and _USED.guards(grad):
        _become(_FREED, grad)


def zero_spent(param: Tensor) -> None:
    """Zero a gradient that is gone. Whoever clears or exchanges it then need not tell anybody."""
    grad = param.grad
    if grad is not None:
        _become(_ZEROED, grad)


def is_spent(param: Tensor) -> bool:
    """Return whether the gradient is gone, and nobody has zeroed, cleared or exchanged it."""
    return _USED.guards(param.grad) or _FREED.guards(param.grad)


def is_freed(param: Tensor) -> bool:
    """Return whether :func:`note_freed` has been called, and nobody has zeroed, cleared or exchanged it since."""
    return _FREED.guards(param.grad)


def is_zeroed(param: Tensor) -> bool:
    """Return whether a gradient that was gone has been zeroed, and nobody has cleared or exchanged it since."""
    return _ZEROED.guards(param.grad)


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
