"""Refusals: what is wrong with an optimizer, its parameters or its model, each as a condition and a sentence.

Those of :func:`offload_optimizer` come first, in the order in which they are asked; then what shows later: at the first
forward or step, that the optimizer was attached too early, or that another one steps.
"""

import functools
import gc
import warnings
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, ParamSpec

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from ..device.lanes import refuse_capture
from ..engine.engine import Engine, find_offloaded
from ..fsdp.dtensor import has_inner_tensors, is_dtensor, is_host_offloaded, local_shard
from ..fsdp.fully_shard import parameter_names, parameters_of, sharding_groups, uses_cpu_offload_policy
from ..fsdp.homed import is_homed
from ..optimizers import Capabilities
from ..optimizers.with_masters import WithMasters
from ..policy import OffloadPolicy
from ..state.layout import leaves_of, params_of
from .attachment import Attachment, attachment_of, offloaded

_HOST_OFFLOADED = (
    "This model uses CPUOffloadPolicy, which keeps parameters, gradients and state on the host, and updates there. "
    "Shard without offload_policy: fully_shard(module, ...). Then only the state is offloaded, or with "
    "OffloadPolicy(parameters=True) the parameters as well, and the device updates."
)
RIGHT_ORDER = (
    "call fully_shard(model), build the optimizer, then offload_optimizer(optimizer, model=model); in a framework that "
    "does these itself, see fsdp_offload.integrations"
)

_Arguments = ParamSpec("_Arguments")


def _refuses(sentences: Callable[_Arguments, Iterator[str]]) -> Callable[_Arguments, None]:
    """A check out of a list of conditions, each with its sentence: a ValueError has the first that is yielded."""

    @functools.wraps(sentences)
    def check(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> None:
        for sentence in sentences(*args, **kwargs):
            raise ValueError(f"offload_optimizer: {sentence}")

    return check


# The optimizer --------------------------------------------------------------------------------------------------------


def check_types(optimizer: object, model: object) -> None:
    """Refuse what is no optimizer or no model, and an optimizer that is offloaded already."""
    if model is not None and not isinstance(model, nn.Module):
        raise TypeError(f"offload_optimizer: model must be a torch.nn.Module, got {type(model).__name__}.")
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"offload_optimizer: expected a torch.optim.Optimizer, got {type(optimizer).__name__}.")
    if attachment_of(optimizer) is not None:
        raise RuntimeError(
            "offload_optimizer: this optimizer is offloaded already: exist_ok=True leaves it so. To change the policy, "
            "call remove_offload() first."
        )


@_refuses
def check_attachable(optimizer: Optimizer) -> Iterator[str]:
    """Refuse optimizers whose state is elsewhere, or whose step cannot be run anywhere else."""
    name, attributes = type(optimizer).__name__, vars(optimizer)
    if "cpu_optimizers" in attributes and "offload_fraction" in attributes:
        yield f"{name}: {_updated_on_host(attributes['offload_fraction'])}"
    for attribute, value in attributes.items():
        if any(isinstance(one, Optimizer) for one in tree_leaves(value)):
            yield f"{name} wraps another optimizer, its attribute {attribute!r}. Attach to the inner optimizer instead."
    for index, group in enumerate(optimizer.param_groups):
        if len(set(group["params"])) < len(group["params"]):
            yield f"param_groups[{index}] lists a parameter more than once. List each parameter once."
        if group.get("differentiable"):
            yield f"param_groups[{index}] has differentiable=True: autograd follows its step, which needs all state."


@_refuses
def check_own_offload(holder: Any) -> Iterator[str]:
    """Refuse Megatron's optimizers whose config offloads the same state; ``holder`` has one of torch's."""
    config = getattr(holder, "config", None)
    if getattr(config, "optimizer_cpu_offload", False):
        yield _updated_on_host(getattr(config, "optimizer_offload_fraction", 1.0))
    if getattr(config, "offload_optimizer_states", False):
        yield (
            "Megatron's offload_optimizer_states=True moves the same state in the same phases. Leave it off "
            "(--offload-optimizer-states); offload_optimizer(), offload_states(), release_states() and reload_before() "
            "do the same for the optimizer built so."
        )


