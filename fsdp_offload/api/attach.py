"""Attaching and removing: :func:`offload_optimizer`, :func:`remove_offload`, :func:`add_masters`, and queries."""

import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Never, TypeVar, get_args

import torch
from torch import nn
from torch.optim import Optimizer

from ..cpu_update import HostUpdates
from ..engine.engine import Engine, states_of
from ..engine.hooks import group_numbers, hook_model
from ..engine.whole import WholeEngine
from ..fsdp.fully_shard import parameter_names
from ..fsdp.gradients import let_foreach
from ..model.sleep import ParkedParameters, owns_its_storage
from ..optimizers import capabilities_for
from ..optimizers.divided_step import ENGINE_ATTRIBUTE
from ..optimizers.masters import MasterKind, WithMasters, class_with_masters, has_master, widen_state
from ..optimizers.transformer_engine import keep_unread_masters
from ..policy import OffloadPolicy, as_policy, check_choices, check_is, listed, tells
from ..state.layout import is_trained, params_of
from ..state.store import OffloadedState
from . import checks
from .optimizer import OffloadedOptimizer, offloaded_class
from .report import OffloadReport, notes_of
from .wrapped import (
    IF_NOT,
    Attachment,
    attached,
    attachment_of,
    holders_in,
    masters_in,
    offloaded,
    optimizers_in,
    redirect_captured_step,
    saves_all_masters,
    unwrap,
    wrappers_around,
)

_Optimizer = TypeVar("_Optimizer", bound=Optimizer)


