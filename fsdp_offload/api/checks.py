"""Refusals of optimizers, parameters and models: each is a condition and a sentence.

First come the checks of :func:`offload_optimizer`, in their order, then those of the first forward or step: whether the
optimizer was attached too early, or another one steps.
"""

import functools
import gc
import sys
import warnings
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from ..device.lanes import refuse_capture
from ..engine.engine import Engine, find_offloaded
from ..fsdp.dtensor import has_inner_tensors, is_dtensor, local_shard, world_size
from ..fsdp.fully_shard import parameter_names, parameters_of, sharding_groups, uses_cpu_offload_policy
from ..fsdp.homed import is_homed
from ..model.sleep import is_asleep
from ..optimizers import Capabilities
from ..optimizers.capabilities import row_of
from ..optimizers.masters import WithMasters
from ..policy import OffloadPolicy, listed, nearest_to
from ..state.layout import leaves_of, params_of
from .wrapped import Attachment, attached, attachment_of, offloaded

_HOST_OFFLOADED = (
    "This model uses CPUOffloadPolicy, which updates on the host. Shard without offload_policy: fully_shard(module). "
    "Then the state is offloaded, with OffloadPolicy(parameters=True) the parameters as well, and the device updates."
)
RIGHT_ORDER = (
    "call fully_shard(model), build the optimizer, then offload_optimizer(optimizer, model=model); in a framework that "
    "does these itself, see fsdp_offload.integrations"
)


def refuse(sentences: Iterable[str]) -> None:
    """Raise the first sentence, if there is one."""
    for sentence in sentences:
        raise ValueError(f"offload_optimizer: {sentence}")


def refuse_misplaced(by_place: Sequence[Any], by_name: Mapping[str, Any]) -> None:
    """Raise for unknown arguments of ``offload_optimizer``, with the line to write for fields of the policy."""
    if not (by_place or by_name):
        return
    known = ["model", "policy", "exist_ok", *vars(OffloadPolicy())]
    right = {(get_close_matches(name, known, n=1) or [name])[0]: value for name, value in by_name.items()}
    given = {name: f"{name}={value!r}" for name, value in right.items()}
    fields = ", ".join(given[name] for name in known[3:] if name in given)
    more = [given[name] for name in known[1:3] if name in given] + [f"policy=OffloadPolicy({fields})"] * bool(fields)
    hints = "".join(nearest_to(name, ()) for name in by_name)
    raise TypeError(
        "offload_optimizer takes an optimizer, and by name model, policy, exist_ok and trust_separable; got also "
        f"{listed([*by_name, *(type(one).__name__ for one in by_place)])}.{hints} Write offload_optimizer("
        f"{', '.join(['optimizer', 'model=model', *more])})."
    )


# The optimizer --------------------------------------------------------------------------------------------------------


def wrong_with_holder(holder: Any) -> Iterator[str]:
    """Yield problems of ``holder``, Megatron's optimizer around one of torch's: it moves the same state itself."""
    config = getattr(holder, "config", None)
    if getattr(config, "optimizer_cpu_offload", False):
        yield _updated_on_host(getattr(config, "optimizer_offload_fraction", 1.0))
    # Megatron's branch dev turns the first flag into the second.
    flags = "offload_optimizer_states", "chunked_optimizer_state_offload"
    has_own = getattr(holder, "_optimizer_state_offloader", None) is not None
    if has_own or any(getattr(config, flag, False) for flag in flags):
        yield (
            f"Megatron's {' or '.join(flags)} moves the same state. Leave both off; offload_states(), release_states() "
            "and reload_before() do the same for an offloaded optimizer."
        )


def _updated_on_host(fraction: float) -> str:
    return (
        "Megatron's optimizer_cpu_offload=True (--optimizer-cpu-offload) updates a share of the parameters on the CPU "
        "by itself. Leave it off: the device updates. For a share on the CPU, offload torch's Adam or AdamW with "
        f"OffloadPolicy(host_fraction={fraction or 1.0})."  # unset, it is 0.0 in a config and 1.0 on the command line
    )


