"""Runs the user's own optimizer on one bucket.

The optimizer's class is given a *shadow*: an instance that the user never sees, with the live hyperparameters and
attributes of the real one, whose parameters are this bucket's and whose state is the bucket's slot. What a step changes
beside parameters and state tensors is collected and handed back once for the whole step:

- 0-dim tensors and numbers of a parameter (``step``): each range of a cut parameter starts from the same value;
- values of a param group (``group["k"]``) and of the optimizer object: each bucket starts from the same value, and all
  must end at the same (:mod:`shared_values`).
"""

import itertools
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeGuard

from torch import Tensor
from torch.optim import Optimizer

from ..fsdp.dtensor import has_inner_tensors, local_shard, over_local, version_of
from ..fsdp.optim import no_global_step_hooks, plain_step_of
from ..state.layout import leaves_of
from ..state.shard import StateShard
from ..state.store import StateStore, UserState
from . import Conventions
from .masters import MASTER, is_only_copy, let_weights_win
from .shared_values import SharedValues, instance_attributes

# What the optimizer sees ----------------------------------------------------------------------------------------------


@dataclass(eq=False)
class BoundRange:
    """A range of a shard, bound to what the optimizer sees while it is on the device."""

    shard: StateShard
    start: int
    stop: int
    param: Tensor  # the parameter itself, or an alias of its local tensor, flat for a range of a cut shard
    values: dict[str, Tensor]  # the state tensors in the slot, by name
    last: bool  # no later range of the same shard follows: this one commits the parameter's scalars
    address: int  # of the local shard when it was bound; another one means that the storage was exchanged
    gradient: Tensor | None = None  # what the next update uses

    def still_valid(self) -> bool:
        """Return whether the local shard is still the memory it was bound to."""
        return local_shard(self.shard.param).data_ptr() == self.address

    @property
    def is_alias(self) -> bool:
        """Return whether the optimizer sees another tensor than the user's, which has to be handed its gradient."""
        return self.param is not self.shard.param

    def part_of(self, grad: Tensor | None) -> Tensor | None:
        """Return the part of the parameter's gradient that the optimizer gets."""
        if grad is None or not self.shard.on_locals:
            return grad
        local = local_shard(grad)
        return local if self.start == 0 and self.last else local.reshape(-1)[self.start : self.stop]


def bind_range(
    shard: StateShard, start: int, stop: int, values: dict[str, Tensor], weights: Tensor | None = None
) -> BoundRange:
    """Bind the elements ``[start, stop)`` of ``shard`` to ``values``, its state tensors on the device.

    ``weights``: the parameter's own elements there, if it does not stay on the device.
    """
    local = local_shard(shard.param)
    last = stop == local.numel()
    if weights is not None:
        param = weights if shard.on_locals else over_local(shard.param, weights)
    elif not shard.on_locals or (start == 0 and last and local is shard.param):
        param = shard.param
    else:
        param = local.detach() if start == 0 and last else local.detach().view(-1)[start:stop]
    return BoundRange(shard, start, stop, param, values, last, local.data_ptr())


def slot_values(shard: StateShard, start: int, stop: int, take: Callable[[int, int], Tensor]) -> dict[str, Tensor]:
    """State tensors over the slot of the elements ``[start, stop)`` of ``shard``.

    ``take(leaf, nbytes)`` is a flat ``uint8`` tensor over the first ``nbytes`` bytes of that leaf's place.
    """
    whole = stop - start == shard.local_numel
    numbers = itertools.count()
    values = {}
    for name, value in shard.layout.values.items():
        parts = []
        for layout in value.leaves:
            nbytes = layout.nbytes if whole else (stop - start) * layout.dtype.itemsize
            typed = take(next(numbers), nbytes).view(layout.dtype)
            parts.append(typed.as_strided(layout.shape, layout.stride) if whole else typed)
        values[name] = parts[0] if shard.on_locals else value.build(parts)
    return values


# One update -----------------------------------------------------------------------------------------------------------


