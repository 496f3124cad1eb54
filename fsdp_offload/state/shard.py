"""State shards: the part of ``optimizer.state`` that moves, its shapes, and how to rebuild its values.

A *value* is what an optimizer keeps under a name: a plain tensor, a DTensor, or a wrapper subclass (8-bit moments) that
knows its inner tensors. Its *leaves* are the dense plain tensors inside; only leaves are ever copied.
"""

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef

from ..fsdp.dtensor import alias_of, holders_of, local_shard, over_local
from .layout import LeafLayout, StateLayout, forms_of, leaves_of

EntryOf = Callable[[Tensor], dict[str, Any]]


class Reader(ABC):
    """A reader of homes during training, such as the writer of an asynchronous checkpoint."""

    @abstractmethod
    def is_reading(self) -> bool:
        """Return whether the reader may still read the memory that it was given."""

    @abstractmethod
    def wait(self) -> None:
        """Block until the reader has finished."""

    def check_step(self) -> None:  # noqa: B027  # most readers do not train
        """Raise if a step that begins now would wait forever for this reader. The base class never raises."""

    def when_over(self, look: Callable[[], object]) -> None:  # noqa: B027
        """Call ``look`` when the reader has finished, before the homes may be written again.

        The base class does nothing: some readers find writes of other code by themselves.
        """


@dataclass(eq=False)
class ShardHome:
    """Memory for one parameter's state."""

    leaves: dict[str, list[Tensor]]  # dense tensors over it, by state name
    values: dict[str, Tensor]  # what ``optimizer.state[param]`` holds for each name, over ``leaves``
    weights: Tensor | None = None  # the parameter's local shard, where this is the home of a parameter and of no state
    stand_in: Tensor | None = None  # the DTensor over ``weights`` that counts writes through the parameter
    readers: list[Reader] = field(default_factory=list)  # some of them may have finished
    own_references: dict[str, int] = field(default_factory=dict)  # by name: reference count while no one else holds it
    handed_out: dict[str, list[list[TensorWeakRef]]] = field(default_factory=dict)  # by name, aliases of its leaves

    def references(self, name: str) -> int:
        """Count references to the tensors of ``name`` and views of their memory."""
        leaves = self.leaves[name]
        count = 0 if leaves[0] is self.values[name] else sys.getrefcount(self.values[name])
        for leaf in leaves:
            count += sys.getrefcount(leaf) + holders_of(leaf)
        return count

    def own(self, names: Iterable[str]) -> None:
        """Count present references to tensors of ``names`` as ours: only later references count as others'."""
        self.own_references.update((name, self.references(name)) for name in names)

    def is_held(self, entries: Sequence[Mapping[str, Any]] = ()) -> bool:
        """Return whether anything but ``entries`` of the optimizer's state holds tensors over this memory."""
        for name, own in self.own_references.items():
            count = self.references(name)
            count -= sum(entry.get(name) is self.values[name] for entry in entries)
            if count > own:
                return True
            self.own_references[name] = count
        return False

    def all_leaves(self) -> Iterator[Tensor]:
        if self.weights is not None:
            yield self.weights
        for leaves in self.leaves.values():
            yield from leaves

    def is_read(self) -> bool:
        if self.readers:
            self.readers = [reader for reader in self.readers if reader.is_reading()]
        return bool(self.readers)

    def wait_unread(self) -> None:
        for reader in self.readers:
            reader.wait()
        self.readers = [reader for reader in self.readers if reader.is_reading()]


@dataclass(eq=False)
class Housed(ABC):
    """Base class of data stored in host memory, optionally with a spare home: a parameter, or its state."""

    all_homes: list[ShardHome] = field(default_factory=list, kw_only=True)  # the home, and a spare one if there is room
    which: int = field(default=0, kw_only=True)  # which of them is the home now

    @property
    def home(self) -> ShardHome:
        return self.all_homes[self.which]

    @property
    def spare(self) -> ShardHome | None:
        return self.all_homes[1 - self.which] if len(self.all_homes) > 1 else None

    @property
    @abstractmethod
    def leaf_layouts(self) -> list[LeafLayout]:
        """Return the layouts of all leaves, value by value, in the order in which a bucket stores them."""

    @abstractmethod
    def home_over(self, leaves: Sequence[Tensor]) -> ShardHome:
        """Return a home over ``leaves``, one for each leaf layout."""

    @abstractmethod
    def moved(self, old: ShardHome, entry_of: EntryOf) -> None:
        """Make users see ``home`` in place of ``old``. ``entry_of`` returns a parameter's entry of optimizer.state."""

    def move(self, entry_of: EntryOf) -> None:
        """Make the spare home the home, without a copy."""
        old, self.which = self.home, 1 - self.which
        self.moved(old, entry_of)


