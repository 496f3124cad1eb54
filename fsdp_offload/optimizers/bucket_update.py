"""Runs the user's own optimizer on one bucket.

The optimizer's class is given a *shadow*: an instance that the user never sees, with the live hyperparameters and
attributes of the real one, whose parameters are this bucket's and whose state is the bucket's slot. What a step changes
beside parameters and state tensors is collected and handed back once for the whole step:

- 0-dim tensors and numbers of a parameter (``step``): each range of a cut parameter starts from the same value;
- values of a param group (``group["k"]``) and of the optimizer object: each bucket starts from the same value, and all
  must end at the same.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeGuard

from torch import Tensor

from ..state.layout import is_wrapper, leaves_of
from ..state.store import StateStore, UserState
from ..torch_compat.dtensor import local_shard, version_of
from . import Conventions
from .bound_range import BoundRange, local_range
from .masters import MASTER, is_only_copy, let_weights_win
from .shadow import Shadow
from .shared_values import SharedValues


def same_order_on_ranks(ranges: Sequence[BoundRange], *, group_by_group: bool = False) -> Iterator[list[BoundRange]]:
    """Divide a bucket so that an optimizer that sees DTensors meets parameters in the same order on every rank.

    Its step may issue collectives and goes through its parameters group by group, while how many shards share a bucket
    depends on their sizes on this rank. So each step there has parameters of one group only; with ``group_by_group``
    any step has.
    """
    together = not group_by_group
    for _, run in itertools.groupby(
        ranges, key=lambda bound: None if together and bound.shard.on_locals else bound.shard.group
    ):
        yield list(run)


def update_bucket(
    shadow: Shadow,
    shared: SharedValues,
    conventions: Conventions,
    ranges: Sequence[BoundRange],
    group_count: int,
    user_states: StateStore,
    kwargs: Mapping[str, Any],
) -> None:
    """Run the optimizer on the ranges of one bucket, and commit what it created into slot and ``user_states``.

    Runs on the current stream. Gradients are taken from the user's parameters and are not kept.
    """
    ranges = [bound for bound in ranges if bound.shard.group >= 0]  # the user may have taken others out of their group
    ranges = _with_gradient(ranges, conventions)
    if not ranges:
        return
    params: list[list[Tensor]] = [[] for _ in range(group_count)]
    state: dict[Tensor, UserState] = {}
    existing = [user_states.get(bound.shard.param) for bound in ranges]
    for bound, user_state in zip(ranges, existing, strict=True):
        _follow_weights(bound, user_state, conventions)
        if bound.is_alias:
            conventions.hand_gradient(bound.param, _gradient(bound, conventions))
        params[bound.shard.group].append(bound.param)
        if user_state:
            state[bound.param] = _in_slot(bound, user_state)
    by_param = _seen_by_param(shared, ranges)
    try:
        after = shadow.run(shared, params, state, kwargs, by_param)
    finally:
        for bound in ranges:
            if bound.is_alias:
                conventions.hand_gradient(bound.param, None)
    for name, given in by_param.items():
        for bound in ranges:
            if bound.param in given:
                shared.by_param[name][bound.shard.param] = given[bound.param]
    for bound, user_state in zip(ranges, existing, strict=True):
        result = after.get(bound.param)
        if result is not None:
            result = conventions.without_dispensable(bound.param, result)
            _commit(bound, result, user_state or user_states.of(bound.shard.param))


class FirstUpdate:
    """What the first update of a step finds, to tell whether it has written anything by the time it fails.

    Its slot counts for nothing then. The rest is seen by versions, which kernels of torch count unless they are fused,
    but for counters: optimizers count before they compute.
    """

    def __init__(
        self,
        shadow: Shadow,
        shared: SharedValues,
        ranges: Sequence[BoundRange],
        states: StateStore,
        watched: Sequence[Tensor],
    ) -> None:
        """``watched``: tensors of state that must not have been written either."""
        numbers = {bound.shard.group for bound in ranges if bound.shard.group >= 0}
        uncounted = any(shared.group(number).get("fused") for number in numbers)
        of_torch = shadow.cls.__module__.startswith("torch.optim.")
        self._can_tell = of_torch and not uncounted
        self._watched: list[Tensor] = []
        self._counters: list[tuple[Tensor, Tensor]] = []
        if self._can_tell:
            self._watched = [*(bound.param for bound in ranges), *watched]
            self._counters = [
                (value, value.clone())
                for bound in ranges
                for name, value in states.get(bound.shard.param).items()
                if name not in bound.shard.homes and _is_counter(value)
            ]
        self._versions = [version_of(tensor) for tensor in self._watched]

    def undo(self) -> bool:
        """Put the counters back if nothing else was written, and return whether that is so."""
        if not self._can_tell or self._versions != [version_of(tensor) for tensor in self._watched]:
            return False
        for value, before in self._counters:
            value.copy_(before)
        return True


def _is_counter(value: object) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and value.numel() == 1


def _with_gradient(ranges: list[BoundRange], conventions: Conventions) -> list[BoundRange]:
    """Without parameters that have no gradient: who shares a bucket with them differs between ranks."""
    if conventions.state_without_gradient:
        return ranges
    return [b for b in ranges if b.gradient is not None or conventions.gradient(b.shard.param) is not None]


def _seen_by_param(shared: SharedValues, ranges: Sequence[BoundRange]) -> dict[str, dict[Tensor, Any]]:
    """Attributes that are dicts by parameter, with what the optimizer sees in place of the user's parameters."""
    return {
        name: {bound.param: real[bound.shard.param] for bound in ranges if bound.shard.param in real}
        for name, real in shared.by_param.items()
    }


