"""Small optimizers like a given one, on parameters that are thrown away, over steps in which much happens.

Nothing that happens to one reaches the real optimizer: groups, attributes and what those hold are copies.
"""

import types
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fsdp_offload.optimizers.scratch import (
    constructor_options,
    notes_on,
    random_states,
    random_values,
    restore_random_states,
    takes_fractions,
    values_like,
)
from fsdp_offload.optimizers.shadow import fill_bare
from fsdp_offload.optimizers.shared_values import instance_attributes
from fsdp_offload.state.layout import is_trained
from fsdp_offload.state.store import UserState
from fsdp_offload.torch_compat.dtensor import compute_device
from fsdp_offload.torch_compat.optim import no_global_step_hooks, plain_step_of

_PARAMS = 24
"""So many scratch parameters in all, or one for each group if there are more groups."""

_LARGE = 64
_LARGE_SIZES = (80, 96, 112)
"""A dimension above 64 becomes one of these, in the same order of size: no preconditioner of it takes long, and a
matrix of two of them is of a size that 8-bit optimizers quantize."""

_FEW_ELEMENTS = 1 << 13
_MANY_ELEMENTS = 1 << 15


STEPS = 12
_JUMPS = (99, 2_519, 9_999, 65_535)
"""Counters of steps are set to these, as some classes begin something after a warm-up or do it every so often: 2,520 is
a multiple of all numbers to 10 and of many above, 65,536 of the powers of two."""


class NoStartError(Exception):
    """The text is the reason."""


class Trial:
    """The scratch steps of one optimizer."""

    def __init__(self, cls: type[Optimizer], optimizer: Optimizer) -> None:
        self._cls = cls
        self._optimizer = _some_groups_of(cls, optimizer)
        self._device = compute_device(optimizer.param_groups[0]["params"][0])
        self._random = random_states(self._device)
        self._construct = False
        problem = self._problem_of_a_step()
        if problem is not None:  # perhaps the class needs its constructor, which may make the state of its parameters
            self._construct = True
            if self._problem_of_a_step() is not None:
                message = f"its step fails on scratch tensors ({type(problem).__name__}: {problem})"
                raise NoStartError(message) from problem

    def start(self) -> "Scratch":
        """Make the scratch optimizer, the same every time, and with the same random numbers from here on."""
        restore_random_states(self._device, self._random)
        params, known = _scratch_params(self._optimizer, torch.Generator(self._device).manual_seed(0))
        if self._construct:
            return _constructed_like(self._cls, self._optimizer, params)
        values = values_like(self._optimizer, known)
        _as_in_training(values.param_groups)
        return Scratch(self._cls, values, params)

    def _problem_of_a_step(self) -> Exception | None:
        try:
            scratch = self.start()
            self.give_gradients(scratch, 0)
            scratch.step_whole()
        except Exception as error:  # noqa: BLE001  # whatever a foreign step raises is the answer
            return error
        return None

    def give_gradients(self, scratch: "Scratch", step: int) -> None:
        """Give every parameter its gradient of this step."""
        generator = torch.Generator(self._device).manual_seed(1 + step)
        for param in scratch.flat:
            param.grad = random_values(torch.empty_like(param), generator)

    def steps_of(self, scratch: "Scratch", count: int) -> Iterator[int]:
        """Numbers of steps to make; between the last ones, counters jump ahead."""
        before: dict[_Place, float] = {}
        for step in range(count):
            before = _numbers_in(scratch)
            yield step
        counters = [place for place, value in _numbers_in(scratch).items() if before.get(place) == value - 1 < 1e9]
        for jump in _JUMPS:
            _advance(scratch, counters, jump)
            yield from (jump, jump + 1)


@dataclass(eq=False)
class Scratch:
    """A small optimizer: groups, attributes and state of its own.

    Attributes:
        cls: whose ``step`` it runs.
        values: has the attributes, and ``param_groups`` without parameters, of the optimizer it stands for.
        params: for each group.
        states: of those that have any.
    """

    cls: type[Optimizer]
    values: types.SimpleNamespace
    params: list[list[Tensor]]
    states: dict[Tensor, UserState] = field(default_factory=dict)

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
        fill_bare(plain, {**_attributes_of(self.values), "param_groups": given, "state": state})
        with no_global_step_hooks():
            plain_step_of(self.cls)(plain)
        foreign = [key for key in list[object](plain.state) if not isinstance(key, Tensor)]
        if foreign:
            raise RuntimeError(f"it keeps state beside that of parameters (optimizer.state[{foreign[0]!r}])")
        self.states = dict(plain.state)
        self.values = types.SimpleNamespace(**instance_attributes(plain))
        self.values.param_groups = [{k: v for k, v in group.items() if k != "params"} for group in plain.param_groups]


