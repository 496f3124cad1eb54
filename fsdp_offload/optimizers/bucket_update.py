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
from .fused_masters import AdamWStep, MasterRange, fits, is_exact, step_of_group, update_masters
from .masters import MASTER, close_master, is_only_copy, let_weights_win, open_master
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
    ranges = _update_in_one_pass(shadow, shared, conventions, ranges, user_states, kwargs)
    if not ranges:
        return
    params: list[list[Tensor]] = [[] for _ in range(group_count)]
    state: dict[Tensor, UserState] = {}
    existing = [user_states.get(bound.shard.param) for bound in ranges]
    seen = [_seen_by_optimizer(bound, user_state) for bound, user_state in zip(ranges, existing, strict=True)]
    for bound, param, user_state in zip(ranges, seen, existing, strict=True):
        _hand_gradient(bound, param, conventions)
        params[bound.shard.group].append(param)
        if user_state:
            state[param] = _in_slot(bound, user_state)
    by_param = _seen_by_param(shared, ranges, seen)
    try:
        after = shadow.run(shared, params, state, kwargs, by_param)
    finally:
        for bound, param in zip(ranges, seen, strict=True):
            if bound.is_alias:
                conventions.hand_gradient(param, None)
    for name, given in by_param.items():
        for bound, param in zip(ranges, seen, strict=True):
            if param in given:
                shared.by_param[name][bound.shard.param] = given[param]
    for bound, param, user_state in zip(ranges, seen, existing, strict=True):
        result = after.get(param)
        if bound.has_master:
            close_master(bound.shard.master, param, bound.param, bound.values[MASTER])
            result = {**(result or {}), MASTER: bound.values[MASTER]}
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
        self._can_tell = of_torch and not uncounted and not any(bound.has_master for bound in ranges)
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


def _seen_by_param(
    shared: SharedValues, ranges: Sequence[BoundRange], seen: Sequence[Tensor]
) -> dict[str, dict[Tensor, Any]]:
    """Attributes that are dicts by parameter, with what the optimizer sees in place of the user's parameters."""
    pairs = list(zip(ranges, seen, strict=True))
    return {
        name: {param: real[bound.shard.param] for bound, param in pairs if bound.shard.param in real}
        for name, real in shared.by_param.items()
    }


def _update_in_one_pass(
    shadow: Shadow,
    shared: SharedValues,
    conventions: Conventions,
    ranges: Sequence[BoundRange],
    user_states: StateStore,
    kwargs: Mapping[str, Any],
) -> list[BoundRange]:
    """Update what has a master that we keep by one kernel, where there is one with the same bits. Returns the rest."""
    if kwargs or not any(bound.has_master for bound in ranges):
        return list(ranges)
    rest = []
    asked: dict[int, AdamWStep | None] = {}
    for bound in ranges:
        number, state = bound.shard.group, user_states.get(bound.shard.param)
        if not bound.has_master or any(state.get(name) is None for name in (MASTER, *_MOMENTS, "step")):
            rest.append(bound)
            continue
        if number not in asked:
            asked[number] = step_of_group(shadow.cls, shared.group(number), shared.attributes)
        step, grad = asked[number], _gradient(bound, conventions)
        first, second = (bound.values[name] for name in _MOMENTS)
        part = MasterRange(bound.param, grad, bound.values[MASTER], first, second, state["step"])  # type: ignore[arg-type]
        if step is None or not fits(part) or not is_exact(step, bound.shard.master, part):
            rest.append(bound)
            continue
        update_masters(step, bound.shard.master, [part])
        shared.unvisited.discard(number)
        if bound.last:
            state["step"].add_(1)
    return rest


_MOMENTS = ("exp_avg", "exp_avg_sq")


def _seen_by_optimizer(bound: BoundRange, user_state: UserState) -> Tensor:
    """Return the tensor that the optimizer is to update: the bound parameter, or its master."""
    if bound.has_master:
        exists = user_state.get(MASTER) is not None
        return open_master(bound.shard.master, bound.param, bound.values[MASTER], exists=exists)
    _follow_weights(bound, user_state)
    return bound.param


def _hand_gradient(bound: BoundRange, param: Tensor, conventions: Conventions) -> None:
    grad = _gradient(bound, conventions) if bound.is_alias else None
    if grad is not None:
        conventions.hand_gradient(param, grad.to(param.dtype) if bound.has_master else grad)


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
    if bound.has_master:  # which the optimizer does not know of
        user_state = {name: value for name, value in user_state.items() if name != MASTER}
    if bound.last:
        return user_state | {name: value for name, value in bound.values.items() if user_state.get(name) is not None}
    return {
        name: bound.values[name] if name in bound.values and value is not None else _own_scalar(value)
        for name, value in user_state.items()
    }


def _follow_weights(bound: BoundRange, user_state: UserState) -> None:
    master = bound.values.get(MASTER)
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
