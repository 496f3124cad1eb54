"""What an optimizer will keep, learnt on scratch tensors before it keeps anything; and whether it can be divided.

Everything here runs at attach (or when a hyperparameter that decides the layout changes), on tensors that are thrown
away, and leaves torch's random state as it was.
"""

import collections
import copy
import inspect
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from .fsdp import local_shard, over_local, placements_of
from .masters import MASTER, MasterKind, kept_dtype, kind_for
from .optimizers import Traits
from .shards import NotUnderstoodError, StateLayout, ValueLayout, describe_value, leaves_of
from .update import Shadow, SharedValues, UserState, instance_attributes

_SCRATCH_NUMEL = 64


_NO_SWITCHES = frozenset({"params", "lr", "param_names", "train_mode"})


def layout_key(group: Mapping[str, Any], counters: Container[str] = ()) -> tuple[tuple[str, object], ...]:
    """What of a param group can decide which state exists: flags, and whether a number is zero (``momentum``).

    ``counters`` are entries that the optimizer's own step has changed; they decide nothing.
    """
    return tuple(
        sorted(
            (name, _switch(value)) for name, value in group.items() if name not in _NO_SWITCHES and name not in counters
        )
    )


def _switch(value: object) -> str:
    if isinstance(value, Tensor):
        return "tensor"
    if value is None or isinstance(value, bool | int | float):
        return "none" if value is None else str(bool(value))
    return type(value).__name__


class Layouts:
    """Learns the state layouts of one optimizer, once for equal parameters in equal groups."""

    def __init__(self, cls: type[Optimizer], traits: Traits, masters: MasterKind = "none") -> None:
        self.traits = traits
        self._cls = cls
        self._masters: MasterKind = masters
        self.counters: set[str] = set()  # entries of param groups that the optimizer's own step changes
        self._new_entries: dict[str, object] = dict(
            traits.habits.group_counters
        )  # of param groups, as a first step leaves them
        self._learnt: dict[Any, StateLayout] = {}
        self._tried: set[Any] = set()

    def master_of(self, param: Tensor) -> MasterKind:
        """Which master we keep for ``param``."""
        return kind_for(self._masters, local_shard(param).dtype)

    def count(self, names: set[str]) -> None:
        """Note entries of param groups that a step has changed: they decide no layout, now or in what was learnt."""
        self.counters |= names

        def without(key: Any) -> Any:
            return (tuple(entry for entry in key[0] if entry[0] not in self.counters), *key[1:])

        self._learnt = {without(key): layout for key, layout in self._learnt.items()}
        self._tried = {without(key) for key in self._tried}

    def group_counters_at_zero(self) -> dict[str, object]:
        """Numbers that param groups get in the first step only (``group["step"]``), as they are before it."""
        numbers = {name: value for name, value in self._new_entries.items() if isinstance(value, int | float | Tensor)}
        return {
            name: torch.zeros_like(value) if isinstance(value, Tensor) else type(value)()
            for name, value in numbers.items()
        }

    def of_existing(
        self, optimizer: Optimizer, param: Tensor, group: Mapping[str, Any], state: UserState
    ) -> StateLayout:
        """The layout of state that the optimizer has created already.

        Raises:
            ValueError: the class is unknown and cannot be divided by parameter.
        """
        if not self.traits.known:
            self._try_class(optimizer, group, param)
        layout = describe_state(state)
        return layout_on_locals(layout, param) if self.traits.elementwise else layout

    def learn(self, optimizer: Optimizer, param: Tensor, group: Mapping[str, Any], name: str) -> StateLayout:
        """The layout of the state that ``optimizer`` would create for ``param`` in ``group``.

        Classes whose state is known to look like the parameter are run on a few elements. Any other is run on a
        scratch tensor like ``param``, with its sharding; the device memory of that is free again when this returns.

        Raises:
            ValueError: the class is unknown and cannot be divided by parameter, or its step fails on scratch tensors.
        """
        local = local_shard(param)
        key = (
            layout_key(group, self.counters),
            param.shape,
            local.shape,
            local.stride(),
            local.dtype,
            placements_of(param),
        )
        if key not in self._learnt:
            if not self.traits.known:
                self._try_class(optimizer, group, param)
            kind = self.master_of(param)
            try:
                layout = _learn(self._cls, optimizer, self.traits, param, group, self._new_entries, kind)
            except Exception as error:
                raise ValueError(
                    f"{self._cls.__name__} cannot be offloaded: a step on a scratch tensor like {name} (shape "
                    f"{tuple(local.shape)}, {local.dtype}) failed, so what it keeps is not known "
                    f"({type(error).__name__}: {error})."
                ) from error
            self._learnt[key] = layout if kind == "none" else _with_master(layout, local, kind)
        return self._learnt[key]

    def _try_class(self, optimizer: Optimizer, group: Mapping[str, Any], param: Tensor) -> None:
        key = (layout_key(group, self.counters), param.dtype)
        if key in self._tried:
            return
        problem = separability_problem(self._cls, optimizer, group, param)
        if problem:
            raise ValueError(
                f"{self._cls.__name__} cannot be offloaded: {problem}. Only optimizers that update each parameter "
                "independently of the others can be streamed bucket by bucket."
            )
        self._tried.add(key)