@dataclass(eq=False)
class StateShard(Housed):
    """One parameter's state on this rank."""

    param: Tensor  # the optimizer's, a key of ``optimizer.state``
    name: str  # FQN, or the place in ``param_groups``; for messages
    on_locals: bool  # the optimizer runs on this rank's local tensors; otherwise it sees ``param`` itself
    cuttable: bool  # it may be updated in flat ranges
    layout: StateLayout  # learnt before the state exists
    group: int  # which of ``optimizer.param_groups`` the parameter is in
    together: int = 0  # equal for gradients that are final at the same time: only their state shares buckets
    on_host: bool = False  # it is updated on the host, in its home
    existed: bool = False  # the optimizer has created this state; its dtypes are fixed from then on
    buckets: list[int] = field(default_factory=list)

    @property
    def local_numel(self) -> int:
        return local_shard(self.param).numel()

    @property
    def leaf_layouts(self) -> list[LeafLayout]:
        return [leaf for value in self.layout.values.values() for leaf in value.leaves]

    @property
    def nbytes(self) -> int:
        """Return the bytes of the state, without padding."""
        return sum(leaf.nbytes for leaf in self.leaf_layouts)

    @property
    def homes(self) -> dict[str, Tensor]:
        """Return the tensors that ``optimizer.state[param]`` holds, by name."""
        return self.all_homes[self.which].values

    def values_at(self, which: int, start: int, stop: int) -> dict[str, Tensor]:
        """Return elements ``[start, stop)`` of the state in home ``which``, as the optimizer sees them."""
        home = self.all_homes[which]
        if not self.on_locals:
            return dict(home.values)
        if stop - start == self.local_numel:
            return {name: leaves[0] for name, leaves in home.leaves.items()}
        return {name: leaves[0].view(-1)[start:stop] for name, leaves in home.leaves.items()}

    def home_over(self, leaves: Sequence[Tensor]) -> ShardHome:
        remaining = iter(leaves)
        by_name = {name: [next(remaining) for _ in value.leaves] for name, value in self.layout.values.items()}
        return ShardHome(by_name, {name: self._value_over(name, of_value) for name, of_value in by_name.items()})

    def moved(self, old: ShardHome, entry_of: EntryOf) -> None:
        state = entry_of(self.param)
        state |= {name: home for name, home in self.homes.items() if state.get(name) is old.values[name]}

    def held_without(self, state: Mapping[str, Any], before: Mapping[str, Any]) -> list[str]:
        """Name the tensors of the home that others hold, though ``state`` has none over the same memory.

        ``state`` is the entry of ``optimizer.state``, or will be, in place of ``before``, which does not count.
        """
        home, own = self.home, self.home.own_references
        found = []
        for name in home.values:
            given, memory = leaves_of(state.get(name)), [leaf.data_ptr() for leaf in home.leaves[name]]
            is_over = [leaf.data_ptr() for leaf in given] == memory
            del given  # references that are left would count as others'
            count = 0 if is_over else home.references(name) - (before.get(name) is home.values[name])
            if count > own.get(name, sys.maxsize):
                found.append(name)
        return found

    def leave(self, names: Iterable[str]) -> None:
        """Leave the tensors of ``names`` to those who hold them, with memory of their own; the home gets new ones.

        They are no state any more, which a step would change: the user may put them back later.
        """
        home = self.home
        for name in names:
            leaves = home.leaves[name]
            # ``data``: each counts its own writes from now on. As ``Region.range`` makes them, with as many references.
            own = [leaf.data.as_strided(leaf.shape, leaf.stride()) if leaf.nbytes else leaf.data for leaf in leaves]
            home.leaves[name], home.values[name] = own, self._value_over(name, own)  # first: an interrupt may come
            for leaf in leaves:
                leaf.data = leaf.clone()
            for aliases in home.handed_out.pop(name, ()):
                _lay_over(leaves, aliases)

    def carry_over(self, old: ShardHome, state: Mapping[str, Any]) -> None:
        """Lay tensors that others hold over ``old`` over the home, which has their values now: they stay state.

        ``state`` is the entry of ``optimizer.state`` from before. What it did not have is no state any more, and stays
        where it is, as does what has another form now.
        """
        home = self.home
        for name in old.values.keys() & home.values.keys():
            if state.get(name) is not old.values[name] or forms_of(old.values[name]) != forms_of(home.values[name]):
                continue
            for aliases in ([*map(TensorWeakRef, old.leaves[name])], *old.handed_out.get(name, ())):
                _lay_over(home.leaves[name], aliases)
                home.handed_out.setdefault(name, []).append(aliases)

    def handed_out(self, name: str) -> Tensor:
        """Return another tensor over the home of ``name``, with its own reference count; writes count for both."""
        value = self.homes[name]
        if type(local_shard(value)) is Tensor:
            value = alias_of(value)
            leaves = [local_shard(value)]
        else:
            leaves = [leaf.detach() for leaf in self.home.leaves[name]]
            value = self._value_over(name, leaves)
        known = self.home.handed_out.get(name, ())
        alive = [aliases for aliases in known if any(alias() is not None for alias in aliases)]
        self.home.handed_out[name] = [*alive, [*map(TensorWeakRef, leaves)]]
        return value

    def on_device(self, name: str, device: torch.device, *, non_blocking: bool = False) -> Tensor:
        """Copy the value ``name`` to ``device``, as the type that the optimizer made."""
        leaves = [leaf.to(device, non_blocking=non_blocking, copy=True) for leaf in self.home.leaves[name]]
        return self._value_over(name, leaves)

    def _value_over(self, name: str, leaves: Sequence[Tensor]) -> Tensor:
        built = self.layout.values[name].build(leaves)
        return over_local(self.param, built) if self.on_locals else built


def _lay_over(leaves: Iterable[Tensor], aliases: Iterable[TensorWeakRef]) -> None:
    """Give ``aliases`` that still exist the memory of ``leaves``."""
    for leaf, alias in zip(leaves, aliases, strict=True):
        if (held := alias()) is not None:
            held.data = leaf.data
