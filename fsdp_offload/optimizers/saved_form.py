"""The forms of a parameter's state: as an optimizer keeps it, and as a state dict has it.

They are the same for ``torch.optim``. Others scale what they keep (``FusedAdam`` with fp16 moments).
"""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..state.layout import is_wrapper
from ..state.shard import StateShard
from ..state.store import UserState
from ..torch_compat.dtensor import local_shard, over_local
from . import Conventions
from .masters import MASTER, can_rebuild


def as_saved(
    conventions: Conventions,
    optimizer: Optimizer,
    param: Tensor,
    state: UserState,
    homes: Mapping[str, Tensor],
    *,
    empty: bool,
) -> UserState:
    """The state of one parameter as a state dict has it: homes, or tensors in host memory made from them.

    Args:
        conventions: of the optimizer.
        optimizer: whose.
        param: of which.
        state: as the optimizer keeps it.
        homes: where that lives.
        empty: what it holds means nothing; it is to be loaded into.
    """
    if conventions.keeps_raw_state:
        return state
    found = dict(state)
    for name in homes.keys() & state.keys():
        local = local_shard(state[name])
        dtype = conventions.saved_dtype(name, local.dtype)
        if empty and (dtype != local.dtype or is_wrapper(local)):
            found[name] = over_local(param, torch.empty(local.shape, dtype=dtype, device="cpu"))
        elif not empty:
            saved = conventions.saved(optimizer, param, name, local)
            found[name] = state[name] if saved is local else over_local(param, saved)
    return found


def as_kept(conventions: Conventions, optimizer: Optimizer, shard: StateShard, saved: UserState) -> UserState:
    """The inverse of :func:`as_saved`, on the device where it takes the optimizer's own arithmetic."""
    found = dict(saved)
    for name in shard.homes.keys() & saved.keys():
        local = conventions.kept(optimizer, shard.param, name, local_shard(saved[name]).detach())
        found[name] = over_local(shard.homes[name], local)
    return found


def rebuild_master(conventions: Conventions, optimizer: Optimizer, shard: StateShard, state: UserState) -> bool:
    """Make a master that ``state`` lacks from the parameter; whether there was one to make."""
    home = shard.homes.get(MASTER)
    if home is None or state.get(MASTER) is not None or not can_rebuild(local_shard(home).dtype):
        return False
    weights = local_shard(shard.param).detach().float()
    state[MASTER] = over_local(home, conventions.kept(optimizer, shard.param, MASTER, weights))
    return True
