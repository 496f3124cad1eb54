"""Attaching and removing: :func:`offload_optimizer`, :func:`remove_offload`, and questions about any optimizer."""

import functools
import warnings
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, TypeVar

from torch import nn
from torch.optim import Optimizer

from ..core.engine import Engine, find_offloaded
from ..core.hooks import group_numbers, hook_model
from ..core.whole import WholeEngine
from ..cpu_update.updates import HostUpdates
from ..measured import notes_of
from ..optimizers import capabilities_for
from ..policy import OffloadPolicy, as_policy
from ..report import OffloadReport
from ..state.layout import is_trained
from ..state.mapping import OffloadedState
from .attachment import attached, attachment_of, states_of, unwrap, wrappers_around
from .chain import offload_each
from .checks import (
    as_whole,
    check_attachable,
    check_capabilities,
    check_divisible,
    check_model,
    check_no_other_updates,
    check_params,
    check_streamable,
    names_of_parameters,
    options_without_effect,
)
from .offloaded_class import attach, detach
from .optimizer import OffloadedOptimizer
from .wrapped import is_wrapped, optimizers_in
from .wrong_order import check_at_first_forward, note_if_unsharded, warn_if_another_steps

_Optimizer = TypeVar("_Optimizer", bound=Optimizer)


def offload_optimizer(
    optimizer: _Optimizer,
    *,
    model: nn.Module | None = None,
    policy: OffloadPolicy | Mapping[str, Any] | None = None,
    exist_ok: bool = False,
    trust_separable: bool = False,
) -> _Optimizer:
    """Keep the state of ``optimizer`` in host memory from now on, and stream it through the device in each step.

    In place, like ``fully_shard``: the optimizer stays the same object, an instance of its own class as before and of
    :class:`OffloadedOptimizer`. Results stay the same bit for bit. Call it once the model is sharded and the optimizer
    built, before or after the first step, before or after making LR schedulers. Takes the host memory for all state at
    once. No collective of its own.

    A class that is not in ``fsdp_offload/optimizers/table.toml`` moves as a whole: all of its state is loaded before
    its own plain ``step()`` and stored after it. So any optimizer gives the same bits, LBFGS with its closures
    included, and all of its state is on the device during ``step()``. Host memory is taken when it has made its state.

    The tensors in ``optimizer.state`` become tensors over host memory: DTensors with the mesh and placements of theirs
    for sharded parameters. Reading them through ``optimizer.state`` waits until they are up to date; a tensor fetched
    earlier is valid until the next ``step()``.

    Args:
        optimizer: any except ``torch.optim.SparseAdam``. The wrappers of accelerate, Lightning and Fabric are seen
            through, and so are Megatron's optimizers and chains of them: each of torch's in there is offloaded, or
            none.
        model: the model whose parameters it has. Gives the order of the buckets, names for messages,
            more checks, and, where it is sharded by ``fully_shard``, the backward in which loads begin.
        policy: what is offloaded, how much of it may be on the device, and what hides its transfers; a dict has the
            fields of :class:`OffloadPolicy`. An option that has no effect is warned of.
        exist_ok: do nothing where it is offloaded already, for the same model and with the same policy: for code that
            runs once for each fit. Without ``policy``, whatever that is.
        trust_separable: of a class that is not in the table, that each element's update depends on that element alone
            and draws no random numbers: its step runs bucket by bucket, on ranges of local tensors, as those of Adam
            do. Nothing checks it but the shapes of its state. No effect on classes that are in the table; those of
            other libraries than torch's are updated parameter by parameter then, as their rows say.

    Returns:
        ``optimizer``.

    Raises:
        ValueError: it cannot be offloaded exactly; says why.
        RuntimeError: it is offloaded already, or a CUDA graph is being captured.
        MemoryError: host memory does not suffice.
    """
    given = None if policy is None else as_policy(policy)
    if is_wrapped(optimizer):
        each = functools.partial(
            offload_optimizer, model=model, policy=given, exist_ok=exist_ok, trust_separable=trust_separable
        )
        offload_each(optimizer, each, remove_offload, None if given is None else given.host_limit_bytes)
        return optimizer
    policy = as_policy(given)
    check_model(model)
    *wrappers, target = wrappers_around(optimizer)
    if exist_ok and attachment_of(target) is not None:
        _check_same(target, model, given)
        return optimizer
    check_attachable(target)
    params = [param for group in target.param_groups for param in group["params"]]
    names = names_of_parameters(target, model)
    capabilities = capabilities_for(target, trust=trust_separable)
    check_capabilities(target, capabilities, policy)
    if capabilities.moves_whole:
        if policy.overlap != "step":
            warnings.warn(
                f"offload_optimizer: overlap={policy.overlap!r} has no effect on {type(target).__name__}, which is not "
                "in the table of optimizers and moves as a whole, in step().",
                stacklevel=2,
            )
        policy = as_whole(policy)
    else:
        check_divisible(target)
    device = check_params(capabilities, params, names, on_host=policy.parameters)
    check_no_other_updates(params, names, policy)
    if policy.pin_memory and device.type == "cpu":
        raise ValueError(
            "offload_optimizer: pin_memory=True needs an accelerator, and the parameters are on the CPU. Leave it "
            "None, which pins where that is of use."
        )
    together = group_numbers(model, policy)
    if policy.parameters:
        check_streamable(model, names)
    host = HostUpdates(type(target), capabilities, policy, device) if policy.host_fraction else None
    kind = WholeEngine if capabilities.moves_whole else Engine
    engine = kind(type(target), capabilities, policy, device, names, together, host)
    states = OffloadedState(engine, target.state)
    # A frozen parameter gets room when it first has a gradient: reserving it would pin memory that nothing uses.
    eager = capabilities.conventions.state_without_gradient
    planned = {param for param in params if eager or is_trained(param) or target.state.get(param)}
    # Optimizers that draw random numbers do it parameter by parameter: only the group's order repeats theirs.
    order = params
    if capabilities.elementwise:
        # As a forward needs them.
        order = list(dict.fromkeys([*(param for param in together if param in names), *names]))
    engine.add(target, [param for param in order if param in planned], states.unwaited)
    attachment = attach(target, engine, states, model, wrappers)
    try:
        attachment.hooks = hook_model(model, target, engine, lambda of: states_of(of).unwaited)
        # Until the first step, a framework may still exchange the parameters or the optimizer.
        attachment.until_first_step.append(warn_if_another_steps(target))
        if model is not None and (check := check_at_first_forward(model, attachment)) is not None:
            attachment.until_first_step.append(check)
    except BaseException:
        remove_offload(target)
        raise
    engine.has_left_device()
    engine.take_staging()
    groups = len({together[param] for param in names if param in together})
    for note in filter(None, (*notes_of(engine), *options_without_effect(engine, groups), note_if_unsharded(params))):
        warnings.warn(f"offload_optimizer: {note}", stacklevel=2)
    return optimizer


