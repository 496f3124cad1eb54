"""What a step on parameters that are thrown away may write: copies of an optimizer's groups and attributes.

Nothing that happens to them reaches the real optimizer, and generators of random numbers are put back afterwards.
"""

import collections
import copy
import inspect
import random
import sys
import types
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..torch_compat.dtensor import compute_device, local_shard
from .shared_values import instance_attributes

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
        if isinstance(value, torch.Generator):
            return value.clone_state()
        if isinstance(value, random.Random):
            return copy.deepcopy(value)
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


def without_gradient(params: Sequence[Tensor]) -> list[Tensor]:
    """Something that stands for the parameters of a group none of which has a gradient."""
    if not params:
        return []
    local = local_shard(params[0])
    return [torch.zeros((1,) * local.dim(), dtype=local.dtype, device=compute_device(params[0]))]


def values_like(optimizer: Optimizer, known: Mapping[Tensor, Tensor]) -> types.SimpleNamespace:
    """Copies of the attributes of ``optimizer``, and of its ``param_groups`` without parameters.

    Args:
        optimizer: the user's.
        known: which scratch parameter stands for which of the user's.
    """
    copier = Copier(known)
    values = types.SimpleNamespace(**copier.copy(instance_attributes(optimizer)))
    values.param_groups = [
        {name: copier.copy(value) for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]
    for group in values.param_groups:
        if "train_mode" in group:
            group["train_mode"] = True  # schedulefree's optimizers step in train mode only, and start in the other
    return values


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


def constructor_options(cls: type[Optimizer], values: Mapping[str, Any]) -> dict[str, Any]:
    """Those of ``values`` that the constructor of ``cls`` takes by name."""
    return {name: values[name] for name in inspect.signature(cls).parameters.keys() & values.keys() - {"params"}}