def offload_optimizer(
    optimizer: _Optimizer,
    *positional: Never,
    model: nn.Module | None = None,
    policy: OffloadPolicy | Mapping[str, Any] | None = None,
    exist_ok: bool = False,
    trust_separable: bool = False,
    **misplaced: Never,
) -> _Optimizer:
    """Keep the state of ``optimizer`` in host memory from now on, and stream it through the device in each step.

    In place, like ``fully_shard``: the optimizer stays the same object, an instance of its own class as before and of
    :class:`OffloadedOptimizer`. Results stay the same bit for bit. Call it once the model is sharded and the optimizer
    built, before or after the first step, before or after making LR schedulers. Takes the host memory for all state at
    once. No collective of its own.

    A class that is not in ``fsdp_offload/optimizers/table.toml`` moves as a whole: all of its state is loaded before
    its own plain ``step()`` and stored after it. Its host memory is taken once the optimizer has created state.

    The tensors in ``optimizer.state`` become tensors over host memory; for sharded parameters, DTensors with the
    parameter's mesh and placements. Reading them through ``optimizer.state`` waits until they are up to date; a tensor
    fetched earlier is valid until the next ``step()``.

    Args:
        optimizer: any except ``torch.optim.SparseAdam``, ``Adafactor`` on sharded parameters, and an optimizer that
            wraps another: give the inner one. Wrappers of accelerate, Lightning and Fabric are seen through. Inside
            Megatron's optimizers and chains, all of torch's optimizers are offloaded, or none.
        model: the model that has the optimizer's parameters. Sets the order of the buckets, gives names for messages,
            and allows more checks. If ``fully_shard`` has sharded it, loads begin in its backward.
        policy: what is offloaded, how much of it may be on the device, and what hides its transfers; a dict has the
            fields of :class:`OffloadPolicy`. An option that has no effect is warned of.
        exist_ok: do nothing if ``optimizer`` is offloaded already with the same model and policy; a model or policy
            that is not given counts as the same. For code that runs once for each fit.
        trust_separable: promise that each element's update depends on that element alone and draws no random numbers.
            The step of a class that is not in the table then runs bucket by bucket, as Adam's does; a class that the
            table lists for another library runs parameter by parameter. Only the shapes of the state, and changes
            outside of the state, are checked. The policy has a field of the same name and meaning.
        positional: refused.
        misplaced: refused, such as fields of the policy; the error has the line to write.

    Returns:
        ``optimizer``.

    Raises:
        ValueError: ``optimizer`` cannot be offloaded exactly, or the policy has an unknown field or value; says why.
        TypeError: ``optimizer`` is no optimizer, ``__slots__`` or a base in C fix the layout of its class, or an
            argument is of another type.
        RuntimeError: ``optimizer`` is offloaded already, or a CUDA graph is being captured.
        MemoryError: host memory does not suffice.
    """
    checks.refuse_misplaced(positional, misplaced)
    check_choices("offload_optimizer", exist_ok=exist_ok, trust_separable=trust_separable)
    given, policy = None if policy is None else as_policy(policy), as_policy(policy)
    if holders_in(optimizer):
        again = partial(offload_optimizer, model=model, policy=given, exist_ok=exist_ok)
        _offload_each(optimizer, partial(again, trust_separable=trust_separable), policy)
        return optimizer

    # Check the optimizer, its parameters and its model.
    *wrappers, target = wrappers_around(optimizer)
    line = "offload_optimizer(optimizer, model=model)"
    check_is(model, nn.Module | None, "offload_optimizer: model must be a torch.nn.Module", line)
    check_is(target, Optimizer, "offload_optimizer: expected a torch.optim.Optimizer", line)
    if attachment_of(target) is not None:
        _check_same(target, model, given, exist_ok)
        return optimizer
    params, names = params_of(target), checks.names_by_place(target)
    if model is not None:
        checks.refuse(checks.wrong_with_model(model, names))
        names = {param: name for param, name in parameter_names(model).items() if param in names}  # in bucket order
    capabilities = capabilities_for(target, trust=trust_separable or policy.trust_separable)
    checks.refuse(checks.wrong_with_optimizer(target, capabilities, policy))
    if capabilities.moves_whole:
        if policy.overlap != "step":
            whole = f"has no effect on {type(target).__name__}, which moves as a whole, in step()"
            warnings.warn(f"offload_optimizer: overlap={policy.overlap!r} {whole}.", stacklevel=2)
        policy = replace(policy, overlap="step")
    device = checks.device_of(params, names, capabilities, policy)
    checks.check_no_other_updates(params, names, policy)
    together = group_numbers(model, policy)
    if policy.parameters:
        checks.refuse(checks.wrong_to_stream(target, capabilities, model, names))

    cls = type(target)
    made = offloaded_class(cls)  # type: ignore[arg-type]  # a class has a hash

    # Make homes for its state.
    host = HostUpdates(cls, capabilities, policy, device) if policy.host_fraction else None
    kind = WholeEngine if capabilities.moves_whole else Engine
    engine = kind(cls, capabilities, policy, device, names, together, host)
    states = OffloadedState(engine, target.state)
    # Elementwise optimizers update in the order in which a forward needs the parameters. Others keep the order of the
    # groups: they may draw random numbers parameter by parameter.
    gathered = [param for param in together if param in names]
    order = list(dict.fromkeys([*gathered, *names])) if capabilities.elementwise else params
    # A frozen parameter gets a home with its first gradient: reserving one would pin unused memory.
    eager = capabilities.conventions.state_without_gradient
    engine.add(target, [one for one in order if eager or is_trained(one) or target.state.get(one)], states.unwaited)

    # Turn it into an OffloadedOptimizer.
    target.__class__ = made
    target.state = states
    attachment = Attachment(engine, None if model is None else weakref.ref(model))
    vars(target)[ENGINE_ATTRIBUTE] = attachment
    attachment.undo += redirect_captured_step(target, cls.step, made.step, wrappers)
    attachment.undo.append(target.register_step_pre_hook(checks.refuse_bypass).remove)
    offloaded.add(target)
    try:
        attachment.hooks = hook_model(model, target, engine)
        checks.watch_steps(attachment, model)
        engine.take_all_blocks()
    except BaseException:
        remove_offload(target)
        raise
    groups = len({together[param] for param in gathered})
    for note in (*notes_of(engine), *checks.options_without_effect(engine, groups)):
        warnings.warn(f"offload_optimizer: {note}", stacklevel=2)
    return optimizer


