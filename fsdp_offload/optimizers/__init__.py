"""What is special about an optimizer, one file for each origin. :func:`traits_for` is the only way in."""

from dataclasses import replace

from torch.optim import Optimizer

from ..torch_compat.dtensor import has_inner_tensors
from .base import Habits, LogicalStep, Traits
from .torch_optim import TRAITS as _TORCH_TRAITS
from .transformer_engine import is_fused_adam, keep_unread_masters, traits_of_fused_adam

__all__ = ["Habits", "LogicalStep", "Traits", "keep_unread_masters", "traits_for", "traits_of"]

_UNKNOWN = Traits(known=False)


def traits_for(optimizer: Optimizer) -> Traits:
    """Look up how this optimizer may be run, with the parameters that it has."""
    cls = type(optimizer)
    if is_fused_adam(cls):
        return traits_of_fused_adam(optimizer)
    traits = traits_of(cls)
    if traits.elementwise and any(has_inner_tensors(p) for group in optimizer.param_groups for p in group["params"]):
        # A type of its own may mean anything by a view or a range, and state like it has tensors inside as well: the
        # optimizer sees such parameters whole, as they are.
        return replace(traits, elementwise=False, cuttable=frozenset(), state_like_param=False, takes_masters=False)
    return traits


def traits_of(cls: type[Optimizer]) -> Traits:
    """The traits of exactly this class: a subclass may do anything in its own ``step``, so it inherits none."""
    return _TORCH_TRAITS.get(cls, _UNKNOWN)