def step_shadow(
    cls: type[Optimizer],
    shared: SharedValues,
    params: Sequence[list[Tensor]],
    state: Mapping[Tensor, UserState],
    by_param: Mapping[str, dict[Tensor, Any]] | None = None,
    counting: Collection[int] | None = None,
    without_hooks: Callable[[], AbstractContextManager[None]] = no_global_step_hooks,
) -> dict[Tensor, UserState]:
    """Run the plain step of ``cls`` on ``params`` (a list for each group); returns the state after it, by parameter.

    ``shared`` collects what the step changes of hyperparameters and attributes. ``by_param`` overrides attributes that
    are dicts with parameters as keys; what the step adds is found there. ``counting`` is as for
    :meth:`SharedValues.groups_for`. Hooks for all optimizers do not fire ``without_hooks``.
    """
    shadow: Optimizer = object.__new__(cls)
    filled: defaultdict[Tensor, UserState] = defaultdict(dict, state)
    groups = shared.groups_for(params, counting)
    attributes = {**shared.attributes, **(by_param or {}), "param_groups": groups, "state": filled}
    # As if unpickled: makes the (empty) hook tables that step() may look at. It also writes into ``defaults``: not into
    # those of the real optimizer.
    Optimizer.__setstate__(shadow, {**attributes, "defaults": {}})
    shadow.__dict__.update(attributes)
    try:
        with without_hooks():  # a subclass's step may call a hooked one of its parent; the logical step has fired them
            plain_step_of(cls)(shadow, **shared.step.kwargs)
        keys: list[object] = list(shadow.state)
        foreign = [key for key in keys if not isinstance(key, Tensor)]
        if foreign:
            raise RuntimeError(
                "the optimizer keeps state of its own beside that of parameters "
                f"(optimizer.state[{foreign[0]!r}]); it cannot be divided among buckets"
            )
        shared.collect(shadow.param_groups, instance_attributes(shadow))
        return dict(shadow.state)
    finally:
        shadow.__dict__.clear()  # holds no gradient, no slot and no attribute beyond the step, whoever keeps it


def update_bucket(
    cls: type[Optimizer],
    shared: SharedValues,
    conventions: Conventions,
    ranges: Sequence[BoundRange],
    user_states: StateStore,
    without_hooks: Callable[[], AbstractContextManager[None]] = no_global_step_hooks,
) -> None:
    """Run the optimizer on the ranges of one bucket, and commit what it created into slot and ``user_states``.

    Runs on the current stream, with the gradients of the ranges. Those without one are left out, unless a first step
    creates their state, and so are parameters that the user has taken out of their group.

    An optimizer that sees DTensors has to meet parameters in the same order on every rank: its step may issue
    collectives and goes through its parameters group by group, while how many shards share a bucket depends on their
    sizes on this rank. So each step there has parameters of one group only.
    """
    eager, apart = conventions.state_without_gradient, conventions.group_by_group
    updated = [one for one in ranges if one.shard.group >= 0 and (eager or one.gradient is not None)]
    for _, run in itertools.groupby(updated, lambda one: one.shard.group if apart or not one.shard.on_locals else None):
        together = list(run)
        params = shared.lists()
        state: dict[Tensor, UserState] = {}
        existing = [user_states.get(bound.shard.param) for bound in together]
        for bound, user_state in zip(together, existing, strict=True):
            _follow_weights(bound, user_state, conventions)
            if bound.is_alias:
                conventions.hand_gradient(bound.param, bound.gradient)
            params[bound.shard.group].append(bound.param)
            if user_state:
                state[bound.param] = _in_slot(bound, user_state)
        by_param = {
            name: {bound.param: real[bound.shard.param] for bound in together if bound.shard.param in real}
            for name, real in shared.by_param.items()
        }
        try:
            after = step_shadow(cls, shared, params, state, by_param, without_hooks=without_hooks)
        finally:
            for bound in together:
                if bound.is_alias:
                    conventions.hand_gradient(bound.param, None)
        for bound, user_state in zip(together, existing, strict=True):
            for name, given in by_param.items():
                if bound.param in given:
                    shared.by_param[name][bound.shard.param] = given[bound.param]
            result = after.get(bound.param)
            if result is not None:
                result = conventions.without_dispensable(bound.param, result)
                _commit(bound, result, user_state or user_states.of(bound.shard.param))


