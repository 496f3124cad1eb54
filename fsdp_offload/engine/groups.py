"""Param groups, which users edit between steps, and the state that their hyperparameters require."""

import itertools
from collections.abc import Iterable, Sequence

from torch import Tensor
from torch.optim import Optimizer

from ..optimizers.kept_state import LayoutKey, Layouts, layout_key
from ..optimizers.masters import MASTER
from ..policy import listed
from ..state.layout import StateLayout
from ..state.shard import StateShard
from ..state.store import StateStore, UserState
from .homes import Plan


class ParamGroups:
    """The param groups for which state was last planned. It never refers to the optimizer.

    Attributes:
        ids: ids of the parameters of each group; empty: follow the groups again.
        keys: for each group, the hyperparameters that decide which state there is.
        unplanned: parameters without a home, since they never had a gradient.
    """

    def __init__(self, layouts: Layouts, plan: Plan) -> None:
        self._layouts, self._plan = layouts, plan
        self.ids: list[list[int]] = []
        self.keys: list[LayoutKey] = []
        self.unplanned: list[Tensor] = []

    def keys_of(self, optimizer: Optimizer) -> list[LayoutKey]:
        return [layout_key(group, self._layouts.counters) for group in optimizer.param_groups]

    def are_as_before(self, optimizer: Optimizer) -> bool:
        return ids_of(optimizer) == self.ids and self.keys_of(optimizer) == self.keys

    def follow(self, optimizer: Optimizer) -> None:
        """Record the group of each parameter.

        Raises:
            ValueError: a parameter is listed twice; nothing has been changed.
        """
        if len(ids := list(itertools.chain(*ids_of(optimizer)))) > len(set(ids)):
            raise ValueError("param_groups lists a parameter more than once. List each parameter once.")
        self.unplanned, shards = [], self._plan.shards
        for shard in shards.values():
            shard.group = -1  # no longer in any group, unless found below
        for number, group in enumerate(optimizer.param_groups):
            for param in group["params"]:
                if param in shards:
                    shards[param].group = number
                else:
                    self.unplanned.append(param)
        self.ids = ids_of(optimizer)  # last: after an interrupt, this is done again

    def ask_for_others(self, optimizer: Optimizer, states: StateStore, *, regrouped: bool) -> bool:
        """Return whether state must be planned anew: hyperparameters change its layout, or most of it is dead.

        Raises:
            ValueError: the class refuses the hyperparameters; nothing has been changed.
            RuntimeError: existing state lacks a part that the hyperparameters require; nothing has been changed.
        """
        keys = self.keys_of(optimizer)
        if keys == self.keys:
            if not regrouped:
                return False
            # Most host memory may belong to parameters that the user has removed, with their state.
            shards = self._plan.shards.values()
            dead_bytes = sum(shard.nbytes for shard in shards if is_dead(shard, states))
            return 2 * dead_bytes > sum(shard.nbytes for shard in shards)
        live = [shard for shard in self._plan.shards.values() if shard.group >= 0]
        try:
            for shard in live if self._layouts.capabilities.known else ():
                # torch's optimizers need all of their state once there is some: raise before a step begins.
                state = states.get(shard.param)
                missing = [name for name in self._learnt(optimizer, shard).values if name not in state]
                if state and missing:
                    raise RuntimeError(
                        f"The hyperparameters of param_groups[{shard.group}] now need state {missing}, which "
                        f"{shard.name} does not have: it was created under other ones. Set them back, or add that "
                        "state. Nothing has been changed."
                    )
            still_fit = all(self._still_fits(optimizer, shard) for shard in live)
        except ValueError as error:
            cause = error.__cause__
            why = error if cause is None else f"{type(cause).__name__}: {str(cause).strip()}."
            raise ValueError(
                f"step() cannot run with {_changed_entries(self.keys, keys, optimizer)}: {why} Correct it and call "
                "step() again. Nothing has been changed."
            ) from None
        self.keys = keys
        return not still_fit

    def _still_fits(self, optimizer: Optimizer, shard: StateShard) -> bool:
        if len(shard.buckets) > 1 and not self._plan.may_cut(shard, optimizer.param_groups[shard.group]):
            return False  # another implementation is in use now, which rounds pieces differently
        # Existing state keeps its home, even if the new hyperparameters would no longer create it.
        return self._learnt(optimizer, shard).values.keys() <= shard.layout.values.keys()

    def _learnt(self, optimizer: Optimizer, shard: StateShard) -> StateLayout:
        return self._layouts.learn(optimizer, shard.param, optimizer.param_groups[shard.group], shard.name)

    def check_entries(self, optimizer: Optimizer, entries: Iterable[tuple[StateShard, UserState]]) -> None:
        """Refuse state that lacks a part, or has a counter of another form: the class would fail between updates."""
        for shard, state in entries:
            # A home may have no entry in ``state``, for example after a load without it.
            is_short = len(state) < len(shard.layout.values) + len(shard.layout.scalars)
            if state and shard.group >= 0 and (is_short or id(None) in map(id, state.values())):
                needed = self._learnt(optimizer, shard)
                names = {*needed.values, *needed.scalars} - {MASTER}
                lacking = [name for name in sorted(names) if state.get(name) is None]
                if 0 < len(lacking) < len(names):  # all of it may be missing, as SGD's momentum
                    raise ValueError(
                        f"optimizer.state[{shard.name}] has no {listed(lacking)}. Put a tensor there, or delete "
                        "optimizer.state[param] as a whole. Nothing has been changed."
                    )
            for name, example in shard.layout.scalars.items():
                value = state.get(name)
                is_wrong = value.numel() != 1 if isinstance(value, Tensor) else isinstance(example, Tensor)
                if value is not None and is_wrong:
                    raise ValueError(
                        f"optimizer.state[{shard.name}][{name!r}] must be a tensor of one element, got {value!r:.60}. "
                        f"Write optimizer.state[param][{name!r}] = torch.tensor(1.0). Nothing has been changed."
                    )


def is_dead(shard: StateShard, states: StateStore) -> bool:
    return shard.group < 0 and not states.get(shard.param)


def ids_of(optimizer: Optimizer) -> list[list[int]]:
    """Return the ids of the parameters of each group."""
    return [[id(param) for param in group["params"]] for group in optimizer.param_groups]


def _changed_entries(before: Sequence[LayoutKey], after: Sequence[LayoutKey], optimizer: Optimizer) -> str:
    groups = optimizer.param_groups
    return listed(
        f"param_groups[{number}][{name!r}] = {groups[number][name]!r}"
        if name in groups[number]
        else f"param_groups[{number}] without {name!r}"
        for number, (old, new) in enumerate(itertools.zip_longest(before, after, fillvalue=()))
        for name in sorted(dict(set(old) ^ set(new)))
        if number < len(groups)
    )