def _updated_on_host(fraction: float) -> str:
    return (
        f"Megatron's optimizer_cpu_offload=True, optimizer_offload_fraction={fraction} updates a share of the "
        "parameters on the CPU by itself. Leave optimizer_cpu_offload off (--optimizer-cpu-offload), and offload a "
        f"torch.optim.Adam or AdamW with the same share: policy=OffloadPolicy(host_fraction={fraction})."
    )


@_refuses
def check_divisible(optimizer: Optimizer, capabilities: Capabilities, policy: OffloadPolicy) -> Iterator[str]:
    """Refuse optimizers whose step cannot be divided among buckets, and updates on the CPU where one has none."""
    if capabilities.refusal:
        yield capabilities.refusal
    if policy.host_fraction and not capabilities.takes_masters:
        yield (
            f"host_fraction={policy.host_fraction!r} is for the elementwise optimizers of torch.optim, which can "
            f"update on the CPU, and {type(optimizer).__name__} is not one of them. Leave it 0"
            f"{capabilities.conventions.instead_of_host_fraction}."
        )
    if capabilities.moves_whole:
        return
    for key in optimizer.state:
        if not isinstance(key, Tensor):
            yield f"optimizer.state has the key {key!r}, which is not a parameter; no bucket can have such state."
    for index, group in enumerate(optimizer.param_groups):
        # A type of several tensors takes the list of a kernel apart once for each of them, and whatever else is in the
        # list is updated as often: what a step does depends on which parameters it has.
        several = [len(leaves_of(local_shard(param))) > 1 for param in group["params"]]
        on_cpu = all(local_shard(param).device.type == "cpu" for param in group["params"])
        undecided = "foreach" in group and group["foreach"] is None and not group.get("fused") and not on_cpu
        if any(several) and not all(several) and (group.get("foreach") or group.get("fused") or undecided):
            yield (
                f"param_groups[{index}] has parameters of "
                f"{type(local_shard(group['params'][several.index(True)])).__name__}, which is made of several "
                "tensors, beside others, and is stepped by kernels over lists, which update the others once for each "
                "of these tensors. Give them a group of their own, or use foreach=False."
            )


def as_whole(policy: OffloadPolicy) -> OffloadPolicy:
    """The policy for an optimizer that moves as a whole: nothing of it can run before ``step()``, or after it."""
    return replace(policy, overlap="step")


# Its parameters and its model -----------------------------------------------------------------------------------------


def names_by_place(optimizer: Optimizer) -> dict[Tensor, str]:
    """Names from ``param_names`` where a group has them, else the place in ``param_groups``."""
    names = {}
    for index, group in enumerate(optimizer.param_groups):
        given = group.get("param_names", ())
        for position, param in enumerate(group["params"]):
            place = f"param_groups[{index}].params[{position}]"
            names[param] = given[position] if position < len(given) else place
    return names


def names_of_parameters(optimizer: Optimizer, model: nn.Module | None) -> dict[Tensor, str]:
    """Names of the optimizer's parameters, in the order of buckets: as the model registers them, else by group."""
    names = names_by_place(optimizer)
    if model is None:
        return names
    _check_model(model, names)
    return {param: name for param, name in parameter_names(model).items() if param in names}


