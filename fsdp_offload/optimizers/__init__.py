"""Facts about optimizer classes, one file for each origin. :func:`capabilities_for` is the only entry."""

from dataclasses import replace

from torch.optim import Optimizer

from ..fsdp.dtensor import has_inner_tensors
from ..state.layout import params_of
from .capabilities import Capabilities, Conventions, capabilities_of
from .masters import capabilities_with_masters
from .transformer_engine import capabilities_of_fused_adam, is_fused_adam, keep_unread_masters

__all__ = ["Capabilities", "Conventions", "capabilities_for", "capabilities_of", "keep_unread_masters"]


def capabilities_for(optimizer: Optimizer, *, trust: bool = False) -> Capabilities:
    """Look up how this optimizer may be run, with the parameters that it has; ``trust`` as :func:`capabilities_of`."""
    cls = type(optimizer)
    if is_fused_adam(cls):
        return capabilities_of_fused_adam(optimizer)
    plain = vars(cls).get("plain_class", cls)  # not inherited: a subclass may do anything
    capabilities = capabilities_of(plain, trust=trust)
    if plain is not cls:
        capabilities = capabilities_with_masters(capabilities)
    if capabilities.elementwise and any(map(has_inner_tensors, params_of(optimizer))):
        # A tensor subclass may give views and ranges any meaning, and its state has inner tensors as well: the
        # optimizer sees such parameters whole.
        return replace(
            capabilities, elementwise=False, cuttable=frozenset(), state_like_param=False, takes_masters=False
        )
    return capabilities
