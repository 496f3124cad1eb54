"""The state that an optimizer will keep, learnt on scratch tensors before it keeps anything.

Everything here runs at attach (or when a hyperparameter that decides the layout changes), on tensors that are thrown
away, and leaves every generator of random numbers as it was.
"""

import numbers
from collections.abc import Container, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..state.layout import NotUnderstoodError, StateLayout, ValueLayout, describe_value, tensors_in
from ..state.store import UserState
from ..torch_compat.dtensor import compute_device, has_inner_tensors, is_dtensor, local_shard, over_local, placements_of
from . import Capabilities
from .scratch import constructor_options, notes_on, random_values, randomness_kept, values_like
from .shadow import Shadow
from .shared_values import SharedValues

_SCRATCH_NUMEL = 64


_NO_SWITCHES = frozenset({"params", "param_names", "train_mode"})


LayoutKey = tuple[tuple[str, str], ...]
"""Of a param group: see :func:`layout_key`."""


def layout_key(group: Mapping[str, Any], counters: Container[str] = ()) -> LayoutKey:
    """Extract what of a group decides which state exists, or whether a step can run at all.

    Flags, texts, whether a number is zero (``momentum``); of the learning rate and of lists, only the types, as
    schedulers write their values. ``counters`` are entries that the optimizer's own step has changed; they decide
    nothing.
    """
    return tuple(
        sorted(
            (name, _kind(value) if name == "lr" else _switch(value))
            for name, value in group.items()
            if name not in _NO_SWITCHES and name not in counters
        )
    )


def _switch(value: object) -> str:
    if isinstance(value, str):
        return value
    return str(bool(value)) if isinstance(value, bool | int | float) else _kind(value)


def _kind(value: object) -> str:
    """Return the type of a hyperparameter as a step cares for it: all numbers are alike."""
    if isinstance(value, tuple | list):
        return f"{type(value).__name__} of {', '.join(map(_kind, value))}"
    if isinstance(value, Tensor):
        return "tensor"
    return "number" if isinstance(value, numbers.Real) else type(value).__name__


