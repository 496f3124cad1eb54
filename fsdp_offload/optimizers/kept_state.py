"""Layouts of the state that an optimizer will keep, learnt at attach by a step on scratch tensors."""

import copy
import inspect
import numbers
import types
from collections.abc import Container, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..fsdp.dtensor import compute_device, has_inner_tensors, is_dtensor, local_shard, over_local, placements_of
from ..state.layout import NotUnderstoodError, StateLayout, ValueLayout, describe_value, tensors_in
from ..state.store import UserState
from .capabilities import Capabilities
from .divided_step import DividedStep, entries_of, instance_attributes

LayoutKey = tuple[tuple[str, str], ...]
_NO_SWITCHES = frozenset({"params", "param_names", "train_mode"})


def layout_key(group: Mapping[str, Any], counters: Container[str] = ()) -> LayoutKey:
    """Extract the entries of a group that decide which state exists, or whether a step can run at all.

    Flags and texts count with their values, numbers (``momentum``) by being zero or not. The learning rate and lists,
    which schedulers write, count by type only. ``counters``, which the optimizer's own step changes, are left out.
    """

    def switch(value: object, *, type_only: bool) -> str:
        if isinstance(value, tuple | list):
            return f"{type(value).__name__} of {', '.join(switch(one, type_only=True) for one in value)}"
        if isinstance(value, str) and not type_only:
            return value
        if isinstance(value, numbers.Real):  # the type of a number makes no difference to a step
            return "number" if type_only else str(bool(value))
        return "tensor" if isinstance(value, Tensor) else type(value).__name__

    names = sorted([name for name in group if name not in _NO_SWITCHES and name not in counters])
    quick = {name: str(group[name]) for name in names if type(group[name]) is bool}  # most are
    return tuple([(name, quick.get(name) or switch(group[name], type_only=name == "lr")) for name in names])


class Layouts:
    """Learns the state layouts of one optimizer, once for equal parameters in equal groups."""

    def __init__(self, cls: type[Optimizer], capabilities: Capabilities) -> None:
        self.capabilities = capabilities
        self._cls = cls
        self.counters: set[str] = set()  # entries of param groups that its own step changes
        self.staying: frozenset[int] = frozenset()  # of a class that moves as a whole: values that stay, by ``id``
        self._new_entries = dict(capabilities.conventions.group_counters)  # values after a first step
        self._learnt: dict[Any, StateLayout] = {}

    def count(self, names: Iterable[str]) -> None:
        """Note entries of param groups that a step has changed; they do not decide layouts."""
        self.counters.update(names)
        self._learnt.clear()

    def group_counters_at_zero(self) -> dict[str, object]:
        """Return zeros for the numbers that a first step adds to param groups (``group["step"]``)."""
        return {n: zero_like(v) for n, v in self._new_entries.items() if isinstance(v, int | float | Tensor)}

    def of_existing(self, param: Tensor, state: UserState) -> StateLayout:
        """Describe the layout of state that the optimizer has created already."""
        layout, local = _describe(state, self.staying), local_shard(param)
        return _laid_out_as(local, layout, local.shape) if self.capabilities.elementwise else layout

    def learn(self, optimizer: Optimizer, param: Tensor, group: Mapping[str, Any], name: str) -> StateLayout:
        """Learn the layout of the state that ``optimizer`` would create for ``param`` in ``group``.

        Classes whose state looks like the parameter are run on a few elements, others on a scratch tensor like
        ``param``, with its sharding; raise a ValueError if that fails. A class that moves as a whole has an empty
        layout.
        """
        if self.capabilities.moves_whole:
            return StateLayout({})
        local = local_shard(param)
        looks = param.shape, local.shape, local.stride(), local.dtype, placements_of(param)
        key = layout_key(group, self.counters), *looks
        if key in self._learnt:
            return self._learnt[key]
        try:
            layout = self._learn(optimizer, param, group)
        except Exception as error:
            raise ValueError(
                f"{self._cls.__name__} cannot be offloaded: a step on a scratch tensor like {name} (shape "
                f"{tuple(local.shape)}, {local.dtype}) failed ({type(error).__name__}: {error})."
            ) from error
        if self.capabilities.known:  # layouts of an unknown class may depend on anything about a parameter
            self._learnt[key] = layout
        return layout

    def _learn(self, optimizer: Optimizer, param: Tensor, group: Mapping[str, Any]) -> StateLayout:
        capabilities, conventions = self.capabilities, self.capabilities.conventions
        initial = conventions.initial_state(optimizer, param)
        if initial is not None:
            return _describe(conventions.without_dispensable(param, initial))
        like = local_shard(param) if capabilities.elementwise else param
        scratch = self._scratch(param, like)
        devices = [] if scratch.device.type in ("cpu", "meta") else [scratch.device]
        kept = torch.random.fork_rng(devices, device_type=scratch.device.type if devices else "cuda")
        with kept, torch.no_grad():  # the step may draw random numbers
            after = self._first_step(optimizer, param, scratch, group)
        if scratch not in after:
            return StateLayout({})
        made = _describe(conventions.without_dispensable(scratch, after[scratch]))
        if not (capabilities.elementwise or capabilities.state_like_param):
            return made
        layout = _laid_out_as(like, made, local_shard(scratch).shape)
        if others := layout.left_out[len(made.left_out) :]:
            raise ValueError(f"its state {list(others)} has not one number for each element")
        return layout

    def _scratch(self, param: Tensor, like: Tensor) -> Tensor:
        """Make a tensor that stands for ``param``, with a gradient; a few elements if the size does not matter."""
        device, dtype = compute_device(param), local_shard(param).dtype
        generator = torch.Generator(device).manual_seed(0)
        if self.capabilities.state_like_param:
            shape = (8, 8) if param.dim() == 2 else (64,)
            scratch = _random(torch.empty(shape, dtype=dtype, device=device), generator)
        else:
            scratch = _random(like, generator)
        if not self.capabilities.known:  # the step of an unknown class may read anything about a parameter
            scratch = nn.Parameter(scratch, param.requires_grad)
            noted = {n: v for n, v in vars(param).items() if not isinstance(v, Tensor) or v.shape == param.shape}
            scratch.__dict__.update(_copied(noted, {}))
        grad = scratch
        if is_dtensor(scratch) and has_inner_tensors(scratch):  # fully_shard reduces gradients as plain tensors
            local = local_shard(scratch)
            grad = over_local(scratch, torch.empty(local.shape, dtype=local.dtype, device=local.device))
        self.capabilities.conventions.hand_gradient(scratch, _random(grad, generator))
        return scratch

    def _first_step(
        self, optimizer: Optimizer, param: Tensor, scratch: Tensor, group: Mapping[str, Any]
    ) -> dict[Tensor, UserState]:
        """Return the state after a first step on ``scratch`` alone, which stands for ``param``."""

        def stepped(before: Mapping[Tensor, UserState]) -> dict[Tensor, UserState]:
            values = {**instance_attributes(optimizer), "param_groups": [dict(one) for one in optimizer.param_groups]}
            if not self.capabilities.known:
                values = _copied({**values, "param_groups": entries_of(optimizer)}, {id(param): scratch})
            # schedulefree's optimizers step in train mode only, and start in the other.
            pinned = [{"train_mode": True} if "train_mode" in one else {} for one in optimizer.param_groups]
            step = DividedStep(self._cls, self.capabilities, types.SimpleNamespace(**values), pinned=pinned)
            number = next(number for number, one in enumerate(optimizer.param_groups) if one is group)
            after = step.run({number: [scratch]}, before, {name: {} for name in step.by_param})
            self._new_entries |= {name: value for name, value in step.changed_entries.items() if name not in group}
            return after

        try:
            return stepped({})
        except Exception:
            # Some constructors make state (torch's Adagrad up to 2.11). The constructor gets the defaults, which it has
            # accepted before: a scheduler may have changed the group's entries since.
            taken = inspect.signature(self._cls).parameters.keys() & optimizer.defaults.keys() - {"params"}
            made = self._cls([{**group, "params": [scratch]}], **{name: optimizer.defaults[name] for name in taken})
            if not made.state.get(scratch):
                raise
            return stepped({scratch: dict(made.state[scratch])})


