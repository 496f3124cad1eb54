"""Checks of an optimizer, its parameters and its model before it is offloaded, and the parameters' names."""

import gc
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from ..core.engine import Engine, find_offloaded
from ..device.lanes import refuse_capture
from ..optimizers import Capabilities
from ..optimizers.shared_values import ENGINE_ATTRIBUTE
from ..policy import OffloadPolicy
from ..state.layout import leaves_of
from ..torch_compat.dtensor import has_inner_tensors, is_dtensor, is_host_offloaded, local_shard
from ..torch_compat.fully_shard import parameter_names, sharding_groups, uses_cpu_offload_policy
from ..torch_compat.homed import is_homed
from .attachment import attachment_of, offloaded
from .wrapped import updated_on_host

_HOST_OFFLOADED = (
    "This model uses CPUOffloadPolicy: parameters, gradients and optimizer state are on the host already and the "
    "update runs there. Shard without offload_policy: fully_shard(module, ...). Then parameters stay on the device and "
    "only the state is offloaded; with OffloadPolicy(parameters=True) parameters live on the host as well, and are "
    "updated on the device."
)


def check_model(model: object) -> None:
    """Refuse a model of another type with a TypeError."""
    if model is not None and not isinstance(model, nn.Module):
        raise TypeError(f"offload_optimizer: model must be a torch.nn.Module, got {type(model).__name__}.")


def check_attachable(optimizer: Optimizer) -> None:
    """Refuse optimizers that are offloaded already or whose step cannot be divided among buckets."""
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"offload_optimizer: expected a torch.optim.Optimizer, got {type(optimizer).__name__}.")
    if ENGINE_ATTRIBUTE in vars(optimizer):
        raise RuntimeError(
            "offload_optimizer: this optimizer is offloaded already. exist_ok=True leaves it so. To change the policy, "
            "call remove_offload() first."
        )
    if hasattr(optimizer, "cpu_optimizers") and hasattr(optimizer, "offload_fraction"):
        raise ValueError(
            f"offload_optimizer: {type(optimizer).__name__}: {updated_on_host(optimizer.offload_fraction)}"
        )
    inner = [name for name, value in vars(optimizer).items() if any(map(_is_optimizer, tree_leaves(value)))]
    if inner:
        raise ValueError(
            f"offload_optimizer: {type(optimizer).__name__} wraps another optimizer (its attribute {inner[0]!r}), "
            "which has the state. Attach to the inner optimizer instead."
        )
    for index, group in enumerate(optimizer.param_groups):
        if len(set(group["params"])) < len(group["params"]):
            raise ValueError(
                f"offload_optimizer: param_groups[{index}] lists a parameter more than once, which updates it as often "
                "in each step. List each parameter once."
            )
        if group.get("differentiable"):
            raise ValueError(
                f"offload_optimizer: param_groups[{index}] has differentiable=True; a step that autograd follows needs "
                "all state on the device."
            )


def _is_optimizer(value: object) -> bool:
    return isinstance(value, Optimizer)


def check_no_other_updates(params: Collection[Tensor], names: Mapping[Tensor, str], policy: OffloadPolicy) -> None:
    """Refuse parameters of two offloaded optimizers of which one updates in the backward, or has them on the host."""

    def tolerates_no_other(one: OffloadPolicy) -> bool:
        return one.updates_in_backward or one.parameters

    def conflicts(other: OffloadPolicy) -> bool:
        return tolerates_no_other(policy) or tolerates_no_other(other)

    if _offloaded_with(params, conflicts):
        gc.collect()  # an optimizer that only refers to itself is on its way out
    for both, _ in _offloaded_with(params, conflicts):
        raise RuntimeError(
            f"offload_optimizer: {len(both)} of these parameters ({names[both[0]]}, ...) are also of another offloaded "
            "optimizer. With overlap='iteration' they are updated in the backward, whoever calls step(), and with "
            "parameters=True they live with one optimizer's state. Call remove_offload() on the other one first, or "
            "let nothing refer to it any more: schedulers and scalers do, too."
        )
    if policy.updates_in_backward and not _pre_hook:
        _pre_hook.append(register_optimizer_step_pre_hook(_refuse_step_beside))


def options_without_effect(engine: Engine, groups: int) -> Iterator[str]:
    """Yield a sentence for each option of the policy that changes nothing.

    Args:
        engine: of the optimizer, with its parameters added.
        groups: how many groups of ``fully_shard`` have parameters of the optimizer.
    """
    policy, shards = engine.policy, engine.plan.shards.values()
    if policy.runs_on_into_forward and groups == 1:
        yield (
            f"overlap={policy.overlap!r} hides nothing: fully_shard gathers all parameters at once, so the forward "
            "waits for all updates. Apply fully_shard to each block, then to the model."
        )
    if policy.snapshot_bytes and not engine.plan.spare_bytes:
        yield (
            f"snapshot_bytes={policy.snapshot_bytes} has no effect: no state fits into it. With as many bytes as the "
            "state, training never waits for a save."
        )
    if policy.host_fraction and shards and not any(shard.on_host for shard in shards):
        yield f"host_fraction={policy.host_fraction} has no effect: no bucket is as small as that share of the state."