def _follow_weights(bound: BoundRange, user_state: UserState, conventions: Conventions) -> None:
    master = None if conventions.weights_win else bound.values.get(MASTER)
    if master is not None and user_state.get(MASTER) is not None:
        param, slot = local_shard(bound.param).detach(), local_shard(master)
        if not has_inner_tensors(param) and is_only_copy(param, slot):
            let_weights_win(param, slot)


def _in_slot(bound: BoundRange, user_state: UserState) -> UserState:
    """Build the state that the shadow finds: the slot, and the user's scalars, copied if a later range needs them."""
    state = dict(user_state)
    for name, value in user_state.items():
        if name in bound.values and value is not None:
            state[name] = bound.values[name]
        elif not bound.last and _is_counter(value):  # tensors of any other size are the user's, and nobody writes them
            state[name] = value.clone()
    return state


def _is_counter(value: object) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and value.numel() == 1


def _commit(bound: BoundRange, after: UserState, user_state: UserState) -> None:
    for name, slot in bound.values.items():
        value = after.get(name)
        if value is not None and value is not slot:
            _fill_slot(bound, name, value)
    if bound.last:
        for name in user_state.keys() - after.keys():
            del user_state[name]
        for name, value in after.items():
            user_state[name] = bound.shard.homes[name] if name in bound.values else value
        return
    for name in after.keys() - bound.values.keys() - user_state.keys():
        if isinstance(after[name], Tensor) and not _is_counter(after[name]):
            raise RuntimeError(
                f"state {name!r} of {bound.shard.name} appeared in a step, was not there when the optimizer was "
                "attached, and cannot be divided; attach again with remove_offload() and offload_optimizer()."
            )


def _fill_slot(bound: BoundRange, name: str, value: Tensor) -> None:
    """Move state that the optimizer has just created (or exchanged for a new tensor) into the slot."""
    created, slot = leaves_of(value), leaves_of(bound.values[name])
    is_now, expected = ([(tuple(leaf.shape), leaf.dtype) for leaf in leaves] for leaves in (created, slot))
    if is_now != expected:
        raise RuntimeError(
            f"state {name!r} of {bound.shard.name} was expected as {expected} and is now {is_now}; hyperparameters "
            "that change the layout of the state must be changed before step()."
        )
    for source, target in zip(created, slot, strict=True):
        if source is not target:
            target.copy_(source)


class FirstUpdate:
    """What the first update of a step finds, to tell whether it has written anything by the time it fails.

    Its slot counts for nothing then. The rest is seen by versions, which kernels of torch count unless they are fused,
    but for counters: optimizers count before they compute.
    """

    def __init__(
        self,
        cls: type[Optimizer],
        shared: SharedValues,
        ranges: Sequence[BoundRange],
        states: StateStore,
        watched: Sequence[Tensor],
    ) -> None:
        """``watched``: tensors of state that must not have been written either."""
        fused = any(shared.group(number).get("fused") for number in {one.shard.group for one in ranges} - {-1})
        self._can_tell = cls.__module__.startswith("torch.optim.") and not fused
        seen = (*(bound.param for bound in ranges), *watched) if self._can_tell else ()
        self._seen = [(tensor, version_of(tensor)) for tensor in seen]
        self._counters = [
            (value, value.clone())
            for bound in ranges
            for name, value in (states.get(bound.shard.param) if self._can_tell else {}).items()
            if name not in bound.shard.homes and _is_counter(value)
        ]

    def undo(self) -> bool:
        """Put the counters back if nothing else was written, and return whether that is so."""
        if not self._can_tell or any(version_of(tensor) != version for tensor, version in self._seen):
            return False
        for value, before in self._counters:
            value.copy_(before)
        return True
