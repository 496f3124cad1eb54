"""Runs the user's optimizer on one bucket: binds its ranges, has a divided step update them, and commits the rest.

The step sees the ranges as parameters, and the bucket's place as their state. 0-dim tensors and numbers of a parameter
(``step``) stay where the optimizer put them: each range of a cut parameter starts from the same value, and the last one
commits it.
"""

import itertools
import operator
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeGuard

import torch
from torch import Tensor

from ..fsdp.dtensor import has_inner_tensors, local_shard
from ..state.layout import forms_of, leaves_of
from ..state.shard import StateShard
from ..state.store import StateStore, UserState
from .divided_step import DividedStep
from .masters import MASTER, let_weights_win

# What the optimizer sees ----------------------------------------------------------------------------------------------


@dataclass(eq=False)
class BoundRange:
    """A range of a shard, bound to the tensors that the optimizer sees while the range is on the device."""

    shard: StateShard
    start: int
    stop: int
    param: Tensor  # the parameter itself, or an alias of its local tensor, flat for a range of a cut shard
    values: dict[str, Tensor]  # the state tensors in the place, by name
    last: bool  # no later range of the same shard follows: this one commits the parameter's scalars
    address: int  # of the local shard when it was bound; another one means that the storage was exchanged
    gradient: Tensor | None = None  # for the next update
    is_alias: bool = field(init=False)  # ``param`` is not the user's tensor, and is handed its gradient

    def __post_init__(self) -> None:
        self.is_alias = self.param is not self.shard.param

    def has_moved(self) -> bool:
        """Return whether the local shard has other memory than when it was bound."""
        return local_shard(self.shard.param).data_ptr() != self.address

    def move_to(self, memory: Tensor, weights_at: Callable[[Tensor, int, int], Tensor | None]) -> bool:
        """Move to another place, ``memory`` of the same layout; return whether that was possible.

        ``weights_at``: the range of a parameter on the device, if its home is on the host.
        """
        if self.has_moved() or not self.shard.on_locals:
            return False
        for value in self.values.values():
            value.set_(memory.untyped_storage(), value.storage_offset(), value.shape, value.stride())
        weights = weights_at(self.shard.param, self.start, self.stop)
        if weights is not None:
            self.param.set_(weights.untyped_storage(), weights.storage_offset(), weights.shape, weights.stride())
        return True

    def part_of(self, grad: Tensor | None) -> Tensor | None:
        if grad is None or not self.shard.on_locals:
            return grad
        local = local_shard(grad)
        if self.start == 0 and self.last:
            return local
        if local.is_contiguous():
            return local.as_strided((self.stop - self.start,), (1,), local.storage_offset() + self.start)
        return local.reshape(-1)[self.start : self.stop]


def place_values(
    shard: StateShard, start: int, stop: int, memory: Tensor, offsets: Sequence[int], *, apart: bool
) -> dict[str, Tensor]:
    """Return state tensors of elements ``[start, stop)`` of ``shard`` over flat ``memory``, with leaves at ``offsets``.

    ``apart``: each tensor has its own storage, at storage offset 0, as without offload. torch.compile refuses to update
    several views of one storage through a tensor subclass, and a DTensor mirrors its local tensor's storage offset.
    """
    whole, leaves = stop - start == shard.local_numel, []
    for offset, layout in zip(offsets, shard.leaf_layouts, strict=True):
        nbytes = layout.nbytes if whole else (stop - start) * layout.dtype.itemsize
        flat = memory[offset : offset + nbytes]
        if apart:
            flat = torch.utils.dlpack.from_dlpack(flat) if nbytes else torch.empty_like(flat)
        typed = flat.view(layout.dtype)
        leaves.append(typed.as_strided(layout.shape, layout.stride) if whole else typed)
    if shard.on_locals:
        return dict(zip(shard.layout.values, leaves, strict=True))
    return shard.home_over(leaves).values


# One update -----------------------------------------------------------------------------------------------------------