def remove_offload(optimizer: _Optimizer) -> _Optimizer:
    """Undo :func:`offload_optimizer`: a plain optimizer again, all state on the device, host memory freed.

    Schedulers and hooks go on working, whenever they were made. Needs device memory for the whole state.

    Raises:
        TypeError: ``optimizer`` is no optimizer, holds none, and is no list of optimizers.
        RuntimeError: it is not offloaded, a step of it is running, or an exception has left its state half updated.
    """
    targets = optimizers_in(optimizer, "remove_offload")
    for target in targets:
        if (attachment := attachment_of(target)) is None:
            raise RuntimeError(f"remove_offload: this {type(target).__name__} is not offloaded; {IF_NOT}.")
        if attachment.stepping:
            raise RuntimeError("remove_offload: a step is running, as inside of a closure. Call it between two steps.")
        attachment.engine.check_usable("remove_offload()")
    for target in targets:
        attachment = attached(target)
        engine = attachment.engine
        attachment.parked.bring_back()
        states = states_of(target)
        engine.return_to_device(states.unwaited)
        if attachment.hooks is not None:
            attachment.hooks.remove()
        for undo in attachment.undo:
            undo()
        del vars(target)[ENGINE_ATTRIBUTE]
        offloaded.discard(target)
        target.__class__ = engine.cls
        target.state = defaultdict(dict, states)
        engine.clear()
    if not offloaded:
        let_foreach(False)
    return optimizer


def is_offloaded(optimizer: Optimizer | Sequence[Optimizer]) -> bool:
    """Return whether :func:`offload_optimizer` was called for ``optimizer``, or for all in a wrapper or a list.

    Raises:
        TypeError: ``optimizer`` is no optimizer, holds none, and is no list of optimizers.
    """
    return all(attachment_of(one) is not None for one in optimizers_in(optimizer, "is_offloaded"))


def offload_report(optimizer: Optimizer) -> OffloadReport:
    """Report as :meth:`OffloadedOptimizer.offload_report` does, through any framework's wrapper.

    Raises:
        TypeError: ``optimizer`` is no optimizer and holds none.
        RuntimeError: ``optimizer`` is not offloaded, or is a chain of several: ask for a report of each.
    """
    found = optimizers_in(optimizer, "offload_report")
    if len(found) != 1 or not isinstance(found[0], OffloadedOptimizer):
        several = f"holds {len(found)} optimizers; give one at a time, as in chained_optimizers"
        problem = several if len(found) != 1 else f"is not offloaded; {IF_NOT}"
        raise RuntimeError(f"offload_report: this {type(unwrap(optimizer)).__name__} {problem}.")
    return found[0].offload_report()


def synchronize(optimizer: Optimizer | Sequence[Optimizer]) -> None:
    """Call :meth:`OffloadedOptimizer.synchronize` through any framework's wrapper; of each in a chain or list.

    Optimizers that are not offloaded are skipped: they have no work under way.

    Raises:
        TypeError: ``optimizer`` is no optimizer, holds none, and is no list of optimizers.
    """
    for target in optimizers_in(optimizer, "synchronize"):
        if isinstance(target, OffloadedOptimizer):
            target.synchronize()


def _offload_each(optimizer: Any, offload: Callable[[Optimizer], object], policy: OffloadPolicy) -> None:
    """Offload all optimizers inside Megatron's or a chain, or none; let fp32 masters leave the device with state."""
    held = holders_in(optimizer)
    for holder in held.values():
        checks.refuse(checks.wrong_with_holder(holder))
    for inner in (inner for inner, holder in held.items() if saves_all_masters(holder)):
        keep_unread_masters(inner)
    new = {inner: holder for inner, holder in held.items() if attachment_of(unwrap(inner)) is None}
    try:
        for inner in held:
            offload(inner)
    except BaseException:
        for inner in filter(is_offloaded, reversed(new)):
            remove_offload(inner)
        raise
    for inner, holder in new.items():
        if own := list(filter(owns_its_storage, masters_in(holder, inner))):
            attached(unwrap(inner)).parked = ParkedParameters(own, policy.host_limit_bytes)


def _check_same(optimizer: Optimizer, model: nn.Module | None, policy: OffloadPolicy | None, exist_ok: bool) -> None:
    """Raise if a second call asks for another offload than the existing one, or lacks ``exist_ok``."""
    attachment = attached(optimizer)
    engine, known = attachment.engine, None if attachment.model is None else attachment.model()
    if policy is not None and engine.layouts.capabilities.moves_whole:
        policy = replace(policy, overlap="step")
    if not exist_ok or policy not in (None, engine.policy) or model not in (None, known):
        which = "without a model" if known is None else "for this model" if model in (None, known) else "for another"
        raise RuntimeError(
            f"offload_optimizer: this optimizer is offloaded already, {which}, with {engine.policy}. exist_ok=True "
            "accepts the same again. For another offload call remove_offload() first, or say in one place of the "
            f"script what you want: {checks.RIGHT_ORDER}."
        )