@_refuses
def _check_model(model: nn.Module, names: Mapping[Tensor, str]) -> Iterator[str]:
    if uses_cpu_offload_policy(model):
        yield _HOST_OFFLOADED
    of_model = parameter_names(model)
    foreign = {param: name for param, name in names.items() if param not in of_model}
    shown, these = ", ".join([*foreign.values()][:4]), f"{len(foreign)} of the {len(names)}"
    if not all(isinstance(param, nn.Parameter) for param in foreign):
        yield (
            f"{these} tensors of the optimizer are not parameters of the model but copies or parts of them, as those "
            f"of Megatron's DistributedOptimizer ({shown}). Leave out model=, and overlap=, which hooks into its "
            "forward and backward. To load while gradients are reduced, wrap Megatron's hook with reload_before()."
        )
    if foreign:
        yield (
            f"{these} parameters of the optimizer are not parameters of the model ({shown}). fully_shard exchanges a "
            "model's parameters: call it first, then build the optimizer, then attach. A forward without a backward "
            "leaves parameters gathered: call model.reshard() before the optimizer is built."
        )


def device_of(
    params: Sequence[Tensor],
    names: Mapping[Tensor, str],
    capabilities: Capabilities,
    policy: OffloadPolicy,
    before: torch.device | None = None,
) -> torch.device:
    """Return the one device of parameters none of which is refused; ``before``: of those that are there already."""
    devices = {} if before is None else {before: "the other parameters"}
    for param in params:
        devices.setdefault(param.device if is_homed(param) else local_shard(param).device, names[param])
    check_params(params, names, capabilities, policy, devices)
    device = next(iter(devices), torch.device("cpu"))
    refuse_capture(device)
    return device


@_refuses
def check_params(
    params: Sequence[Tensor],
    names: Mapping[Tensor, str],
    capabilities: Capabilities,
    policy: OffloadPolicy,
    devices: Mapping[torch.device, str],
) -> Iterator[str]:
    """Refuse parameters that cannot be offloaded exactly. ``devices``: where they are, with the name of one there."""
    for param in params:
        name, local = names[param], local_shard(param)
        if local.is_meta:
            yield (
                f"{name} is on the meta device. Materialize the model (to_empty and its initialization, or loading a "
                "checkpoint; for OffloadPolicy(parameters=True), materialize_on_host) before the optimizer is built."
            )
        if is_host_offloaded(param) and not is_homed(param):
            yield f"{name} is on the host. {_HOST_OFFLOADED}"
        if is_homed(param) and not policy.parameters:
            yield (
                f"{name} is on the host, where materialize_on_host or another optimizer has put it. Write "
                "policy=OffloadPolicy(parameters=True)."
            )
        if capabilities.refuses_dtensor and is_dtensor(param):
            yield f"{name} is sharded. {capabilities.refuses_dtensor}"
        if capabilities.elementwise and capabilities.conventions.keeps_raw_state and has_inner_tensors(param):
            yield (
                f"{name} is a {type(local).__name__}, which is made of other tensors; the optimizer was attached "
                "without such parameters. Add the group first, then attach."
            )
    if len(devices) > 1:
        places = ", ".join(f"{name} on {device}" for device, name in devices.items())
        yield f"parameters on several devices: {places}. Use one optimizer for each device."
    if policy.pin_memory and all(device.type == "cpu" for device in devices):
        yield "pin_memory=True needs an accelerator, and the parameters are on the CPU. Leave it None."


@_refuses
def check_streamable(model: nn.Module | None, names: Mapping[Tensor, str]) -> Iterator[str]:
    """Refuse parameters that cannot have their home on the host: only what ``fully_shard`` gathers can."""
    groups = [] if model is None else sharding_groups(model)
    found = {one.param: one for group in groups for one in group.sharded() if one.param in names}
    if not found:
        yield (
            f"OffloadPolicy(parameters=True) needs {'model=..., whose' if model is None else 'a model whose'} "
            "parameters fully_shard has sharded. Shard it, then build the optimizer, then attach."
        )
    for param, one in found.items():
        if not one.is_plain:
            yield (
                f"{names[param]} is a {type(local_shard(param)).__name__}, which says itself how it is gathered; "
                "OffloadPolicy(parameters=True) is for dense parameters. Leave it out to offload only the state."
            )