def wrong_with_optimizer(optimizer: Optimizer, capabilities: Capabilities, policy: OffloadPolicy) -> Iterator[str]:
    """Yield problems of ``optimizer``: state elsewhere, an indivisible step, or no step for the CPU's share."""
    name, attributes = type(optimizer).__name__, vars(optimizer)
    if "cpu_optimizers" in attributes and "offload_fraction" in attributes:
        yield f"{name}: {_updated_on_host(attributes['offload_fraction'])}"
    for attribute, value in attributes.items():
        if any(isinstance(one, Optimizer) for one in tree_leaves(value)):
            yield f"{name} wraps another optimizer, its attribute {attribute!r}. Attach to the inner optimizer instead."
    if policy.updates_in_backward and (torchft := sys.modules.get("torchft.optim")) is not None:
        cls = getattr(torchft, "OptimizerWrapper", ())
        if any(issubclass(type(one), cls) and one.optim is optimizer for one in gc.get_objects()):
            yield (
                "torchft's OptimizerWrapper leaves out step() where replicas do not commit, and overlap='iteration' "
                "has updated by then. Use overlap='forward'."
            )
    for index, group in enumerate(optimizer.param_groups):
        if len(set(group["params"])) < len(group["params"]):
            yield f"param_groups[{index}] lists a parameter more than once. List each parameter once."
        if group.get("differentiable"):
            yield (
                f"param_groups[{index}] has differentiable=True: autograd follows its step, which needs all state. Set "
                "it to False."
            )
    if capabilities.refusal:
        yield capabilities.refusal
    if policy.host_fraction and not capabilities.takes_masters:
        yield (
            f"host_fraction={policy.host_fraction!r} is for the elementwise optimizers of torch.optim, and {name} is "
            f"not one of them. Leave it 0{capabilities.conventions.instead_of_host_fraction}."
        )
    if not capabilities.moves_whole:
        yield from _indivisible(optimizer)


def _indivisible(optimizer: Optimizer) -> Iterator[str]:
    for key in optimizer.state:
        if not isinstance(key, Tensor):
            yield (
                f"optimizer.state has the key {key!r}, which is not a parameter: no bucket has it. Keep it "
                "in an attribute of the optimizer."
            )
    for index, group in enumerate(optimizer.param_groups):
        # Foreach and fused kernels run once for each inner tensor of a tensor subclass, and update the rest of the
        # list each time: the result depends on which parameters share a list.
        locals_ = [local_shard(param) for param in group["params"]]
        several = [local for local in locals_ if len(leaves_of(local)) > 1]
        on_cpu = all(local.device.type == "cpu" for local in locals_)
        undecided = "foreach" in group and group["foreach"] is None and not on_cpu
        if 0 < len(several) < len(locals_) and (group.get("foreach") or group.get("fused") or undecided):
            yield (
                f"param_groups[{index}] has parameters of {type(several[0]).__name__}, which is made of several "
                "tensors: kernels over lists update the others once for each such tensor. Give them their own group, "
                "or use foreach=False."
            )


# Its parameters and its model -----------------------------------------------------------------------------------------


def names_by_place(optimizer: Optimizer) -> dict[Tensor, str]:
    """Map parameters to their names in ``param_names`` or, without them, to their places in ``param_groups``."""
    names = {}
    for index, group in enumerate(optimizer.param_groups):
        given = group.get("param_names", ())
        for position, param in enumerate(group["params"]):
            place = f"param_groups[{index}].params[{position}]"
            names[param] = given[position] if position < len(given) else place
    return names


def wrong_with_model(model: nn.Module, names: Mapping[Tensor, str]) -> Iterator[str]:
    """Yield problems of ``model``: it lacks parameters of the optimizer, or keeps its own on the host."""
    if uses_cpu_offload_policy(model):
        yield _HOST_OFFLOADED
    of_model = parameter_names(model)
    foreign = {param: name for param, name in names.items() if param not in of_model}
    shown, these = listed(foreign.values()), f"{len(foreign)} of the {len(names)}"
    if not all(isinstance(param, nn.Parameter) for param in foreign):
        yield (
            f"{these} tensors of the optimizer are not parameters of the model but copies or parts of them ({shown}). "
            "Leave out model= and overlap=; to load while gradients are reduced, wrap Megatron's hook by "
            "reload_before()."
        )
    if foreign:
        yield (
            f"{these} parameters of the optimizer are not parameters of the model ({shown}). Give the whole model that "
            "it was built for. Call fully_shard, which exchanges them, then build the optimizer, then attach. After a "
            "forward without a backward, call model.reshard() before that."
        )


def device_of(
    params: Sequence[Tensor],
    names: Mapping[Tensor, str],
    capabilities: Capabilities,
    policy: OffloadPolicy,
    before: torch.device | None = None,
) -> torch.device:
    """Check ``params`` and return their device; ``before``: the device of parameters that were added earlier."""
    devices = {} if before is None else {before: "the other parameters"}
    for param in params:
        devices.setdefault(param.device if is_homed(param) else local_shard(param).device, names[param])
    for param in params:
        refuse(_wrong_with_parameter(param, names[param], capabilities, policy))
    if len(devices) > 1:
        places = ", ".join(f"{name} on {device}" for device, name in devices.items())
        refuse([f"parameters on several devices: {places}. Use one optimizer for each device."])
    device = next(iter(devices), torch.device("cpu"))
    if policy.pin_memory and device.type == "cpu":
        refuse(["pin_memory=True needs an accelerator, and the parameters are on the CPU. Leave it None."])
    refuse_capture(device)
    return device


