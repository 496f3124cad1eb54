"""Tensors whose memory is away: whoever computes with one, or saves it, is told so.

torch does not notice an empty storage everywhere. Most kernels read address 0, which ends the process on the CPU and
makes a CUDA context unusable, and ``torch.save`` writes a file that lacks the bytes. So while its memory is away, a
tensor has a class of its own, derived from the one it had, whose functions refuse to run. The object stays the same:
``is``, ``isinstance``, hashes, and whoever holds it see no difference.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor, nn

_MESSAGE = (
    "{what}: offload_model() has moved the memory of this model's tensors to the host. Call reload_model(model) first."
)

# What a tensor knows without its memory. Gradients are not among it: to an optimizer, and to clipping, a parameter
# without one is a parameter to be skipped in silence.
_METHODS = {
    *("size", "stride", "dim", "ndimension", "numel", "nelement", "element_size", "storage_offset", "__len__"),
    *("is_contiguous", "is_floating_point", "is_complex", "is_signed", "get_device", "untyped_storage"),
    *("requires_grad_", "register_hook", "register_post_accumulate_grad_hook"),
}
_NOT_GETTERS = {"grad", "_grad", "data", "T", "H", "mT", "mH", "real", "imag"}

_asleep_classes: dict[type[Tensor], type[Tensor]] = {}


def fall_asleep(tensors: Iterable[Tensor], modules: Iterable[nn.Module]) -> Callable[[], None]:
    """Refuse to use ``tensors`` and to call ``modules`` from now on; returns what ends it.

    Views of ``tensors`` that exist already are tensors of their own, which nobody guards.
    """
    classes: list[tuple[Tensor, type[Tensor]]] = []
    for tensor in dict.fromkeys(tensors):
        cls = type(tensor)
        try:
            tensor.__class__ = _asleep_class(cls)
        except TypeError:  # a class with slots, or written in C: used while asleep, it fails as torch lets it fail
            continue
        classes.append((tensor, cls))
    # Before fully_shard's own hook, which would be left half way by an error within it.
    hooks = [module.register_forward_pre_hook(_refuse_call, prepend=True) for module in dict.fromkeys(modules)]

    def wake_up() -> None:
        for tensor, cls in classes:
            tensor.__class__ = cls
        for hook in hooks:
            hook.remove()

    return wake_up


def is_asleep(tensor: Tensor) -> bool:
    """Whether the memory of ``tensor`` is away."""
    return type(tensor) in _asleep_classes.values()


def _refuse_call(module: nn.Module, args: Any) -> None:
    del args
    raise RuntimeError(_MESSAGE.format(what=f"{type(module).__name__}.forward()"))


def _asleep_class(cls: type[Tensor]) -> type[Tensor]:
    """The same class every time: a new one for each sleep would grow torch's tables of subclasses."""
    if cls not in _asleep_classes:
        _asleep_classes[cls] = _derive(cls)
    return _asleep_classes[cls]


def _derive(cls: Any) -> type[Tensor]:
    class Asleep(cls):  # type: ignore[misc]
        @classmethod
        def __torch_function__(
            cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            if not _needs_no_memory(func):
                raise RuntimeError(_MESSAGE.format(what=_name_of(func)))
            return super().__torch_function__(func, types, args, kwargs or {})

        def __repr__(self, **_: Any) -> str:
            return f"{cls.__name__}(asleep, shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"

    Asleep.__name__, Asleep.__qualname__ = f"Asleep{cls.__name__}", f"Asleep{cls.__qualname__}"
    return Asleep


def _needs_no_memory(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    if name == "__get__":
        return getattr(getattr(func, "__self__", None), "__name__", "grad") not in _NOT_GETTERS
    return name in _METHODS


def _name_of(func: Any) -> str:
    name = getattr(func, "__name__", repr(func))
    if name in ("__get__", "__set__", "__delete__"):
        return f"tensor.{getattr(func.__self__, '__name__', '?')}"
    return f"{name}()"