def _learn(
    cls: type[Optimizer],
    optimizer: Optimizer,
    traits: Traits,
    param: Tensor,
    group: Mapping[str, Any],
    new_entries: dict[str, object],
    master: MasterKind,
) -> StateLayout:
    initial = traits.habits.initial_state(optimizer, param)
    if initial is not None:
        return describe_state(traits.habits.without_dispensable(param, initial))
    generator = _generator(param)
    dtype = local_shard(param).dtype if master == "none" else torch.float32
    scratch = _small_like(param, dtype, generator) if traits.state_like_param else _like(param, generator)
    traits.habits.hand_gradient(scratch, _like(scratch, generator))
    before = _state_of_construction(cls, scratch, group) if traits.known else {}
    with _random_state_kept(local_shard(param).device), torch.no_grad():
        after, entries = _one_step(cls, optimizer, scratch, group, before)
    new_entries.update((name, value) for name, value in entries.items() if name not in group)
    if scratch not in after:
        return StateLayout({})
    state = traits.habits.without_dispensable(scratch, after[scratch])
    if traits.state_like_param:
        return _layout_like_param(state, scratch, param, wrap=not traits.elementwise)
    return describe_state(state)


def _state_of_construction(cls: type[Optimizer], scratch: Tensor, group: Mapping[str, Any]) -> UserState:
    """State that exists before the first step: torch's Adagrad makes it in its constructor up to 2.11."""
    options = {name: group[name] for name in inspect.signature(cls).parameters.keys() & group.keys() - {"params"}}
    return dict(cls([scratch], **options).state.get(scratch, {}))


def describe_state(state: UserState) -> StateLayout:
    """The layout of state that exists."""
    values: dict[str, ValueLayout] = {}
    scalars: dict[str, object] = {}
    left_out = []
    for name, value in state.items():
        if not isinstance(value, Tensor) or value.dim() == 0:
            scalars[name] = value
            continue
        try:
            values[name] = describe_value(value)
        except NotUnderstoodError:
            left_out.append(name)
    return StateLayout(values, scalars, tuple(left_out))


def layout_on_locals(layout: StateLayout, param: Tensor) -> StateLayout:
    """The same layout, with values that are the local tensors themselves."""
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


def _with_master(layout: StateLayout, local: Tensor, kind: MasterKind) -> StateLayout:
    master = describe_value(torch.empty_like(local, dtype=kept_dtype(kind), device="meta"))
    return StateLayout({**layout.values, MASTER: master}, layout.scalars, layout.left_out)