def is_offloaded(optimizer: Optimizer) -> bool:
    """Return whether :func:`offload_optimizer` was called for ``optimizer``, or for those that a framework wraps."""
    if is_wrapped(optimizer):
        return all(attachment_of(inner) is not None for inner in optimizers_in(optimizer))
    return find_offloaded(optimizer) is not None


def offload_report(optimizer: Optimizer) -> OffloadReport:
    """Report as :meth:`OffloadedOptimizer.offload_report` does, through any framework's wrapper.

    Raises:
        RuntimeError: it is not offloaded, or a chain of several, each of which has a report of its own.
    """
    return _offloaded(optimizer, "offload_report").offload_report()


def synchronize(optimizer: Optimizer) -> None:
    """Do what :meth:`OffloadedOptimizer.synchronize` does, through any framework's wrapper; of a chain, all of it.

    Nothing where it is not offloaded: a plain optimizer has nothing under way.
    """
    for inner in optimizers_in(optimizer) if is_wrapped(optimizer) else [optimizer]:
        target = find_offloaded(inner)
        if isinstance(target, OffloadedOptimizer):
            target.synchronize()


def remove_offload(optimizer: _Optimizer) -> _Optimizer:
    """Undo :func:`offload_optimizer`: a plain optimizer again, all state on the device, host memory freed.

    Schedulers and hooks go on working, whenever they were made. Needs device memory for the whole state.

    Raises:
        RuntimeError: it is not offloaded, or an exception has left its state half updated.
    """
    if is_wrapped(optimizer):
        for inner in optimizers_in(optimizer):
            remove_offload(inner)
        return optimizer
    target = unwrap(optimizer)
    attachment = attachment_of(target)
    if attachment is None:
        raise RuntimeError(f"remove_offload: this {type(target).__name__} is not offloaded.")
    engine = attachment.engine
    engine.steps.check_usable("remove_offload()")
    attachment.parked.bring_back()
    states = states_of(target)
    engine.return_to_device(states.unwaited)
    detach(target, attachment)
    target.state = defaultdict(dict, states)
    engine.clear()
    return optimizer


def _check_same(optimizer: Optimizer, model: nn.Module | None, policy: OffloadPolicy | None) -> None:
    """Refuse to leave an offload as it is where the second call asks for another one."""
    attachment, other = attached(optimizer), []
    if policy is not None and attachment.engine.layouts.capabilities.moves_whole:
        policy = as_whole(policy)
    if policy is not None and policy != attachment.engine.policy:
        other.append(f"with {attachment.engine.policy}")
    if model is not None and (attachment.model is None or attachment.model() is not model):
        other.append("without a model" if attachment.model is None else "for another model")
    if other:
        raise RuntimeError(
            f"offload_optimizer: this optimizer is offloaded already, {' and '.join(other)}. Call remove_offload() "
            "first."
        )


def _offloaded(optimizer: Optimizer, function: str) -> OffloadedOptimizer:
    several = optimizers_in(optimizer) if is_wrapped(optimizer) else []
    if len(several) > 1:
        raise RuntimeError(
            f"{function}: this {type(optimizer).__name__} has {len(several)} optimizers, each of which has its own. "
            "Give them one by one, as in chained_optimizers."
        )
    target = find_offloaded(several[0] if several else optimizer)
    if target is None:
        raise RuntimeError(
            f"{function}: this {type(unwrap(optimizer)).__name__} is not offloaded. Call offload_optimizer() first; of "
            "a container of several optimizers, give each of them."
        )
    assert isinstance(target, OffloadedOptimizer)
    return target
