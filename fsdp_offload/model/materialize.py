"""Builds a model on the host from the meta device, one module at a time, each initialized on the accelerator.

    module on meta ──▶ memory of its shards on the device ──▶ initialized there ──▶ host ──▶ the next module

A model may be larger than the device. It gets the bits that ``to_empty()`` and ``reset_parameters()`` would give it.
"""

from collections.abc import Callable
from operator import methodcaller
from typing import Any

import torch
from torch import nn

from ..fsdp.dtensor import local_shard
from ..fsdp.fully_shard import give_memory, sharding_groups
from ..policy import listed, tells
from .sleep import check_is_module


@tells("materialize_on_host(model)")
def materialize_on_host(model: nn.Module, *, initialize: Callable[[nn.Module], object] | None = None) -> None:
    """Give a ``fully_shard`` model on the meta device memory on the host, for ``OffloadPolicy(parameters=True)``.

    Call it after ``fully_shard`` and before building the optimizer, which keeps the parameters that it is given; then
    call ``offload_optimizer(..., policy=OffloadPolicy(parameters=True))`` before the first forward. Modules are
    initialized in the order of ``model.modules()``, each on the device of its mesh, which holds the shards of one
    module at a time. Buffers stay on the device.

    Args:
        model: the whole model. Tensors that are not on the meta device stay as they are.
        initialize: function that fills the own parameters and buffers of a module, called with each module that has
            got memory. ``None``: the module's ``reset_parameters()``. ``lambda module: None`` leaves the memory
            uninitialized, for a checkpoint that is loaded next.

    Raises:
        TypeError: ``model`` is no module, or ``initialize`` cannot be called. Nothing has been changed.
        ValueError: a module on the meta device is in no group of ``fully_shard``, or has no ``reset_parameters()``.
            Nothing has been changed.
        NotImplementedError: this torch's ``fully_shard`` keeps shards in another way.
    """
    check_is_module(model, "materialize_on_host")
    if not (initialize is None or callable(initialize)):
        raise TypeError(f"materialize_on_host: initialize must be a function, got {type(initialize).__name__}.")
    sharded = {place: one for group in sharding_groups(model) for one in group.sharded() for place in one.places()}
    names = {module: name or "the model" for name, module in model.named_modules()}
    modules = [
        module
        for module in model.modules()
        if any(one.is_meta for one in (*module.parameters(recurse=False), *module.buffers(recurse=False)))
    ]
    outside = [
        f"{names[module]}.{name}"
        for module in modules
        for name, param in module.named_parameters(recurse=False)
        if param.is_meta and (module, name) not in sharded
    ]
    if outside or (modules and not sharded):
        raise ValueError(
            f"materialize_on_host: fully_shard gathers none of {listed(outside) or 'the parameters'}. Shard the model "
            "first, its root as well: fully_shard(model)."
        )
    silent = [names[module] for module in modules if not hasattr(module, "reset_parameters")]
    if initialize is None and silent:
        raise ValueError(
            f"materialize_on_host: {len(silent)} modules have parameters or buffers of their own and no "
            f"reset_parameters() ({listed(silent)}). Pass initialize=, which fills a module's own tensors, or "
            "initialize=lambda module: None if a checkpoint is loaded next."
        )
    fill: Any = initialize or methodcaller("reset_parameters")
    for module in modules:
        own = [sharded[module, name] for name, param in module.named_parameters(recurse=False) if param.is_meta]
        device = own[0].device if own else next(iter(sharded.values())).device
        give_memory(module, device)
        with torch.no_grad():
            fill(module)
        for one in own:
            one.follow_module()
            one.live_at(local_shard(one.param).cpu())