def _gradient(bound: BoundRange, conventions: Conventions) -> Tensor | None:
    """This rank's gradient of a range."""
    if bound.gradient is not None:
        return bound.gradient
    grad = conventions.gradient(bound.shard.param)
    if grad is None:
        return None
    if not bound.shard.on_locals:
        return grad
    return local_shard(grad) if bound.whole else local_range(local_shard(grad), bound.start, bound.stop)


def _in_slot(bound: BoundRange, user_state: UserState) -> UserState:
    """Build the state that the shadow finds: the slot, and the user's scalars (copied if a later range needs them)."""
    if bound.last:
        return user_state | {name: value for name, value in bound.values.items() if user_state.get(name) is not None}
    return {
        name: bound.values[name] if name in bound.values and value is not None else _own_scalar(value)
        for name, value in user_state.items()
    }


def _follow_weights(bound: BoundRange, user_state: UserState, conventions: Conventions) -> None:
    master = None if conventions.weights_win else bound.values.get(MASTER)
    if master is not None and user_state.get(MASTER) is not None:
        param, slot = local_shard(bound.param).detach(), local_shard(master)
        if not is_wrapper(param) and is_only_copy(param, slot):
            let_weights_win(param, slot)


def _own_scalar(value: Any) -> Any:
    """A copy of a counter; tensors of any other size are the user's, and no optimizer writes them."""
    return value.clone() if _is_counter(value) else value


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
    for name, value in after.items():
        if name not in bound.values and name not in user_state and isinstance(value, Tensor) and value.numel() > 1:
            raise RuntimeError(
                f"state {name!r} of {bound.shard.name} appeared in a step, was not there when the optimizer was "
                "attached, and cannot be divided; attach again with remove_offload() and offload_optimizer()."
            )


def _fill_slot(bound: BoundRange, name: str, value: Tensor) -> None:
    """Move state that the optimizer has just created (or exchanged for a new tensor) into the slot."""
    created, slot = leaves_of(value), leaves_of(bound.values[name])
    if [(leaf.shape, leaf.dtype) for leaf in created] != [(leaf.shape, leaf.dtype) for leaf in slot]:
        raise RuntimeError(
            f"state {name!r} of {bound.shard.name} was expected as "
            f"{[(tuple(leaf.shape), leaf.dtype) for leaf in slot]} and is now "
            f"{[(tuple(leaf.shape), leaf.dtype) for leaf in created]}; hyperparameters that change the layout of the "
            "state must be changed before step()."
        )
    for source, target in zip(created, slot, strict=True):
        if source is not target:
            target.copy_(source)
