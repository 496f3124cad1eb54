"""What is special about an optimizer, one file for each origin. :func:`traits_for` is the only way in."""

from torch.optim import Optimizer

from .base import Habits, LogicalStep, Traits
from .torch_optim import TRAITS as _TORCH_TRAITS
from .transformer_engine import is_fused_adam, traits_of_fused_adam

__all__ = ["Habits", "LogicalStep", "Traits", "traits_for", "traits_of"]

_UNKNOWN = Traits(known=False)


def traits_for(optimizer: Optimizer) -> Traits:
    """How this optimizer may be run."""
    cls = type(optimizer)
    return traits_of_fused_adam(optimizer) if is_fused_adam(cls) else traits_of(cls)


def traits_of(cls: type[Optimizer]) -> Traits:
    """The traits of exactly this class: a subclass may do anything in its own ``step``, so it inherits none."""
    return _TORCH_TRAITS.get(cls, _UNKNOWN)