_pre_hook: list[RemovableHandle] = []
"""Looks at the steps of all optimizers, from the first ``overlap="iteration"`` on; never taken off, as torch may be
calling it."""


def _refuse_step_beside(other: Optimizer, args: object, kwargs: object) -> None:
    """Refuse the step of a plain optimizer with gradients that another one uses in the backward."""
    del args, kwargs
    if find_offloaded(other) is not None or any(map(_is_optimizer, getattr(other, "optimizers", ()))):
        return  # a container steps those that it holds, and each is looked at then
    params = [param for group in other.param_groups for param in group["params"] if param.grad is not None]
    for both, engine in _offloaded_with(params, lambda policy: policy.updates_in_backward):
        used = engine.steps.begun
        raise RuntimeError(
            f"{type(other).__name__}.step(): {engine.names[both[0]]} is also a parameter of an {engine.cls.__name__} "
            "that is offloaded with overlap='iteration' and updates it in the backward, whoever calls step(). "
            + ("That has happened in this backward: end it with step() of that optimizer. " if used else "")
            + "Train with one of them: call remove_offload() on the other, or let nothing refer to it any more "
            "(schedulers and scalers do, too)." + ("" if used else " Nothing has been changed.")
        )


def _offloaded_with(
    params: Collection[Tensor], which: Callable[[OffloadPolicy], bool]
) -> list[tuple[list[Tensor], Engine]]:
    """List which of ``params`` offloaded optimizers have, of those with ``which`` policies."""
    engines = [attachment.engine for attachment in map(attachment_of, list(offloaded)) if attachment is not None]
    found = [
        ([param for param in params if param in engine.names], engine) for engine in engines if which(engine.policy)
    ]
    return [(both, engine) for both, engine in found if both]


def check_capabilities(optimizer: Optimizer, capabilities: Capabilities, policy: OffloadPolicy) -> None:
    """Refuse optimizers that cannot be offloaded, and updates on the CPU where one has none."""
    if capabilities.refusal:
        raise ValueError(f"offload_optimizer: {capabilities.refusal}")
    if policy.host_fraction and not capabilities.takes_masters:
        raise ValueError(
            f"offload_optimizer: host_fraction={policy.host_fraction!r} is for the elementwise optimizers of "
            f"torch.optim, which can update on the CPU, and {type(optimizer).__name__} is not one of them. Leave it 0"
            f"{capabilities.conventions.instead_of_host_fraction}."
        )


def check_gradients_are_read(optimizer: Optimizer, names: Mapping[Tensor, str]) -> None:
    """Refuse to step where all that a parameter has been given is a gradient that this class does not look at."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.grad is None and getattr(param, "decoupled_grad", None) is not None:
                raise RuntimeError(
                    f"step(): the gradient of {names.get(param, 'a parameter')} is in param.decoupled_grad, where "
                    "Megatron's use_precision_aware_optimizer puts it, and this optimizer reads param.grad: nothing "
                    "would be updated. Use Transformer Engine's FusedAdam(use_decoupled_grad=True), or leave "
                    "use_precision_aware_optimizer off. Nothing has been changed."
                )


def as_whole(policy: OffloadPolicy) -> OffloadPolicy:
    """The policy for an optimizer that moves as a whole: nothing of it can run before ``step()``, or after it."""
    return replace(policy, overlap="step")


def check_divisible(optimizer: Optimizer) -> None:
    """Refuse state that belongs to no parameter, and list kernels over types of several tensors, beside others.

    Such a type takes a list apart once for each of its inner tensors, and whatever else is in the list is updated as
    often: what a step does depends on which parameters it has.
    """
    keys: list[object] = list(optimizer.state)
    other = [key for key in keys if not isinstance(key, Tensor)]
    if other:
        raise ValueError(
            f"offload_optimizer: optimizer.state has the key {other[0]!r}, which is not a parameter; such state cannot "
            "be divided among buckets."
        )
    for index, group in enumerate(optimizer.param_groups):
        several = [len(leaves_of(local_shard(param))) > 1 for param in group["params"]]
        on_cpu = all(local_shard(param).device.type == "cpu" for param in group["params"])
        undecided = "foreach" in group and group["foreach"] is None and not group.get("fused") and not on_cpu
        if any(several) and not all(several) and (group.get("foreach") or group.get("fused") or undecided):
            made = type(local_shard(group["params"][several.index(True)])).__name__
            raise ValueError(
                f"offload_optimizer: param_groups[{index}] has parameters of {made}, which is made of several tensors, "
                "beside others, and is stepped by kernels over lists, which update the others once for each of these "
                "tensors. Give them a group of their own, or use foreach=False."
            )


def names_of_parameters(optimizer: Optimizer, model: nn.Module | None) -> dict[Tensor, str]:
    """Names of the optimizer's parameters, in the order of buckets: as the model registers them, else by group."""
    by_place = names_by_place(optimizer)
    if model is None:
        return by_place
    if uses_cpu_offload_policy(model):
        raise ValueError(f"offload_optimizer: {_HOST_OFFLOADED}")
    of_model = parameter_names(model)
    foreign = [name for param, name in by_place.items() if param not in of_model]
    if foreign and not all(isinstance(param, nn.Parameter) for param in by_place if param not in of_model):
        raise ValueError(
            f"offload_optimizer: {len(foreign)} of the {len(by_place)} tensors of the optimizer are not parameters of "
            f"the model but copies or parts of them, as those of Megatron's DistributedOptimizer ({foreign[0]}). Leave "
            "out model=, and overlap=, which hooks into its forward and backward. To load "
            "while gradients are reduced, wrap Megatron's hook with reload_before()."
        )
    if foreign:
        raise ValueError(
            f"offload_optimizer: {len(foreign)} of the {len(by_place)} parameters of the optimizer are not parameters "
            f"of the model ({', '.join(foreign[:4])}). fully_shard exchanges a model's parameters: call it first, then "
            "build the optimizer, then attach. A forward without a backward leaves parameters gathered: call "
            "model.reshard() before the optimizer is built."
        )
    return {param: name for param, name in of_model.items() if param in by_place}