def _small_like(param: Tensor, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    shape = (8, 8) if param.dim() == 2 else (_SCRATCH_NUMEL,)
    return _random(local_shard(param).new_empty(shape, dtype=dtype).detach(), generator)


def _like(tensor: Tensor, generator: torch.Generator) -> Tensor:
    return over_local(tensor, _random(torch.empty_like(local_shard(tensor)).detach(), generator))


def _generator(like: Tensor) -> torch.Generator:
    return torch.Generator(local_shard(like).device).manual_seed(0)


def _random(tensor: Tensor, generator: torch.Generator) -> Tensor:
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        return tensor.normal_(generator=generator)
    return tensor.zero_()


class _StandIn:
    """Looks like ``optimizer``, with copies of its groups and attributes: a trial must not count in the real one."""

    def __init__(self, optimizer: Optimizer) -> None:
        params = [param for group in optimizer.param_groups for param in group["params"]]
        memo = {id(param): param for param in params}
        attributes = instance_attributes(optimizer)
        self.__dict__.update((name, _copied(value, memo)) for name, value in attributes.items())
        self.param_groups = [
            {name: _copied(value, memo) for name, value in group.items() if name != "params"}
            for group in optimizer.param_groups
        ]

    def counted(self) -> list[object]:
        """What steps may have advanced outside of parameters and their state."""
        attributes = [value for name, value in sorted(self.__dict__.items()) if name != "param_groups"]
        return [*attributes, *(value for group in self.param_groups for _, value in sorted(group.items()))]


def _copied(value: Any, memo: Mapping[int, object]) -> Any:
    try:
        return copy.deepcopy(value, dict(memo))
    except Exception:  # noqa: BLE001  # process groups, locks, ...: whatever cannot be copied is not a counter
        return value


def _one_step(
    cls: type[Optimizer], optimizer: Optimizer, scratch: Tensor, group: Mapping[str, Any], before: UserState
) -> tuple[dict[Tensor, UserState], dict[str, Any]]:
    """The state after a step on ``scratch`` alone, and its param group."""
    stand_in = _StandIn(optimizer)
    shared = SharedValues(stand_in, _as_in_training(stand_in.param_groups))  # type: ignore[arg-type]
    index = _index_of(optimizer, group)
    lists: list[list[Tensor]] = [[scratch] if number == index else [] for number in range(len(stand_in.param_groups))]
    after = Shadow(cls).run(shared, lists, {scratch: before} if before else {}, {})
    shared.commit(stand_in)  # type: ignore[arg-type]
    return after, stand_in.param_groups[index]


def _index_of(optimizer: Optimizer, group: Mapping[str, Any]) -> int:
    return next(number for number, other in enumerate(optimizer.param_groups) if other is group)


def _as_in_training(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What scratch groups have instead: schedulefree's optimizers step in train mode only, and start in the other."""
    return [{"train_mode": True} if "train_mode" in group else {} for group in groups]


@contextmanager
def _random_state_kept(device: torch.device) -> Iterator[None]:
    """Optimizers that draw random numbers (stochastic rounding) must not advance the user's sequence here."""
    if device.type == "cpu":
        with torch.random.fork_rng(()):
            yield
    else:
        with torch.random.fork_rng((device,), device_type=device.type):
            yield


_TRIAL_SHAPES = ((96, 64), (4096,), (64, 8, 3), (130,))


def _trial_scales(dtype: torch.dtype) -> tuple[float, ...]:
    """One step each. Small and large gradients too: a norm that is only clipped above a threshold has to show."""
    return (1.0, 1e-2, 1e2) if dtype is torch.float16 else (1.0, 1e-4, 1e6)


def separability_problem(cls: type[Optimizer], optimizer: Optimizer, group: Mapping[str, Any], like: Tensor) -> str:
    """Why the parameters of ``group`` cannot be updated one after the other; empty if they can.

    Scratch parameters are trained twice from the same start with the same gradients: all together, and one at a time
    as buckets would be. Parameters and state have to be equal bit by bit after each step, whatever the gradients' size.
    """
    generator = _generator(like)
    start = [_random(local_shard(like).new_empty(shape).detach(), generator) for shape in _TRIAL_SHAPES]
    grads = [[_like(param, generator).mul_(scale) for param in start] for scale in _trial_scales(like.dtype)]
    stand_ins = [_StandIn(optimizer), _StandIn(optimizer)]
    index = _index_of(optimizer, group)
    whole = _trial(cls, stand_ins[0], index, start, grads, together=True)
    divided = _trial(cls, stand_ins[1], index, start, grads, together=False)
    if isinstance(whole, Exception):
        return f"its step fails on scratch tensors ({type(whole).__name__}: {whole})"
    if isinstance(divided, Exception):
        return f"its step fails when parameters are updated one at a time ({type(divided).__name__}: {divided})"
    if not all(_same_values(one, other) for one, other in zip(whole, divided, strict=True)):
        return "updating its parameters one at a time gives another result than updating them together"
    if not _same_counts(*(stand_in.counted() for stand_in in stand_ins)):
        return "its step counts in place, in an attribute or in a param group, how often it is called"
    return ""


def _trial(
    cls: type[Optimizer],
    stand_in: _StandIn,
    index: int,
    start: Sequence[Tensor],
    grads: Sequence[Sequence[Tensor]],
    *,
    together: bool,
) -> list[list[Tensor]] | Exception:
    """Every tensor after each step, or the exception that stopped it."""
    params = [param.clone() for param in start]
    states: dict[Tensor, UserState] = {param: {} for param in params}
    batches = [params] if together else [[param] for param in params]
    seen: list[list[Tensor]] = []
    try:
        with _random_state_kept(params[0].device), torch.no_grad():
            for step_grads in grads:
                for param, grad in zip(params, step_grads, strict=True):
                    param.grad = grad.clone()
                shared = SharedValues(stand_in, _as_in_training(stand_in.param_groups))  # type: ignore[arg-type]
                for batch in batches:
                    given = {param: states[param] for param in batch if states[param]}
                    lists = [batch if number == index else [] for number in range(len(stand_in.param_groups))]
                    states.update(Shadow(cls).run(shared, lists, given, {}))
                shared.commit(stand_in)  # type: ignore[arg-type]
                seen.append([leaf.clone() for param in params for leaf in _tensors(param, states[param])])
    except Exception as error:  # noqa: BLE001  # whatever a foreign step raises is the answer
        return error
    return seen


def _same_counts(one: Any, other: Any) -> bool:
    """Whether numbers and tensors in ``one`` and ``other`` are equal, however deep; other objects do not count."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        plain = one.layout == other.layout == torch.strided
        return not plain or all(torch.equal(a, b) for a, b in zip(leaves_of(one), leaves_of(other), strict=True))
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        if any(isinstance(key, Tensor) for key in one):  # by parameter: each trial has scratch parameters of its own
            return len(one) == len(other) and all(map(_same_counts, one.values(), other.values()))
        return one.keys() == other.keys() and all(_same_counts(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple | collections.deque):
        return len(one) == len(other) and all(map(_same_counts, one, other))
    return not isinstance(one, bool | int | float | str) or bool(one == other)


def _tensors(param: Tensor, state: UserState) -> list[Tensor]:
    numbers = [torch.tensor(value, device="cpu") for value in state.values() if isinstance(value, int | float)]
    tensors = [value for value in state.values() if isinstance(value, Tensor)]
    leaves = [leaf for value in tensors for leaf in leaves_of(value)]
    return [param, *numbers, *(leaf if leaf.layout == torch.strided else leaf.to_dense() for leaf in leaves)]


def _same_values(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