class Layouts:
    """Learns the state layouts of one optimizer, once for equal parameters in equal groups.

    Attributes:
        capabilities: of its class.
        counters: entries of param groups that its own step changes.
        staying: of a class that moves as a whole, by their ``id``: values that have to stay where they are.
    """

    def __init__(self, cls: type[Optimizer], capabilities: Capabilities) -> None:
        self.capabilities = capabilities
        self._cls = cls
        self.counters: set[str] = set()
        self.staying: frozenset[int] = frozenset()
        self._new_entries: dict[str, object] = dict(
            capabilities.conventions.group_counters
        )  # of param groups, as a first step leaves them
        self._learnt: dict[Any, StateLayout] = {}

    def count(self, names: set[str]) -> None:
        """Note entries of param groups that a step has changed: they decide no layout, now or in what was learnt."""
        self.counters |= names

        def without(key: Any) -> Any:
            return (tuple(entry for entry in key[0] if entry[0] not in self.counters), *key[1:])

        self._learnt = {without(key): layout for key, layout in self._learnt.items()}

    def group_counters_at_zero(self) -> dict[str, object]:
        """Numbers that param groups get in the first step only (``group["step"]``), as they are before it."""
        return {
            name: torch.zeros_like(value) if isinstance(value, Tensor) else type(value)()
            for name, value in self._new_entries.items()
            if isinstance(value, int | float | Tensor)
        }

    def of_existing(self, param: Tensor, state: UserState) -> StateLayout:
        """Describe the layout of state that the optimizer has created already."""
        layout = describe_state(state, self.staying)
        return layout_on_locals(layout, param) if self.capabilities.elementwise else layout

    def learn(self, optimizer: Optimizer, param: Tensor, group: Mapping[str, Any], name: str) -> StateLayout:
        """Learn the layout of the state that ``optimizer`` would create for ``param`` in ``group``.

        Classes whose state is known to look like the parameter are run on a few elements. Any other is run on a
        scratch tensor like ``param``, with its sharding; the device memory of that is free again when this returns.
        Of a class that moves as a whole nothing is known before it has made state: that is planned as it is.

        Raises:
            ValueError: its step fails on scratch tensors.
        """
        if self.capabilities.moves_whole:
            return StateLayout({})
        local = local_shard(param)
        key = (
            layout_key(group, self.counters),
            param.shape,
            local.shape,
            local.stride(),
            local.dtype,
            placements_of(param),
            () if self.capabilities.known else _notes_key(param),
        )
        if key not in self._learnt:
            try:
                self._learnt[key] = self._learn(optimizer, param, group)
            except Exception as error:
                raise ValueError(
                    f"{self._cls.__name__} cannot be offloaded: a step on a scratch tensor like {name} (shape "
                    f"{tuple(local.shape)}, {local.dtype}) failed, so what it keeps is not known "
                    f"({type(error).__name__}: {error})."
                ) from error
        return self._learnt[key]

    def _learn(self, optimizer: Optimizer, param: Tensor, group: Mapping[str, Any]) -> StateLayout:
        capabilities = self.capabilities
        initial = capabilities.conventions.initial_state(optimizer, param)
        if initial is not None:
            return describe_state(capabilities.conventions.without_dispensable(param, initial))
        generator = torch.Generator(compute_device(param)).manual_seed(0)
        seen = local_shard(param) if capabilities.trusted and capabilities.elementwise else param
        scratch = _small_like(param, generator) if capabilities.state_like_param else _like(seen, generator)
        if not capabilities.known:  # it may look at anything that is true of a parameter
            scratch = nn.Parameter(scratch, param.requires_grad)
            scratch.__dict__.update(notes_on(param, tuple(param.shape)))
        capabilities.conventions.hand_gradient(scratch, _gradient_of(scratch, generator))
        with randomness_kept(compute_device(param)), torch.no_grad():
            after, entries = self._first_step(optimizer, param, scratch, group)
        self._new_entries.update((name, value) for name, value in entries.items() if name not in group)
        if scratch not in after:
            return StateLayout({})
        state = capabilities.conventions.without_dispensable(scratch, after[scratch])
        if capabilities.state_like_param:
            return _layout_like_param(state, scratch, param, wrap=not capabilities.elementwise)
        if capabilities.trusted and capabilities.elementwise:
            others = [
                name
                for name, one in state.items()
                if isinstance(one, Tensor) and one.dim() and one.shape != scratch.shape
            ]
            if others:
                raise ValueError(f"its state {others} has not one number for each element")
        return describe_state(state)

    def _first_step(
        self, optimizer: Optimizer, param: Tensor, scratch: Tensor, group: Mapping[str, Any]
    ) -> tuple[dict[Tensor, UserState], dict[str, Any]]:
        """The state after a first step on ``scratch`` alone, which stands for ``param``; and the param group then."""
        if self.capabilities.known:  # torch's Adagrad makes its state in the constructor up to 2.11
            before = _state_of_construction(self._cls, optimizer, scratch, group)
            return self._step(optimizer, param, scratch, group, before)
        try:
            return self._step(optimizer, param, scratch, group, {})
        except Exception:  # others do that as well, and look for it in their step
            before = _state_of_construction(self._cls, optimizer, scratch, group)
            if not before:
                raise
            return self._step(optimizer, param, scratch, group, before)

    def _step(
        self, optimizer: Optimizer, param: Tensor, scratch: Tensor, group: Mapping[str, Any], before: UserState
    ) -> tuple[dict[Tensor, UserState], dict[str, Any]]:
        index = next(number for number, other in enumerate(optimizer.param_groups) if other is group)
        lists: list[list[Tensor]] = [[] for _ in optimizer.param_groups]
        lists[index] = [scratch]
        values: Any = values_like(optimizer, {param: scratch})
        shared = SharedValues(values, [{} for _ in lists], writes_any_entry=True)
        after = Shadow(self._cls).run(shared, lists, {scratch: before} if before else {}, {})
        shared.commit(values)
        return after, values.param_groups[index]