# Other optimizers of the same parameters ------------------------------------------------------------------------------


def check_no_other_updates(params: Collection[Tensor], names: Mapping[Tensor, str], policy: OffloadPolicy) -> None:
    """Refuse parameters of two offloaded optimizers of which one updates in the backward, or has them on the host."""

    def conflicts(other: OffloadPolicy) -> bool:
        return any(one.updates_in_backward or one.parameters for one in (policy, other))

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


_pre_hook: list[RemovableHandle] = []
"""Looks at the steps of all optimizers, from the first ``overlap="iteration"`` on; never taken off, as torch may be
calling it."""


def _refuse_step_beside(other: Optimizer, args: object, kwargs: object) -> None:
    """Refuse the step of a plain optimizer with gradients that another one uses in the backward."""
    holds = any(isinstance(one, Optimizer) for one in getattr(other, "optimizers", ()))
    if holds or find_offloaded(other) is not None:
        return  # a container steps those that it holds, and each is looked at then
    params = [param for param in params_of(other) if param.grad is not None]
    for both, engine in _offloaded_with(params, lambda policy: policy.updates_in_backward):
        used = bool(engine.core.done)
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
    found = [([param for param in params if param in one.names], one) for one in engines if which(one.policy)]
    return [(both, engine) for both, engine in found if both]


# Each step ------------------------------------------------------------------------------------------------------------


def check_gradients_are_read(optimizer: Optimizer, names: Mapping[Tensor, str]) -> None:
    """Refuse to step where all that a parameter has been given is a gradient that this class does not look at."""
    for param in params_of(optimizer):
        if param.grad is None and getattr(param, "decoupled_grad", None) is not None:
            raise RuntimeError(
                f"step(): the gradient of {names.get(param, 'a parameter')} is in param.decoupled_grad, where "
                "Megatron's use_precision_aware_optimizer puts it, and this optimizer reads param.grad: nothing would "
                "be updated. Use Transformer Engine's FusedAdam(use_decoupled_grad=True), or leave "
                "use_precision_aware_optimizer off. Nothing has been changed."
            )


def refuse_bypass(optimizer: Optimizer, args: object, kwargs: object) -> None:
    """Step pre-hook: a class's own step must not run on state that is elsewhere, or on parameters that are rounded."""
    attachment, passed = attachment_of(optimizer), ("", "", "", "")
    if attachment is not None and not attachment.stepping:
        passed = attachment.engine.cls.__name__, "the offload", "offload_optimizer", "Attach"
    elif attachment is None and isinstance(optimizer, WithMasters) and not optimizer.is_stepping:
        passed = optimizer.plain_class.__name__, "the masters", "add_masters", "Add masters"
    cls, what, function, do = passed
    if cls:
        raise RuntimeError(
            f"{cls}.step was called past {what}: something captured it before {function}(). {do} first and wrap "
            "optimizer.step afterwards. Nothing has been changed."
        )


# Attached too early, or to an optimizer that nobody steps -------------------------------------------------------------


def options_without_effect(engine: Engine, groups: int) -> Iterator[str]:
    """Warn of options that change nothing with so many groups of ``fully_shard``, and of none on several ranks."""
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
    # No proof: DDP is so on purpose, and Megatron's DistributedOptimizer has shards of its own. Whether parameters will
    # be exchanged cannot be known before they are.
    ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    are_plain = all(isinstance(param, nn.Parameter) and not is_dtensor(param) for param in engine.names)
    if ranks > 1 and engine.names and are_plain:
        yield (
            f"None of the optimizer's parameters is a DTensor, and there are {ranks} ranks: each pins the state of all "
            f"that it holds. If the model is yet to be sharded, attach afterwards: {RIGHT_ORDER}."
        )


