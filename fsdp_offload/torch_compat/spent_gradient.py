"""The stand-in in ``param.grad`` for a gradient that an update in the backward has used: to do anything with it fails.

Clipping, scaling or logging it would come too late, and some of torch's ways to write a gradient leave no trace
(``torch._foreach_mul_`` on DTensors does not count a version).
"""

from typing import Any

import torch
from torch import Tensor


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
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer what does not need the values, and refuse the rest."""
        if func in _METADATA:
            return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        raise RuntimeError(_MESSAGE)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Refuse."""
        raise RuntimeError(_MESSAGE)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return "SpentGradient()"


_METADATA = frozenset(
    getattr(Tensor, name).__get__ for name in ("_version", "device", "dtype", "is_sparse", "layout", "shape")
)

_MESSAGE = (
    "this gradient was used in the backward already (OffloadPolicy(overlap='iteration')), and whatever is done with it "
    "before step() comes too late. A loop that clips, scales or looks at gradients has to do so from the first step "
    "on, so that updates can be taken back; or use overlap='forward'."
)


def spend(param: Tensor) -> None:
    """Exchange the gradient of ``param``; whoever calls this keeps it."""
    param.grad = SpentGradient(param)


def is_spent(param: Tensor) -> bool:
    """Return whether :func:`spend` has been called, and nobody has exchanged the gradient since."""
    return type(param.grad) is SpentGradient


def restore(param: Tensor, grad: Tensor) -> None:
    """Undo :func:`spend`, if nobody has exchanged the gradient since."""
    if is_spent(param):
        with torch.no_grad():
            param.grad = grad