def _wrong_with_parameter(param: Tensor, name: str, capabilities: Capabilities, policy: OffloadPolicy) -> Iterator[str]:
    local = local_shard(param)
    if local.is_meta:
        yield (
            f"{name} is on the meta device. Materialize the model (to_empty; for OffloadPolicy(parameters=True), "
            "materialize_on_host) before the optimizer is built."
        )
    is_on_host = isinstance(param, DTensor) and local.device.type != param.device_mesh.device_type
    if is_on_host and not is_homed(param):  # fully_shard itself keeps it there
        yield f"{name} is on the host. {_HOST_OFFLOADED}"
    if is_homed(param) and not policy.parameters:
        whole = "Materialize the model on its device: this optimizer moves as a whole."
        yield (
            f"{name} is on the host, where materialize_on_host or another optimizer has put it. "
            f"{whole if capabilities.moves_whole else 'Write policy=OffloadPolicy(parameters=True).'}"
        )
    if capabilities.refuses_dtensor and is_dtensor(param):
        yield f"{name} is sharded. {capabilities.refuses_dtensor}"
    if capabilities.elementwise and capabilities.conventions.keeps_raw_state and has_inner_tensors(param):
        yield f"{name} is a {type(local).__name__}, made of other tensors: add the first such group, then attach."


def wrong_to_stream(
    optimizer: Optimizer, capabilities: Capabilities, model: nn.Module | None, names: Mapping[Tensor, str]
) -> Iterator[str]:
    """Yield reasons why parameters cannot stream: ``fully_shard`` does not gather them, or the class moves whole."""
    if capabilities.moves_whole:
        divides = row_of(type(optimizer)).get("verdict") not in (None, "mixed")
        yield (
            f"{type(optimizer).__name__} moves as a whole, and OffloadPolicy(parameters=True) moves parameters in "
            f"pieces. Use parameters=False{', or trust_separable=True' if divides else ''}."
        )
        return
    if model is not None and is_asleep(model):
        yield "OffloadPolicy(parameters=True): the model is asleep. Call reload_model(model) first."
        return
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


def options_without_effect(engine: Engine, groups: int) -> Iterator[str]:
    """Yield warnings of options that have no effect with this number of ``groups``, and of plain parameters."""
    policy, shards = engine.policy, engine.plan.shards.values()
    if policy.runs_on_into_forward and groups == 1:
        yield (
            f"overlap={policy.overlap!r} hides nothing: fully_shard gathers all of the optimizer's parameters at once, "
            "so the forward waits for all updates. Apply fully_shard to each block, then to the model."
        )
    if policy.snapshot_bytes and not engine.plan.spare_bytes:
        yield f"snapshot_bytes={policy.snapshot_bytes} has no effect: no state fits into it. Give more, or 0."
    if policy.host_fraction and shards and not any(shard.on_host for shard in shards):
        yield (
            f"host_fraction={policy.host_fraction} has no effect: no bucket is as small as that share of the state. "
            "Give more, smaller bucket_bytes, or 0."
        )
    # Only a warning: DDP has plain parameters on purpose, and Megatron's DistributedOptimizer its own shards. Whether
    # parameters will be exchanged later cannot be known now.
    ranks = world_size()
    are_plain = all(isinstance(param, nn.Parameter) and not is_dtensor(param) for param in engine.names)
    if ranks > 1 and engine.names and are_plain:
        yield (
            f"None of the optimizer's parameters is a DTensor, and there are {ranks} ranks: each pins the state of all "
            f"that it holds. If the model is yet to be sharded, attach afterwards: {RIGHT_ORDER}."
        )


# Steps, and other parameters of the same model ------------------------------------------------------------------------


def refuse_bypass(optimizer: Optimizer, args: object, kwargs: object) -> None:
    """Raise, as a step pre-hook, if the class's own step runs on offloaded state or rounded parameters."""
    if (attachment := attachment_of(optimizer)) is not None:
        cls, is_past, function = attachment.engine.cls, not attachment.stepping, "offload_optimizer"
    else:
        assert isinstance(optimizer, WithMasters)
        cls, is_past, function = optimizer.plain_class, not optimizer.is_stepping, "add_masters"
    if is_past:
        raise RuntimeError(
            f"{cls.__name__}.step was captured before {function}() and called now. Call {function}() first and wrap "
            "optimizer.step afterwards. Nothing has been changed."
        )