def refuse_exchanged(known: Collection[Tensor], groups: list[dict[str, Any]]) -> None:
    """Refuse parameters of which none was there at attach: frameworks that shard after building it exchange them."""
    # Parameters that were sharded at attach pass: a second prepare() of accelerate's puts them back.
    params = [param for group in groups for param in group["params"]]
    if params and known and not any(param in known for param in params) and not any(map(is_dtensor, known)):
        raise RuntimeError(
            "The parameters of this optimizer were exchanged after offload_optimizer(): it was attached before the "
            f"model was sharded, and holds the unsharded state. Attach afterwards: {RIGHT_ORDER}."
        )


def refuse_foreign(attachment: Attachment) -> None:
    """Raise where the optimizer has parameters without a gradient that its model no longer uses."""
    model = None if attachment.model is None else attachment.model()
    if model is None:
        return
    of_model = parameters_of(model)  # and not by their names: a look must not change what the next forward gathers
    names = attachment.engine.names
    foreign = [name for param, name in names.items() if param.grad is None and param not in of_model]
    if foreign:
        raise RuntimeError(
            f"{len(foreign)} of the optimizer's parameters have no gradient and are no longer the model's "
            f"({', '.join(foreign[:4])}): they were exchanged when the model was sharded, after offload_optimizer(), "
            f"or by load_state_dict(assign=True). Attach afterwards: {RIGHT_ORDER}. Nothing has been changed."
        )


class _Watch(NamedTuple):
    """An optimizer that is offloaded and has not stepped yet: its class, and its parameters by storage and offset.

    These are known as long as the storage lives, and kept alive by nobody who looks. ``model.to()`` refuses parameters
    with a weak reference, even where it changes nothing.
    """

    name: str
    places: set[tuple[StorageWeakRef, int]]

    def is_over(self) -> bool:
        return all(storage.expired() for storage, _ in self.places)


_watches: list[_Watch] = []
_post_hook: list[RemovableHandle] = []  # never taken off, as the pre-hook


def watch_until_first_step(optimizer: Optimizer, model: nn.Module | None, attachment: Attachment) -> None:
    """Until the first step, tell if a framework shards the model, or goes on with another optimizer."""
    watch = _Watch(attachment.engine.cls.__name__, _places_of(optimizer))
    _watches[:] = [*(other for other in _watches if not other.is_over()), watch]
    attachment.until_first_step.append(lambda: _watches.remove(watch) if watch in _watches else None)
    if not _post_hook:
        _post_hook.append(register_optimizer_step_post_hook(_look_who_steps))
    if model is None or all(map(is_dtensor, attachment.engine.names)):
        return
    reference = weakref.ref(attachment)

    def check(model: nn.Module, args: object) -> None:
        handle.remove()
        if (attachment := reference()) is not None:
            refuse_foreign(attachment)

    handle = model.register_forward_pre_hook(check)
    attachment.until_first_step.append(handle.remove)


def _places_of(optimizer: Optimizer) -> set[tuple[StorageWeakRef, int]]:
    locals_ = map(local_shard, params_of(optimizer))
    strided = [one for one in locals_ if one.layout is torch.strided]  # sparse tensors have no storage
    return {(StorageWeakRef(one.untyped_storage()), int(one.storage_offset())) for one in strided}


def _look_who_steps(other: Optimizer, args: object, kwargs: object) -> None:
    if not _watches or attachment_of(other) is not None:
        return
    _watches[:] = [watch for watch in _watches if not watch.is_over()]
    stepped = _places_of(other) if _watches else set()
    for watch in [one for one in _watches if any(not storage.expired() for storage, _ in one.places & stepped)]:
        _watches.remove(watch)
        warnings.warn(
            f"{type(other).__name__}.step() updated the parameters of the {watch.name} that offload_optimizer() was "
            "given, which has never stepped: training goes on with another optimizer, and NOTHING IS OFFLOADED. "
            f"Attach to the one that steps, once it is built: {RIGHT_ORDER}.",
            stacklevel=2,
        )
