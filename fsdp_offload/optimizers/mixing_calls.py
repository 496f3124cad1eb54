"""Notes the calls of operators that mix elements: with which shapes, and at which line."""

import linecache
import os
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..state.layout import tensors_in

_MOVING = frozenset({"clone", "_to_copy", "copy_", "stack", "cat", "_unsafe_view", "_reshape_alias"})
"""Operators that write elements elsewhere, each as it is."""

FOR_EACH = ("_foreach_", "_fused_", "_amp_foreach_")
"""Beginnings of the names of operators that take a list of tensors, each of which for itself."""

FILLING = ("zero", "ones", "empty", "full", "fill", "rand", "normal_", "uniform_", "bernoulli_", "new_")
"""Beginnings of the names of operators that write what no element has been read for."""

_TORCH = os.path.dirname(torch.__file__) + os.sep
_TORCH_OPTIM = os.path.join(_TORCH, "optim") + os.sep
_HERE = os.path.dirname(__file__) + os.sep


Call = tuple[str, tuple[tuple[int, ...], ...]]
"""Of an operator, with the shapes of its tensors."""


class MixingCalls(TorchDispatchMode):
    """Notes all calls that are made within it.

    Attributes:
        seen: the calls, each once, with the line that made it first.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: dict[Call, str] = {}

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run ``func``; a wrapper type is left to take itself apart, under this mode again."""
        if any(issubclass(kind, Tensor) and hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented
        name = func.overloadpacket.__name__
        harmless = name in _MOVING or name.startswith((*FOR_EACH, *FILLING))
        if not (harmless or func.is_view or torch.Tag.pointwise in func.tags):
            call = name, tuple(tuple(one.shape) for one in tensors_in((args, kwargs or {})))
            if call not in self.seen:
                self.seen[call] = f"{name} in {line_of_step()}"
        return func(*args, **(kwargs or {}))


def line_of_step(*without: str) -> str:
    """The innermost line that runs now outside of torch, of this folder and of files ``without``."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        foreign = not name.startswith((_TORCH, _HERE, *without)) or name.startswith(_TORCH_OPTIM)
        if foreign and not name.startswith("<"):
            source = linecache.getline(name, frame.f_lineno).strip()
            return f"{os.path.basename(name)}:{frame.f_lineno}" + (f" (`{source}`)" if source else "")
        frame = frame.f_back  # type: ignore[assignment]
    return ""