def check_no_other_updates(params: Collection[Tensor], names: Mapping[Tensor, str], policy: OffloadPolicy) -> None:
    """Raise if another offloaded optimizer has some ``params``, and either updates in the backward or streams them."""

    def conflicts(other: Attachment) -> bool:
        return any(one.updates_in_backward or one.parameters for one in (policy, other.engine.policy))

    if _offloaded_with(params, conflicts):
        gc.collect()  # drop optimizers that only refer to themselves
    for both, _ in _offloaded_with(params, conflicts):
        raise RuntimeError(
            f"offload_optimizer: {len(both)} of the parameters ({names[both[0]]}, ...) are also of another offloaded "
            "optimizer, which overlap='iteration' and parameters=True do not allow. Call remove_offload() on that one "
            "first, or let nothing refer to it any more: schedulers and scalers do, too."
        )


def _offloaded_with(
    params: Collection[Tensor], which: Callable[[Attachment], bool]
) -> list[tuple[list[Tensor], Attachment]]:
    """List the attachments chosen by ``which`` that have some of ``params``, with those parameters."""
    attachments = filter(which, map(attached, list(offloaded)))
    found = (([param for param in params if param in one.engine.names], one) for one in attachments)
    return [(both, attachment) for both, attachment in found if both]


def watch_steps(attachment: Attachment, model: nn.Module | None) -> None:
    """Check steps of other optimizers, and the first forward of ``model``, which may not be sharded yet."""
    _look_at_all_steps()
    if model is None or all(map(is_dtensor, attachment.engine.names)):
        return
    reference = weakref.ref(attachment)

    def check(model: nn.Module, args: object) -> None:
        handle.remove()
        if (attachment := reference()) is not None:
            refuse_exchanged(attachment)

    handle = model.register_forward_pre_hook(check)
    attachment.undo.append(handle.remove)


@functools.cache  # registered at the first attachment; never removed, as torch may be calling it
def _look_at_all_steps() -> RemovableHandle:
    return register_optimizer_step_pre_hook(_look_who_steps)


def _look_who_steps(other: Optimizer, args: object, kwargs: object) -> None:
    """Raise if an offloaded optimizer updates parameters of ``other`` in the backward; warn if it has never stepped."""
    holds = any(isinstance(one, Optimizer) for one in getattr(other, "optimizers", ()))
    if holds or find_offloaded(other) is not None:
        return  # a container steps the optimizers that it holds, and each is checked then
    params = [param for param in params_of(other) if param.grad is not None]
    for both, attachment in _offloaded_with(params, lambda one: one.engine.policy.updates_in_backward):
        engine = attachment.engine
        raise RuntimeError(
            f"{type(other).__name__}.step(): {engine.names[both[0]]} is also a parameter of an {engine.cls.__name__} "
            "that is offloaded with overlap='iteration' and updates it in the backward. Train with one of them: call "
            "remove_offload() on the other, or let nothing refer to it any more (schedulers and scalers do, too). "
            + ("It has updated: end that with its step()." if engine.core.done else "Nothing has been changed.")
        )
    for _, attachment in _offloaded_with(params, lambda one: one.is_new):
        attachment.is_new = False
        warnings.warn(
            f"{type(other).__name__}.step() updates parameters of the {attachment.engine.cls.__name__} that is "
            f"offloaded and has never stepped: NOTHING IS OFFLOADED. Attach to the one that steps: {RIGHT_ORDER}.",
            stacklevel=2,
        )


def refuse_exchanged(attachment: Attachment, params: Collection[Tensor] = ()) -> None:
    """Raise if parameters were replaced since attaching: sharded ``params`` of the optimizer, or the model's."""
    names, known = attachment.engine.names, None if attachment.has_others else attachment.model
    model = None if known is None else known()
    # Not parameter_names(), which reshards: a check must not change what the next forward gathers.
    of_model = names.keys() if model is None else parameters_of(model).keys()
    foreign = [name for param, name in names.items() if param.grad is None and param not in of_model]
    if any(is_dtensor(param) and param not in names for param in params) and not any(map(is_dtensor, names)):
        foreign = list(names.values())
    if foreign:
        raise RuntimeError(
            f"{len(foreign)} of the optimizer's parameters have no gradient and are no longer the model's "
            f"({listed(foreign)}): they were exchanged when the model was sharded, after offload_optimizer(), "
            f"or by load_state_dict(assign=True). Attach afterwards: {RIGHT_ORDER}. Nothing has been changed."
        )
