"""Small optimizers like the user's, on parameters that are thrown away: what a class does is seen on them first.

Nothing that happens to one reaches the real optimizer: groups, attributes and what those hold are copies, and
generators of random numbers are put back afterwards.
"""

import collections
import copy
import inspect
import random
import sys
import types
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..state.layout import is_trained
from ..state.store import UserState
from ..torch_compat.dtensor import compute_device, local_shard
from ..torch_compat.optim import no_global_step_hooks
from .shadow import Shadow, fill_bare
from .shared_values import SharedValues, instance_attributes

_PARAMS = 24
"""So many scratch parameters in all, or one for each group if there are more groups."""

_LARGE = 64
_LARGE_SIZES = (80, 96, 112)
"""A dimension above 64 becomes one of these, in the same order of size: no preconditioner of it takes long, and a
matrix of two of them is of a size that 8-bit optimizers quantize."""

_FEW_ELEMENTS = 1 << 13
_MANY_ELEMENTS = 1 << 15


# Randomness ----------------------------------------------------------------------------------------------------------


@contextmanager
def randomness_kept(device: torch.device) -> Iterator[None]:
    """Leave the generators of torch, numpy and Python as they were; optimizers may draw from any of them."""
    before = random_states(device)
    try:
        yield
    finally:
        restore_random_states(device, before)


def random_states(device: torch.device) -> dict[str, Any]:
    """The states of the global generators, by the name of their library."""
    states: dict[str, Any] = {"torch": torch.get_rng_state(), "Python's random": random.getstate()}
    if device.type not in ("cpu", "meta"):
        states[f"torch's {device.type}"] = torch.get_device_module(device).get_rng_state(device)
    if "numpy" in sys.modules:
        states["numpy"] = sys.modules["numpy"].random.get_state(legacy=False)
    return states


def restore_random_states(device: torch.device, states: Mapping[str, Any]) -> None:
    """Set the generators to what :func:`random_states` has found."""
    torch.set_rng_state(states["torch"])
    random.setstate(states["Python's random"])
    if f"torch's {device.type}" in states:
        torch.get_device_module(device).set_rng_state(states[f"torch's {device.type}"], device)
    if "numpy" in states:
        sys.modules["numpy"].random.set_state(states["numpy"])


# Copies --------------------------------------------------------------------------------------------------------------