def zero_like(counter: object) -> object:
    """Return a zero of the same type."""
    return torch.zeros_like(counter) if isinstance(counter, Tensor) else type(counter)()


def _describe(state: UserState, staying: Container[int] = ()) -> StateLayout:
    """Describe the layout of existing state, without values whose ``id`` is in ``staying``."""
    values: dict[str, ValueLayout] = {}
    scalars: dict[str, object] = {}
    left_out = []
    for name, value in state.items():
        if not any(one.dim() for one in tensors_in(value)):
            scalars[name] = value
        elif not isinstance(value, Tensor) or id(value) in staying:
            left_out.append(name)
        else:
            try:
                values[name] = describe_value(value)
            except NotUnderstoodError:
                left_out.append(name)
    return StateLayout(values, scalars, tuple(left_out))


def _laid_out_as(like: Tensor, layout: StateLayout, shape: tuple[int, ...]) -> StateLayout:
    """Return ``layout`` with values of ``shape`` laid out as ``like``; others, of unknown meaning, are left out."""
    values = {}
    for name, value in layout.values.items():
        if [leaf.shape for leaf in value.leaves] == [shape]:
            own = torch.empty_like(local_shard(like), dtype=value.leaves[0].dtype, device="meta")
            values[name] = describe_value(over_local(like, own))
    others = [name for name in layout.values if name not in values]
    return StateLayout(values, layout.scalars, (*layout.left_out, *others))


def _random(like: Tensor, generator: torch.Generator) -> Tensor:
    """Return normally distributed numbers, or zeros if the dtype has no fractions."""
    local = torch.empty_like(local_shard(like)).detach()
    takes_fractions = local.dtype.is_floating_point or local.dtype.is_complex
    return over_local(like, local.normal_(generator=generator) if takes_fractions else local.zero_())


def _copied(values: Mapping[str, Any], copies: dict[int, Any]) -> dict[str, Any]:
    """Copy values that a step may write. ``copies``: replacements by ``id``, as for ``deepcopy``."""
    found = dict(values)
    for name, value in values.items():
        library = type(value).__module__.partition(".")[0]
        of_torch = library == "torch" and not isinstance(value, Tensor | torch.Generator)  # groups of processes, ...
        if not (of_torch or isinstance(value, nn.Module | Optimizer | types.MethodType | types.ModuleType)):
            found[name] = copy.deepcopy(value, copies)
    return found
