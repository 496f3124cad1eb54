"""What is special about an optimizer, one file for each origin. :func:`traits_of` is the only way in."""

from torch.optim import Optimizer

from .base import Traits
from .torch_optim import TRAITS as _TORCH_TRAITS

__all__ = ["Traits", "traits_of"]

_UNKNOWN = Traits(known=False)


def traits_of(cls: type[Optimizer]) -> Traits:
    """The traits of exactly this class: a subclass may do anything in its own ``step``, so it inherits none."""
    return _TORCH_TRAITS.get(cls, _UNKNOWN)