def update_bucket(step: DividedStep, ranges: Sequence[BoundRange], user_states: StateStore) -> None:
    """Run the optimizer on the ranges of one bucket; copy new state into the place, and note it in ``user_states``.

    Runs on the current stream, with the gradients of the ranges. Those without one are left out, unless a first step
    creates their state, and so are parameters that the user has taken out of their group.

    An optimizer that sees DTensors has to meet parameters in the same order on every rank, as its step may issue
    collectives. A step meets them group by group, but this rank's sizes decide which shards share a bucket. So each
    step of such an optimizer has parameters of one group only.
    """
    eager, apart = step.conventions.state_without_gradient, step.conventions.group_by_group
    updated = [one for one in ranges if one.shard.group >= 0 and (eager or one.gradient is not None)]
    groups = [one.shard.group if apart or not one.shard.on_locals else None for one in updated]
    for _, run in itertools.groupby(zip(groups, updated, strict=True), operator.itemgetter(0)):
        _update_together(step, [one for _, one in run], user_states)


def _update_together(step: DividedStep, together: Sequence[BoundRange], user_states: StateStore) -> None:
    conventions, by_param = step.conventions, step.by_param
    params: defaultdict[int, list[Tensor]] = defaultdict(list)
    state: dict[Tensor, UserState] = {}
    existing = [user_states.get(bound.shard.param) for bound in together]
    for bound, user_state in zip(together, existing, strict=True):
        master = bound.values.get(MASTER) if user_state.get(MASTER) is not None else None
        if master is not None and not conventions.weights_win and not has_inner_tensors(bound.param):
            let_weights_win(local_shard(bound.param).detach(), local_shard(master))
        if bound.is_alias:
            conventions.hand_gradient(bound.param, bound.gradient)
        params[bound.shard.group].append(bound.param)
        if user_state:  # the shadow sees the place, and the user's counters, copied if a later range needs them
            place, own = bound.values, dict(user_state)
            own |= {name: place[name] for name, value in own.items() if name in place and value is not None}
            state[bound.param] = own
    _copy_counters(together, state)
    seen = {
        name: {bound.param: real[bound.shard.param] for bound in together if bound.shard.param in real}
        for name, real in by_param.items()
    }
    try:
        after = step.run(params, state, seen)
    finally:
        for bound in together:
            if bound.is_alias:
                conventions.hand_gradient(bound.param, None)
    for bound, user_state in zip(together, existing, strict=True):
        for name, values in seen.items():
            if bound.param in values:
                by_param[name][bound.shard.param] = values[bound.param]
        result = after.get(bound.param)
        if result is not None:
            result = conventions.without_dispensable(bound.param, result)
            _commit(bound, result, user_state or user_states.of(bound.shard.param))


def _copy_counters(ranges: Iterable[BoundRange], state: Mapping[Tensor, UserState]) -> None:
    """Copy counters that a later range of the parameter starts from, too: in one call, as each costs the host time."""
    copies, counters = list[Tensor](), list[Tensor]()
    for one in ranges:
        own = state.get(one.param, {}) if not one.last else {}
        for name, value in own.items():
            if name not in one.values and _is_counter(value):
                own[name] = torch.empty_like(value)
                copies.append(own[name])
                counters.append(value)
    if copies:
        torch._foreach_copy_(copies, counters)


def _is_counter(value: object) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and value.numel() == 1


def _commit(bound: BoundRange, after: UserState, user_state: UserState) -> None:
    for name, place in bound.values.items():
        value = after.get(name)
        if value is None or value is place:
            continue
        is_now, expected = forms_of(value), forms_of(place)  # the optimizer has just created it, or replaced it
        if is_now != expected:
            raise RuntimeError(
                f"state {name!r} of {bound.shard.name} was expected as {expected} and is now {is_now}; hyperparameters "
                "that change the layout of the state must be changed before step()."
            )
        for source, target in zip(leaves_of(value), leaves_of(place), strict=True):
            if source is not target:
                target.copy_(source)
    if bound.last:
        for name in user_state.keys() - after.keys():
            del user_state[name]
        homes = bound.shard.homes
        for name, value in after.items():
            user_state[name] = homes[name] if name in bound.values else value
        return
    if after.keys() == user_state.keys():
        return
    for name in after.keys() - bound.values.keys() - user_state.keys():
        if isinstance(after[name], Tensor) and not _is_counter(after[name]):
            raise RuntimeError(
                f"state {name!r} of {bound.shard.name} appeared in a step, was not there when the optimizer was "
                "attached, and cannot be divided; attach again with remove_offload() and offload_optimizer()."
            )