# Masters --------------------------------------------------------------------------------------------------------------


@tells("add_masters(optimizer, kind)")
def add_masters(optimizer: _Optimizer, kind: MasterKind = "remainder") -> _Optimizer:
    """Update fp32 masters of bf16 and fp16 parameters from now on, and round the parameters from them.

    In place: the optimizer stays the same object and an instance of its class. Results are bitwise those of the same
    optimizer on an fp32 copy of the model that receives the same gradients, rounded. ``optimizer.state[param]`` has one
    tensor more, ``"master_param"``, of the parameter's shape and sharding, and its other tensors are fp32.

    Works with and without :func:`offload_optimizer`; add masters first. Existing state is widened to fp32, and masters
    start at the parameters' values. Weights that you write into parameters win over fp32 masters; with remainders, the
    lower 16 bits stay. A second call with the same ``kind`` changes nothing.

    Args:
        optimizer: an elementwise one of ``torch.optim``; the wrappers of accelerate, Lightning and Fabric are seen
            through.
        kind: ``"fp32"`` keeps whole masters, and rounds to nearest, ties to even. ``"remainder"`` keeps only the 16
            bits that a bf16 parameter does not have, as int16, and rounds ties away from zero.

    Returns:
        ``optimizer``.

    Raises:
        TypeError: ``optimizer`` is not an optimizer of torch.
        ValueError: the class cannot be run on masters or has its own, ``"remainder"`` was asked for fp16, or ``kind``
            is something else.
        RuntimeError: the optimizer is offloaded without masters, or has masters of the other kind.
    """
    if kind not in get_args(MasterKind):
        raise ValueError(f"add_masters: kind must be one of {get_args(MasterKind)}, got {kind!r}")
    *wrappers, target = (optimizer,) if holders_in(optimizer) else wrappers_around(optimizer)
    if isinstance(target, WithMasters) and target.master_kind == kind:
        return optimizer
    _check_masters(target, kind)
    if not any(map(has_master, params_of(target))):
        warnings.warn(
            "add_masters has no effect: no parameter is bf16 or fp16, and fp32 parameters are their own masters. Leave "
            "it out, or call model.to(torch.bfloat16) before the optimizer is built.",
            stacklevel=3,
        )
    plain: Any = type(target)
    target.__class__ = class_with_masters(plain, kind)
    assert isinstance(target, WithMasters)
    redirect_captured_step(target, plain.step, type(target).step, wrappers)
    target.register_step_pre_hook(checks.refuse_bypass)
    widen_state(target)
    return optimizer


def _check_masters(optimizer: Optimizer, kind: MasterKind) -> None:
    name = type(optimizer).__name__
    says = "add_masters: expected a torch.optim.Optimizer"
    check_is(optimizer, Optimizer, says, "add_masters(optimizer); Megatron's have masters already")
    if isinstance(optimizer, WithMasters):
        had = f"this {name} has masters already, of kind {optimizer.master_kind!r}"
        raise RuntimeError(f"add_masters: {had}. Ask for that kind, or build another optimizer.")
    if attachment_of(optimizer) is not None:
        raise RuntimeError(
            f"add_masters: this {name} is offloaded already, without masters. Add them first:\n"
            f"    add_masters(optimizer, {kind!r})\n"
            "    offload_optimizer(optimizer, model=model)\n"
            "After training has begun, call remove_offload(optimizer) before these lines."
        )
    if not capabilities_for(optimizer).takes_masters:
        raise ValueError(
            f"add_masters is for the elementwise optimizers of torch.optim, and {name} is not one of them, or has "
            "parameters that are made of several tensors. Shard an fp32 model with "
            "MixedPrecisionPolicy(param_dtype=torch.bfloat16) instead."
        )
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise ValueError("add_masters: autograd cannot follow a rounded update. Build it without differentiable=True.")
    fp16 = [name for param, name in checks.names_by_place(optimizer).items() if param.dtype is torch.float16]
    if kind == "remainder" and fp16:
        raise ValueError(
            "add_masters: 'remainder' is for bf16, whose 16 bits are the upper ones of fp32; "
            f"{len(fp16)} parameters are fp16 ({listed(fp16)}). Use 'fp32'."
        )