def _attributes_of(values: types.SimpleNamespace) -> dict[str, Any]:
    """The attributes of a scratch optimizer, without its groups."""
    return {name: value for name, value in vars(values).items() if name != "param_groups"}


def _as_in_training(groups: Sequence[dict[str, Any]]) -> None:
    """Set what groups have by the time they train, and may not have yet."""
    for number, group in enumerate(groups):
        if "train_mode" in group:
            group["train_mode"] = True  # schedulefree's optimizers step in train mode only, and start in the other
        if number and isinstance(group.get("lr"), float | Tensor):
            group["lr"] = group["lr"] * (1 - 0.5 * number / len(groups))  # a scheduler may tell them apart later


_MOST_GROUPS = 16


def _some_groups_of(cls: type[Optimizer], optimizer: Optimizer) -> Optimizer:
    """``optimizer``, or something with its attributes and only the first and last of very many param groups."""
    groups = optimizer.param_groups
    if len(groups) <= _MOST_GROUPS:
        return optimizer
    some = object.__new__(cls)
    half = _MOST_GROUPS // 2
    some.__dict__.update({**vars(optimizer), "param_groups": [*groups[:half], *groups[-half:]]})
    return some


# Parameters ----------------------------------------------------------------------------------------------------------


def _scratch_params(
    optimizer: Optimizer, generator: torch.Generator
) -> tuple[list[list[Tensor]], dict[Tensor, Tensor]]:
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
                scratch = _scratch_like(real, _small_shape(tuple(real.shape), sizes), generator)
                known.setdefault(real, scratch)
                of_group.append(scratch)
        made.append(of_group)
    return made, known


def _different(params: Sequence[Tensor], sizes: Mapping[int, int]) -> list[Tensor]:
    """One parameter of each kind, those with another number of dimensions first."""
    trained = [param for param in params if is_trained(param) and param.numel()]
    kinds: dict[Any, Tensor] = {}
    for param in trained or params:
        kinds.setdefault((_small_shape(tuple(param.shape), sizes), param.dtype), param)
    first: dict[int, Tensor] = {}
    for param in kinds.values():
        first.setdefault(param.dim(), param)
    chosen = list(first.values())
    return chosen + [param for param in kinds.values() if not any(param is one for one in chosen)]


def _small_sizes(params: Sequence[Tensor]) -> dict[int, int]:
    large = sorted({size for param in params for size in param.shape if size > _LARGE})
    return {size: _LARGE_SIZES[min(place, len(_LARGE_SIZES) - 1)] + size % 2 for place, size in enumerate(large)}


def _small_shape(shape: tuple[int, ...], sizes: Mapping[int, int]) -> tuple[int, ...]:
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


def _constructed_like(cls: type[Optimizer], optimizer: Optimizer, params: list[list[Tensor]]) -> Scratch:
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


_Place = tuple[str, Any]


def _holders(scratch: Scratch) -> dict[str, Any]:
    """What a step may count in: the optimizer, its groups, the state of parameters."""
    return {
        "object": vars(scratch.values),
        **{f"group {number}": group for number, group in enumerate(scratch.values.param_groups)},
        **{f"state {number}": scratch.states.get(param, {}) for number, param in enumerate(scratch.flat)},
    }


def _numbers_in(scratch: Scratch) -> dict[_Place, float]:
    return {
        (place, name): float(value)
        for place, holder in _holders(scratch).items()
        for name, value in holder.items()
        if _is_number(value)
    }


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return type(value) is Tensor and value.numel() == 1 and not value.is_complex()
    return isinstance(value, int | float) and not isinstance(value, bool)


def _advance(scratch: Scratch, counters: Sequence[_Place], to: int) -> None:
    holders = _holders(scratch)
    for place, name in counters:
        value = holders[place][name]
        holders[place][name] = torch.full_like(value, to) if isinstance(value, Tensor) else type(value)(to)


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
