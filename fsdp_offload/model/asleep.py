"""Tensors whose memory is away: whoever computes with one, or saves it, is told so.

torch does not notice an empty storage everywhere. Most kernels read address 0, which ends the process on the CPU and
makes a CUDA context unusable, and ``torch.save`` writes a file that lacks the bytes.
"""

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn

from ..torch_compat.guard import Guard

# Gradients are refused as well: to an optimizer, and to clipping, a parameter without one is to be skipped in silence.
_GUARD = Guard(
    "Asleep",
    "{what}: offload_model() has moved the memory of this model's tensors to the host. Call reload_model(model) first.",
    lets_gradients=False,
)


def fall_asleep(tensors: Iterable[Tensor], modules: Iterable[nn.Module]) -> Callable[[], None]:
    """Refuse to use ``tensors`` and to call ``modules`` from now on; returns what ends it."""
    take_off = _GUARD.put_on(tensors)
    # Before fully_shard's own hook, which would be left half way by an error within it.
    hooks = [module.register_forward_pre_hook(_refuse_call, prepend=True) for module in dict.fromkeys(modules)]

    def wake_up() -> None:
        take_off()
        for hook in hooks:
            hook.remove()

    return wake_up


def is_asleep(tensor: Tensor) -> bool:
    """Return whether the memory of ``tensor`` is away."""
    return _GUARD.guards(tensor)


def _refuse_call(module: nn.Module, args: Any) -> None:
    del args
    _GUARD.refuse(f"{type(module).__name__}.forward()")