def check_streamable(model: nn.Module | None, names: Mapping[Tensor, str]) -> None:
    """Refuse parameters that cannot have their home on the host: only what ``fully_shard`` gathers can.

    Raises:
        ValueError: there are none, or one is of a type that says itself how it is gathered.
        NotImplementedError: this torch's ``fully_shard`` has other hook points, or keeps shards in another way.
    """
    groups = [] if model is None else sharding_groups(model)
    found = {one.param: one for group in groups for one in group.sharded() if one.param in names}
    if not found:
        without = "needs model=..., whose" if model is None else "needs a model whose"
        raise ValueError(
            f"offload_optimizer: OffloadPolicy(parameters=True) {without} parameters fully_shard has sharded: it "
            "brings them to the device when fully_shard gathers them. Shard the model, then build the optimizer, then "
            "attach."
        )
    for param, one in found.items():
        if not one.is_plain:
            raise ValueError(
                f"offload_optimizer: {names[param]} is a {type(local_shard(param)).__name__}, which says itself how it "
                "is gathered; OffloadPolicy(parameters=True) is for dense parameters. Leave it out to offload only the "
                "state."
            )


def names_by_place(optimizer: Optimizer) -> dict[Tensor, str]:
    """Names from ``param_names`` where a group has them, else the place in ``param_groups``."""
    names = {}
    for index, group in enumerate(optimizer.param_groups):
        given = group.get("param_names", ())
        for position, param in enumerate(group["params"]):
            place = f"param_groups[{index}].params[{position}]"
            names[param] = given[position] if position < len(given) else place
    return names


def check_params(
    capabilities: Capabilities,
    params: list[Tensor],
    names: Mapping[Tensor, str],
    device: torch.device | None = None,
    *,
    on_host: bool = False,
) -> torch.device:
    """Refuse what cannot be offloaded exactly, and return the one device of all parameters.

    ``on_host``: parameters may live there.
    """
    devices = {} if device is None else {device: "the other parameters"}
    for param in params:
        local = local_shard(param)
        if local.is_meta:
            raise ValueError(
                f"offload_optimizer: {names[param]} is on the meta device. Materialize the model (to_empty and its "
                "initialization, or loading a checkpoint; for OffloadPolicy(parameters=True), materialize_on_host) "
                "before the optimizer is built."
            )
        if is_host_offloaded(param) and not is_homed(param):
            raise ValueError(f"offload_optimizer: {names[param]} is on the host. {_HOST_OFFLOADED}")
        if is_homed(param) and not on_host:
            raise ValueError(
                f"offload_optimizer: {names[param]} is on the host, where materialize_on_host or another optimizer has "
                "put it. Write policy=OffloadPolicy(parameters=True)."
            )
        if capabilities.refuses_dtensor and is_dtensor(param):
            raise ValueError(f"offload_optimizer: {names[param]} is sharded. {capabilities.refuses_dtensor}")
        if capabilities.elementwise and capabilities.conventions.keeps_raw_state and has_inner_tensors(param):
            raise ValueError(
                f"offload_optimizer: {names[param]} is a {type(local).__name__}, which is made of other tensors; the "
                "optimizer was attached without such parameters. Add the group first, then attach."
            )
        devices.setdefault(param.device if is_homed(param) else local.device, names[param])
    if len(devices) > 1:
        raise ValueError(
            "offload_optimizer: parameters on several devices: "
            + ", ".join(f"{name} on {where}" for where, name in devices.items())
            + ". Use one optimizer for each device."
        )
    found = next(iter(devices), torch.device("cpu"))
    refuse_capture(found)
    return found
