"""The state that an optimizer will keep, learnt by a step on scratch tensors before it keeps anything.

Everything here runs at attach (or when a hyperparameter that decides the layout changes). Nothing that happens to
scratch tensors reaches the real optimizer, and generators of random numbers are left as they were.
"""

import collections
import inspect
import io
import numbers
import pickle
import random
import sys
import types
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..fsdp.dtensor import compute_device, has_inner_tensors, is_dtensor, local_shard, over_local, placements_of
from ..state.layout import NotUnderstoodError, StateLayout, ValueLayout, describe_value, tensors_in
from ..state.store import UserState
from .bucket_update import step_shadow
from .capabilities import Capabilities, LogicalStep
from .shared_values import SharedValues, entries_of, instance_attributes

LayoutKey = tuple[tuple[str, str], ...]
"""Of a param group: see :func:`layout_key`."""

_NO_SWITCHES = frozenset({"params", "param_names", "train_mode"})


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
        self._new_entries = dict(
            capabilities.conventions.group_counters
        )  # of param groups, as a first step leaves them
        self._learnt: dict[Any, StateLayout] = {}

    def count(self, names: Iterable[str]) -> None:
        """Note entries of param groups that a step has changed: they decide no layout, now or in what was learnt."""
        self.counters.update(names)

        def without(key: Any) -> Any:
            return (tuple(entry for entry in key[0] if entry[0] not in self.counters), *key[1:])

        self._learnt = {without(key): layout for key, layout in self._learnt.items()}

    def group_counters_at_zero(self) -> dict[str, object]:
        """Numbers that param groups get in the first step only (``group["step"]``), as they are before it."""
        return {
            name: zero_like(value)
            for name, value in self._new_entries.items()
            if isinstance(value, int | float | Tensor)
        }

    def of_existing(self, param: Tensor, state: UserState) -> StateLayout:
        """Describe the layout of state that the optimizer has created already."""
        layout = _describe(state, self.staying)
        if not self.capabilities.elementwise:
            return layout
        local, values, left_out = local_shard(param), {}, list(layout.left_out)
        for name, value in layout.values.items():
            if [leaf.shape for leaf in value.leaves] == [tuple(local.shape)]:
                values[name] = _layout_like(local, value.leaves[0].dtype)
            else:
                left_out.append(name)  # not the optimizer's own: something the user keeps there
        return StateLayout(values, layout.scalars, tuple(left_out))

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
        # A class that nobody knows may look at plain values that the user has written on a parameter.
        plain = [(name, value) for name, value in vars(param).items() if isinstance(value, bool | int | float | str)]
        key = (
            layout_key(group, self.counters),
            param.shape,
            local.shape,
            local.stride(),
            local.dtype,
            placements_of(param),
            () if self.capabilities.known else tuple(sorted(plain)),
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
        conventions, on_locals = capabilities.conventions, capabilities.elementwise
        initial = conventions.initial_state(optimizer, param)
        if initial is not None:
            return _describe(conventions.without_dispensable(param, initial))
        device, local = compute_device(param), local_shard(param)
        generator = torch.Generator(device).manual_seed(0)
        if capabilities.state_like_param:
            shape = (8, 8) if param.dim() == 2 else (64,)
            scratch = _random(torch.empty(shape, dtype=local.dtype, device=device), generator)
        else:
            scratch = _random(local if capabilities.trusted and on_locals else param, generator)
        if not capabilities.known:  # it may look at anything that is true of a parameter
            scratch = nn.Parameter(scratch, param.requires_grad)
            noted = {n: v for n, v in vars(param).items() if not isinstance(v, Tensor) or v.shape == param.shape}
            scratch.__dict__.update(copied(noted, {}))
        grad = scratch
        if is_dtensor(scratch) and has_inner_tensors(scratch):  # fully_shard reduces gradients as plain tensors
            like = local_shard(scratch)
            grad = over_local(scratch, torch.empty(like.shape, dtype=like.dtype, device=like.device))
        conventions.hand_gradient(scratch, _random(grad, generator))
        with randomness_kept(device), torch.no_grad():
            after, entries = self._first_step(optimizer, param, scratch, group)
        self._new_entries.update((name, value) for name, value in entries.items() if name not in group)
        if scratch not in after:
            return StateLayout({})
        state = conventions.without_dispensable(scratch, after[scratch])
        tensors = {name: value for name, value in state.items() if isinstance(value, Tensor) and value.dim()}
        others = [name for name, value in tensors.items() if value.shape != scratch.shape]
        if capabilities.state_like_param:
            assert not others, f"state {others} does not look like its parameter"
            like = local if on_locals else param
            values = {name: _layout_like(like, value.dtype) for name, value in tensors.items()}
            return StateLayout(values, {name: value for name, value in state.items() if name not in tensors})
        if others and capabilities.trusted and on_locals:
            raise ValueError(f"its state {others} has not one number for each element")
        return _describe(state)

    def _first_step(
        self, optimizer: Optimizer, param: Tensor, scratch: Tensor, group: Mapping[str, Any]
    ) -> tuple[dict[Tensor, UserState], dict[str, Any]]:
        """The state after a first step on ``scratch`` alone, which stands for ``param``; what it changed in groups."""
        if self.capabilities.known:
            return self._step(optimizer, param, scratch, group, self._made(optimizer, scratch, group))
        try:
            return self._step(optimizer, param, scratch, group, {})
        except Exception:
            if not (before := self._made(optimizer, scratch, group)):
                raise
            return self._step(optimizer, param, scratch, group, before)

    def _made(self, optimizer: Optimizer, scratch: Tensor, group: Mapping[str, Any]) -> UserState:
        """State that the constructor makes before the first step: torch's Adagrad up to 2.11, and others."""
        # It gets the arguments that it has accepted before: a scheduler may have moved what is in the group.
        own = {name: value for name, value in group.items() if name != "params"}
        taken = inspect.signature(self._cls).parameters.keys() & optimizer.defaults.keys() - {"params"}
        made = self._cls([{**own, "params": [scratch]}], **{name: optimizer.defaults[name] for name in taken})
        return dict(made.state.get(scratch, {}))

    def _step(
        self, optimizer: Optimizer, param: Tensor, scratch: Tensor, group: Mapping[str, Any], before: UserState
    ) -> tuple[dict[Tensor, UserState], dict[str, Any]]:
        groups = entries_of(optimizer)
        values: Any = types.SimpleNamespace()
        vars(values).update(copied({**instance_attributes(optimizer), "param_groups": groups}, {param: scratch}))
        # schedulefree's optimizers step in train mode only, and start in the other.
        pinned = [{"train_mode": True} if "train_mode" in one else {} for one in groups]
        shared = SharedValues(values, LogicalStep({}, pinned), writes_any_entry=True)
        lists = [[scratch] if one is group else [] for one in optimizer.param_groups]
        after = step_shadow(self._cls, shared, lists, {scratch: before} if before else {})
        return after, shared.changed_entries


def zero_like(counter: object) -> object:
    """A counter of the same kind that has counted nothing."""
    return torch.zeros_like(counter) if isinstance(counter, Tensor) else type(counter)()


def _describe(state: UserState, staying: Container[int] = ()) -> StateLayout:
    """Describe the layout of state that exists, without values whose ``id`` is among those that are ``staying``."""
    values: dict[str, ValueLayout] = {}
    scalars: dict[str, object] = {}
    left_out = []
    for name, value in state.items():
        if isinstance(value, Tensor) and value.dim():
            try:
                if id(value) in staying:
                    raise NotUnderstoodError
                values[name] = describe_value(value)
            except NotUnderstoodError:
                left_out.append(name)
        elif any(one.dim() for one in tensors_in(value)):
            left_out.append(name)
        else:
            scalars[name] = value
    return StateLayout(values, scalars, tuple(left_out))


def _layout_like(tensor: Tensor, dtype: torch.dtype) -> ValueLayout:
    return describe_value(over_local(tensor, torch.empty_like(local_shard(tensor), dtype=dtype, device="meta")))


def _random(like: Tensor, generator: torch.Generator) -> Tensor:
    """Normally distributed numbers, or zeros where the dtype takes no fractions."""
    local = torch.empty_like(local_shard(like)).detach()
    takes_fractions = local.dtype.is_floating_point or local.dtype.is_complex
    return over_local(like, local.normal_(generator=generator) if takes_fractions else local.zero_())


# Left as it was -------------------------------------------------------------------------------------------------------


@contextmanager
def randomness_kept(device: torch.device) -> Iterator[None]:
    """Leave the generators of torch, numpy and Python as they were; optimizers may draw from any of them."""
    numpy = sys.modules["numpy"].random if "numpy" in sys.modules else None
    of_python, of_numpy = random.getstate(), numpy and numpy.get_state(legacy=False)
    devices = [] if device.type in ("cpu", "meta") else [device]
    with torch.random.fork_rng(devices, device_type=devices[0].type if devices else "cuda"):
        try:
            yield
        finally:
            random.setstate(of_python)
            if numpy:
                numpy.set_state(of_numpy)


def copied(value: Any, known: Mapping[Tensor, Tensor]) -> Any:
    """Copy what a step may write; ``known``: which scratch parameter stands for which of the user's."""
    file = io.BytesIO()
    copier = _Copier(file, known)
    copier.dump(value)
    file.seek(0)
    loader: Any = pickle.Unpickler(file)
    loader.persistent_load = copier.outside.__getitem__
    return loader.load()


class _Copier(pickle.Pickler):
    """Copies containers, tensors, generators, and objects that count: of a plain class that keeps attributes.

    Models, process groups, functions and whatever else is no counter stay the same objects, outside of the pickle.
    """

    def __init__(self, file: io.BytesIO, known: Mapping[Tensor, Tensor]) -> None:
        super().__init__(file)
        self.outside: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._alive: list[Any] = []  # or an id might be used again
        self._known = {id(real): scratch for real, scratch in known.items()}

    def persistent_id(self, value: Any) -> int | None:
        """Number what is not pickled; ``None`` for what is."""
        is_id = type(value) is int and value in self._known  # in a table by id(param)
        if not is_id and _is_pickled(value):
            return None
        if id(value) not in self._numbers:
            self._alive.append(value)
            self._numbers[id(value)] = len(self.outside)
            self.outside.append(id(self._known[value]) if is_id else self._stand_in(value))
        return self._numbers[id(value)]

    def _stand_in(self, value: Any) -> Any:
        if id(value) in self._known:
            return self._known[id(value)]
        if isinstance(value, Tensor):
            clone = value.detach().clone()  # of an average of the weights, say
            return nn.Parameter(clone, value.requires_grad) if isinstance(value, nn.Parameter) else clone
        return value.clone_state() if isinstance(value, torch.Generator) else value


_PICKLED = {
    *(type(None), bool, int, float, complex, str, bytes, random.Random),
    *(list, tuple, set, frozenset, dict, collections.defaultdict, collections.OrderedDict, collections.deque),
}


def _is_pickled(value: Any) -> bool:
    if type(value) in _PICKLED or (isinstance(value, tuple) and hasattr(value, "_fields")):
        return True
    others = (nn.Module, Optimizer, types.ModuleType, types.FunctionType, types.MethodType, type)
    library = type(value).__module__.partition(".")[0]
    if isinstance(value, others) or library == "torch" or not (hasattr(value, "__dict__") or library == "numpy"):
        return False
    try:
        value.__reduce_ex__(4)
    except Exception:  # noqa: BLE001  # locks, handles, ...: whatever cannot be copied is no counter
        return False
    return True