def _notes_key(param: Tensor) -> tuple[tuple[str, object], ...]:
    """Collect the plain values that the user has written on a parameter: they may decide what is kept for it."""
    plain = (bool, int, float, str)
    return tuple((name, value) for name, value in sorted(vars(param).items()) if isinstance(value, plain))


def _state_of_construction(
    cls: type[Optimizer], optimizer: Optimizer, scratch: Tensor, group: Mapping[str, Any]
) -> UserState:
    """State that exists before the first step.

    The constructor gets the arguments that it has accepted before: a scheduler may have moved what is in the group.
    """
    own = {name: value for name, value in group.items() if name != "params"}
    made = cls([{**own, "params": [scratch]}], **constructor_options(cls, optimizer.defaults))
    return dict(made.state.get(scratch, {}))


def describe_state(state: UserState, staying: Container[int] = ()) -> StateLayout:
    """Describe the layout of state that exists, without values whose ``id`` is among those that are ``staying``."""
    values: dict[str, ValueLayout] = {}
    scalars: dict[str, object] = {}
    left_out = []
    for name, value in state.items():
        if not isinstance(value, Tensor) or value.dim() == 0:
            if any(one.dim() for one in tensors_in(value)):
                left_out.append(name)
            else:
                scalars[name] = value
            continue
        try:
            if id(value) in staying:
                raise NotUnderstoodError
            values[name] = describe_value(value)
        except NotUnderstoodError:
            left_out.append(name)
    return StateLayout(values, scalars, tuple(left_out))


def layout_on_locals(layout: StateLayout, param: Tensor) -> StateLayout:
    """Convert a layout to one whose values are the local tensors themselves."""
    local = local_shard(param)
    values = {}
    left_out = list(layout.left_out)
    for name, value in layout.values.items():
        if [leaf.shape for leaf in value.leaves] == [tuple(local.shape)]:
            values[name] = describe_value(torch.empty_like(local, dtype=value.leaves[0].dtype, device="meta"))
        else:
            left_out.append(name)  # not the optimizer's own: something the user keeps there
    return StateLayout(values, layout.scalars, tuple(left_out))


def _layout_like_param(state: UserState, scratch: Tensor, param: Tensor, *, wrap: bool) -> StateLayout:
    local = local_shard(param)
    values, scalars = {}, {}
    for name, value in state.items():
        if isinstance(value, Tensor) and value.dim() > 0:
            assert value.shape == scratch.shape, f"state {name!r} does not look like its parameter"
            like = torch.empty_like(local, dtype=value.dtype, device="meta")
            values[name] = describe_value(over_local(param, like) if wrap else like)
        else:
            scalars[name] = value
    return StateLayout(values, scalars)


def _small_like(param: Tensor, generator: torch.Generator) -> Tensor:
    shape = (8, 8) if param.dim() == 2 else (_SCRATCH_NUMEL,)
    return random_values(torch.empty(shape, dtype=local_shard(param).dtype, device=compute_device(param)), generator)


def _gradient_of(scratch: Tensor, generator: torch.Generator) -> Tensor:
    """A gradient as in training: ``fully_shard`` reduces them as plain tensors, whatever the parameter's type."""
    if not (is_dtensor(scratch) and has_inner_tensors(scratch)):
        return _like(scratch, generator)
    local = local_shard(scratch)
    return over_local(
        scratch, random_values(torch.empty(local.shape, dtype=local.dtype, device=local.device), generator)
    )


def _like(tensor: Tensor, generator: torch.Generator) -> Tensor:
    return over_local(tensor, random_values(torch.empty_like(local_shard(tensor)).detach(), generator))
