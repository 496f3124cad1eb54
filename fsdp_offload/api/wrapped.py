"""Optimizers inside other frameworks' objects: accelerate's wrapper, Megatron-LM's optimizers and chains of them.

==========================================  ==========================================================================
theirs                                      what is looked at
==========================================  ==========================================================================
accelerate's ``AcceleratedOptimizer``       ``optimizer``
Megatron's ``ChainedOptimizer``             ``chained_optimizers``
Megatron's ``DistributedOptimizer``,        ``optimizer``; ``shard_fp32_from_float16_groups`` or ``fp32_from_float16_``
``Float16OptimizerWithFloat16Params``, …    ``groups`` name the fp32 masters among its parameters,
                                            ``shard_fp32_groups`` those that are in fp32 anyway
==========================================  ==========================================================================

Read in ``megatron/core/optimizer`` of megatron-core 0.16.1. Nothing of it is imported.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from .attachment import unwrap

_MASTER_GROUPS = ("shard_fp32_from_float16_groups", "fp32_from_float16_groups")


def is_wrapped(optimizer: object) -> bool:
    """Return whether ``optimizer`` is none of torch's, but holds some: one of Megatron's, or a chain."""
    return any(True for _ in _holders(optimizer))


def optimizers_in(optimizer: Any) -> list[Optimizer]:
    """List the optimizers of torch inside ``optimizer``, in order, each once; itself if it is one.

    Raises:
        TypeError: there are none.
    """
    target = unwrap(optimizer)
    if isinstance(target, Optimizer):
        return [target]
    found = list(dict.fromkeys(inner for _, inner in _holders(optimizer)))
    if not found:
        raise TypeError(
            f"expected a torch.optim.Optimizer, or one of Megatron's that holds some, got {type(optimizer).__name__}."
        )
    return found


def masters_in(optimizer: Any) -> dict[Optimizer, list[Tensor]]:
    """Find the fp32 masters that are parameters of each optimizer, as the one around it says."""
    masters: dict[Optimizer, list[Tensor]] = {}
    for holder, inner in _holders(optimizer):
        params = {param for group in inner.param_groups for param in group["params"]}
        named = [tensor for name in _MASTER_GROUPS for tensor in _tensors_in(getattr(holder, name, ()))]
        masters[inner] = [tensor for tensor in dict.fromkeys(named) if tensor in params]
    return masters


def savers_of_all_masters(optimizer: Any) -> list[Optimizer]:
    """Find the optimizers around which Megatron saves a master of every parameter, also of those in fp32.

    Its precision-aware DistributedOptimizer takes ``master_param`` out of the state of each.
    """
    return [
        inner
        for holder, inner in _holders(optimizer)
        if getattr(getattr(holder, "config", None), "use_precision_aware_optimizer", False)
        and any(True for _ in _tensors_in(getattr(holder, "shard_fp32_groups", ())))
    ]


def refuse_own_offload(optimizer: Any) -> None:
    """Refuse Megatron's optimizers whose config offloads the same state.

    Raises:
        ValueError: names the flag, and says what does the same here.
    """
    for holder, _ in _holders(optimizer):
        config = getattr(holder, "config", None)
        if getattr(config, "optimizer_cpu_offload", False):
            raise ValueError(
                f"offload_optimizer: {updated_on_host(getattr(config, 'optimizer_offload_fraction', 1.0))}"
            )
        if getattr(config, "offload_optimizer_states", False):
            raise ValueError(
                "offload_optimizer: Megatron's offload_optimizer_states=True moves the same state in the same phases. "
                "Leave it off (--offload-optimizer-states); offload_optimizer(), offload_states(), release_states() "
                "and reload_before() do the same for the optimizer built so."
            )


def updated_on_host(fraction: float) -> str:
    """Say what does the same here as Megatron's pair of flags for updates on the CPU."""
    return (
        f"Megatron's optimizer_cpu_offload=True, optimizer_offload_fraction={fraction} updates a share of the "
        "parameters on the CPU by itself. Leave optimizer_cpu_offload off (--optimizer-cpu-offload), and offload a "
        f"torch.optim.Adam or AdamW with the same share: policy=OffloadPolicy(host_fraction={fraction})."
    )


def _holders(optimizer: Any) -> Iterator[tuple[Any, Optimizer]]:
    """Each optimizer of torch inside something else, with the object that holds it. A scheduler is not one."""
    if isinstance(unwrap(optimizer), Optimizer) or not hasattr(optimizer, "zero_grad"):
        return
    chained = getattr(optimizer, "chained_optimizers", None)
    if isinstance(chained, Iterable):
        for one in chained:
            if isinstance(one, Optimizer):
                yield optimizer, one
            else:
                yield from _holders(one)
        return
    inner = unwrap(getattr(optimizer, "optimizer", None))  # type: ignore[arg-type]  # None where nothing is trained
    if isinstance(inner, Optimizer):
        yield optimizer, inner
    elif inner is not None and inner is not optimizer:
        yield from _holders(inner)


def _tensors_in(groups: Any) -> Iterator[Tensor]:
    for group in groups or ():
        for tensor in group if isinstance(group, list | tuple) else (group,):
            if isinstance(tensor, Tensor):
                yield tensor