class Copier:
    """Copies what a step may write: containers, tensors, generators, and objects that count.

    Models, process groups, functions and whatever else is no counter stay the same objects.
    """

    def __init__(self, known: Mapping[Tensor, Tensor]) -> None:
        """Take what stands for which parameter of the user's."""
        self._done: dict[int, Any] = {id(real): scratch for real, scratch in known.items()}
        self._ids = {id(real): id(scratch) for real, scratch in known.items()}
        self._alive: list[Any] = list(known)
        self.generators: list[Any] = []

    def copy(self, value: Any) -> Any:
        """A copy of ``value``; the same one each time."""
        if isinstance(value, int) and value in self._ids:
            return self._ids[value]  # tables by id(param)
        if value is None or isinstance(value, bool | int | float | complex | str | bytes | type | types.FunctionType):
            return value
        if id(value) not in self._done:
            self._alive.append(value)  # or its id might be used again
            self._done[id(value)] = value  # within itself, until it is copied
            self._done[id(value)] = self._copy(value)
        return self._done[id(value)]

    def _copy(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            copied = value.detach().clone()  # of an average of the weights, say
            return nn.Parameter(copied, value.requires_grad) if isinstance(value, nn.Parameter) else copied
        if isinstance(value, torch.Generator | random.Random):
            self.generators.append(value.clone_state() if isinstance(value, torch.Generator) else copy.deepcopy(value))
            return self.generators[-1]
        if isinstance(value, np.random.Generator):
            self.generators.append(copy.deepcopy(value))
            return self.generators[-1]
        kind = type(value)
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return kind(*(self.copy(one) for one in value))
        if kind in (list, tuple, set, frozenset, collections.deque):
            return kind(self.copy(one) for one in value)
        if kind is defaultdict:
            return defaultdict(value.default_factory, ((self.copy(k), self.copy(v)) for k, v in value.items()))
        if kind in (dict, collections.OrderedDict):
            return kind((self.copy(key), self.copy(one)) for key, one in value.items())
        if kind.__module__.partition(".")[0] == "numpy":
            return copy.deepcopy(value)
        return self._copy_object(value) if is_counter(value) else value

    def _copy_object(self, value: Any) -> Any:
        try:
            made = copy.copy(value)
        except Exception:  # noqa: BLE001  # locks, handles, ...: whatever cannot be copied is not a counter
            return value
        if made is not value:
            self._done[id(value)] = made
            made.__dict__.update((name, self.copy(one)) for name, one in value.__dict__.items())
        return made


def is_counter(value: object) -> bool:
    """Return whether an object may hold what a step counts: one of a plain class that keeps attributes."""
    others = (nn.Module, Optimizer, types.ModuleType, types.FunctionType, types.MethodType, type)
    if isinstance(value, others) or not hasattr(value, "__dict__"):
        return False
    return type(value).__module__.partition(".")[0] != "torch"


# The optimizer -------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Scratch:
    """A small optimizer: groups, attributes and state of its own.

    Attributes:
        cls: whose ``step`` it runs.
        values: has the attributes, and ``param_groups`` without parameters, of the optimizer it stands for.
        params: for each group.
        states: of those that have any.
        generators: of random numbers that its attributes hold.
    """

    cls: type[Optimizer]
    values: types.SimpleNamespace
    params: list[list[Tensor]]
    states: dict[Tensor, UserState] = field(default_factory=dict)
    generators: list[Any] = field(default_factory=list)

    @property
    def flat(self) -> list[Tensor]:
        """All parameters, group by group."""
        return [param for of_group in self.params for param in of_group]

    def step_whole(self) -> None:
        """One step as a plain optimizer makes it, which sees everything."""
        plain = object.__new__(self.cls)
        groups = zip(self.values.param_groups, self.params, strict=True)
        given = [{**group, "params": params} for group, params in groups]
        state: defaultdict[Tensor, UserState] = defaultdict(dict, self.states)
        fill_bare(plain, {**instance_attributes_of(self.values), "param_groups": given, "state": state})
        step = self.cls.step
        unhooked: Callable[..., object] = getattr(step, "__wrapped__", step) if hasattr(step, "hooked") else step
        with no_global_step_hooks():
            unhooked(plain)
        foreign = [key for key in list[object](plain.state) if not isinstance(key, Tensor)]
        if foreign:
            raise RuntimeError(f"it keeps state beside that of parameters (optimizer.state[{foreign[0]!r}])")
        self.states = dict(plain.state)
        self.values = types.SimpleNamespace(**instance_attributes(plain))
        self.values.param_groups = [{k: v for k, v in group.items() if k != "params"} for group in plain.param_groups]

    def step_divided(self, *, all_groups: bool) -> None:
        """Run a step in buckets of one parameter each, for those that have a gradient."""
        shared = SharedValues(
            self.values,  # type: ignore[arg-type]
            [{} for _ in self.params],
            writes_any_entry=True,
            all_groups=all_groups,
        )
        shadow = Shadow(self.cls)
        for number, of_group in enumerate(self.params):
            for param in of_group:
                if param.grad is None:
                    continue
                lists: list[list[Tensor]] = [[] for _ in self.params]
                lists[number] = [param]
                given = {param: self.states[param]} if self.states.get(param) else {}
                self.states.update(shadow.run(shared, lists, given, {}))
        rest = shared.unvisited
        if rest:
            lists = [
                without_gradient(of_group) if number in rest else [] for number, of_group in enumerate(self.params)
            ]
            shadow.run(shared, lists, {}, {}, counting=rest)
        shared.commit(self.values)  # type: ignore[arg-type]


def without_gradient(params: Sequence[Tensor]) -> list[Tensor]:
    """Something that stands for the parameters of a group none of which has a gradient."""
    if not params:
        return []
    local = local_shard(params[0])
    return [torch.zeros((1,) * local.dim(), dtype=local.dtype, device=compute_device(params[0]))]


def instance_attributes_of(values: types.SimpleNamespace) -> dict[str, Any]:
    """The attributes of a scratch optimizer, without its groups."""
    return {name: value for name, value in vars(values).items() if name != "param_groups"}


def like_optimizer(
    cls: type[Optimizer], optimizer: Optimizer, params: list[list[Tensor]], known: Mapping[Tensor, Tensor]
) -> Scratch:
    """A scratch optimizer with the hyperparameters and attributes of ``optimizer``.

    Args:
        cls: the class of ``optimizer`` before it was offloaded.
        optimizer: the user's.
        params: its scratch parameters for each group.
        known: which of them stands for which of the user's.
    """
    copier = Copier(known)
    values = types.SimpleNamespace(**copier.copy(instance_attributes(optimizer)))
    values.param_groups = [
        {name: copier.copy(value) for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]
    _as_in_training(values.param_groups)
    return Scratch(cls, values, params, generators=copier.generators)


def _as_in_training(groups: Sequence[dict[str, Any]]) -> None:
    """Set what groups have by the time they train, and may not have yet."""
    for number, group in enumerate(groups):
        if "train_mode" in group:
            group["train_mode"] = True  # schedulefree's optimizers step in train mode only, and start in the other
        if number and isinstance(group.get("lr"), float | Tensor):
            group["lr"] = group["lr"] * (1 - 0.5 * number / len(groups))  # a scheduler may tell them apart later


_MOST_GROUPS = 16


def some_groups_of(cls: type[Optimizer], optimizer: Optimizer) -> Optimizer:
    """``optimizer``, or something with its attributes and only the first and last of very many param groups."""
    groups = optimizer.param_groups
    if len(groups) <= _MOST_GROUPS:
        return optimizer
    some = object.__new__(cls)
    half = _MOST_GROUPS // 2
    some.__dict__.update({**vars(optimizer), "param_groups": [*groups[:half], *groups[-half:]]})
    return some


# Parameters ----------------------------------------------------------------------------------------------------------


def scratch_params(optimizer: Optimizer, generator: torch.Generator) -> tuple[list[list[Tensor]], dict[Tensor, Tensor]]:
    """Parameters for each group, and which of the user's some of them stand for.

    They have the shapes of the user's, with large dimensions made smaller, and each twice: classes may treat parameters
    of equal shape together. Groups without parameters stay empty.
    """
    sizes = _small_sizes([param for group in optimizer.param_groups for param in group["params"]])
    kinds = max(1, _PARAMS // (2 * len(optimizer.param_groups)))
    copies = 1 if len(optimizer.param_groups) * 2 > _PARAMS else 2
    made: list[list[Tensor]] = []
    known: dict[Tensor, Tensor] = {}
    for group in optimizer.param_groups:
        of_group: list[Tensor] = []
        for param in _different(group["params"], sizes)[:kinds]:
            alike = [one for one in group["params"] if one.shape == param.shape and one.dtype == param.dtype]
            for real in [param, *(one for one in alike if one is not param), param][:copies]:
                scratch = _scratch_like(real, small_shape(tuple(real.shape), sizes), generator)
                known.setdefault(real, scratch)
                of_group.append(scratch)
        made.append(of_group)
    return made, known


def _different(params: Sequence[Tensor], sizes: Mapping[int, int]) -> list[Tensor]:
    """One parameter of each kind, those with another number of dimensions first."""
    trained = [param for param in params if is_trained(param) and param.numel()]
    kinds: dict[Any, Tensor] = {}
    for param in trained or params:
        kinds.setdefault((small_shape(tuple(param.shape), sizes), param.dtype), param)
    first: dict[int, Tensor] = {}
    for param in kinds.values():
        first.setdefault(param.dim(), param)
    chosen = list(first.values())
    return chosen + [param for param in kinds.values() if not any(param is one for one in chosen)]


def _small_sizes(params: Sequence[Tensor]) -> dict[int, int]:
    large = sorted({size for param in params for size in param.shape if size > _LARGE})
    return {size: _LARGE_SIZES[min(place, len(_LARGE_SIZES) - 1)] + size % 2 for place, size in enumerate(large)}


def small_shape(shape: tuple[int, ...], sizes: Mapping[int, int]) -> tuple[int, ...]:
    """``shape`` if it is small, else with large ones made smaller. Equal ones stay equal, smaller ones smaller."""
    if torch.Size(shape).numel() <= _FEW_ELEMENTS:
        return tuple(max(1, size) for size in shape)
    small = [max(1, sizes.get(size, size)) for size in shape]
    while torch.Size(small).numel() > _MANY_ELEMENTS:
        largest = max(small)
        small = [size // 2 if size == largest else size for size in small]
    return tuple(small)


def _scratch_like(param: Tensor, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    data = torch.empty(shape, dtype=param.dtype, device=compute_device(param))
    scratch = nn.Parameter(random_values(data, generator), requires_grad=takes_fractions(data))
    # What the user has noted on a parameter (`param.use_muon = True`) may decide what is done with it.
    scratch.__dict__.update(notes_on(param, shape))
    return scratch


def notes_on(param: Tensor, shape: tuple[int, ...]) -> dict[str, Any]:
    """Copies of what the user has noted on a parameter, for one of this shape: tensors only if they have it too."""
    copier = Copier({})
    return {
        name: copier.copy(value)
        for name, value in vars(param).items()
        if not isinstance(value, Tensor) or tuple(value.shape) == shape
    }


def takes_fractions(tensor: Tensor) -> bool:
    """Return whether ``tensor`` may hold anything but whole numbers."""
    return tensor.dtype.is_floating_point or tensor.dtype.is_complex


def random_values(tensor: Tensor, generator: torch.Generator) -> Tensor:
    """Fill ``tensor`` with normally distributed numbers, or with zeros if it takes no fractions."""
    if takes_fractions(tensor):
        return tensor.normal_(generator=generator)
    return tensor.zero_()


def constructed_like(cls: type[Optimizer], optimizer: Optimizer, params: list[list[Tensor]]) -> Scratch:
    """A scratch optimizer that the constructor of ``cls`` has made, for classes that make their state there.

    With the arguments that the user's was made with: a scheduler may have moved hyperparameters to where the
    constructor does not accept them. Groups keep their own, which constructors do not look at.
    """
    groups = [
        {**{name: value for name, value in group.items() if name != "params"}, "params": of_group}
        for group, of_group in zip(optimizer.param_groups, params, strict=True)
    ]
    made = cls(groups, **constructor_options(cls, optimizer.defaults))
    values = types.SimpleNamespace(**instance_attributes(made))
    values.param_groups = [{k: v for k, v in group.items() if k != "params"} for group in made.param_groups]
    for name, value in instance_attributes(optimizer).items():
        if value is None or isinstance(value, bool | int | float | str):
            setattr(values, name, value)  # a switch that the user has set since
    _as_in_training(values.param_groups)
    return Scratch(cls, values, params, dict(made.state))


def constructor_options(cls: type[Optimizer], values: Mapping[str, Any]) -> dict[str, Any]:
    """Those of ``values`` that the constructor of ``cls`` takes by name."""
    return {name: values[name] for name in inspect.signature(cls).parameters.keys() & values.keys() - {"params"}}


# The real one --------------------------------------------------------------------------------------------------------


@contextmanager
def untouched(optimizer: Optimizer) -> Iterator[list[str]]:
    """Guard the real optimizer from what scratch steps may reach: a closure over its parameters, a method bound to it.

    Its parameters have no gradients meanwhile, so that nothing is done to them. Names what was changed all the same;
    what a group says is put back.
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]
    grads = [param.grad for param in params]
    versions = [param._version for param in params]
    groups = [dict(group) for group in optimizer.param_groups]
    numbers = {name: value for name, value in vars(optimizer).items() if isinstance(value, bool | int | float | str)}
    found: list[str] = []
    for param in params:
        param.grad = None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield found
    finally:
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        if versions != [param._version for param in params]:
            found.append("parameters of the real optimizer")
        for group, before in zip(optimizer.param_groups, groups, strict=True):
            changed = [name for name, value in before.items() if group.get(name) is not value]
            if changed or group.keys() != before.keys():
                found.append(f"param groups of the real optimizer ({', '.join(changed)})")
                group.clear()
                group.update(before)
        for name, value in numbers.items():
            if vars(optimizer).get(name) != value:
                found.append(f"the attribute {name!r} of the real optimizer")
                setattr(optimizer, name, value)
