"""``optimizer.state``: the mapping that users see, and its entries for the engine: looked at, copied, moved home."""

import bisect
import functools
import operator
import sys
import weakref
from collections import defaultdict
from collections.abc import Callable, Container, ItemsView, Iterable, Iterator, Mapping, ValuesView
from ctypes import string_at
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef

from ..fsdp.dtensor import local_shard, over_local, version_of
from ..policy import check_is
from .layout import forms_of, leaves_of
from .shard import StateShard

UserState = dict[str, Any]
Entries = Mapping[Tensor, UserState]

_EXAMPLE: dict[int, object] = {0: object()}
_REFERENCES = sys.getrefcount(dict.get(_EXAMPLE, 0))
"""Reference count, as this Python counts, of a value that only a dict holds."""


class StateStore:
    """``optimizer.state`` as the engine sees it: looking at an entry does not wait for its home."""

    def __init__(self, states: defaultdict[Tensor, UserState]) -> None:
        self._states = states

    def get(self, param: Tensor) -> UserState:
        """Return the state of ``param``, or a new empty dict that is not stored."""
        return dict.get(self._states, param) or {}

    def has(self, param: Tensor) -> bool:
        return param in self._states

    def of(self, param: Tensor) -> UserState:
        """Return the state of ``param``; store an empty dict if it is missing or ``None``."""
        if dict.get(self._states, param) is None:
            dict.pop(self._states, param, None)
        return defaultdict.__getitem__(self._states, param)

    def move_last(self, params: Iterable[Tensor]) -> None:
        """Move the entries of ``params`` behind all others, in this order."""
        for param in params:
            if param in self._states:
                dict.__setitem__(self._states, param, dict.pop(self._states, param))


class OwnCounters(StateStore):
    """Entries of ``states`` with copies of all counters (values without a home) for updates to write."""

    def __init__(self, states: StateStore, shards: Mapping[Tensor, StateShard]) -> None:
        super().__init__(defaultdict(dict))  # the copies
        self.states, self._shards = states, shards

    def get(self, param: Tensor) -> UserState:
        if param not in self._states:
            self.copy([param])
        return super().get(param)

    def of(self, param: Tensor) -> UserState:
        return self.get(param) or super().of(param)

    def copy(self, params: Iterable[Tensor]) -> None:
        """Copy the counters of ``params`` in one operation, before their updates are issued on the current stream."""
        copies, counters = [], []
        for param in params:
            if param in self._states or not (state := self.states.get(param)):
                continue
            self._states[param], homes = (own := dict(state)), self._shards[param].homes
            for name, value in state.items():
                if isinstance(value, Tensor) and value is not homes.get(name):
                    own[name] = torch.empty_like(value)
                    copies.append(own[name])
                    counters.append(value)
        if copies:
            torch._foreach_copy_(copies, counters)

    def alone(self) -> StateStore:
        """Return the copies without the user's entries, for a thread that may outlive the user's entries."""
        return StateStore(self._states)

    def commit(self) -> None:
        """Write the updated copies back to the user's state."""
        targets, sources = [], []
        for param, own in self._states.items():
            state, homes = self.states.of(param), self._shards[param].homes
            for name in state.keys() - own.keys():
                del state[name]
            for name, value in own.items():
                current = state.get(name)
                if name in homes and value is not None:
                    state[name] = homes[name] if current is None else current
                elif (
                    isinstance(value, Tensor)
                    and isinstance(current, Tensor)
                    and (value.shape, value.dtype, value.device) == (current.shape, current.dtype, current.device)
                ):
                    targets.append(current)
                    sources.append(value)
                else:
                    state[name] = value
        if targets:
            torch._foreach_copy_(targets, sources)


Counted = dict[StateShard, tuple[list[object], list[object]]]
"""By shard, :func:`counters_of` an entry."""


def counters_of(state: UserState, homes: Mapping[str, Tensor]) -> tuple[list[object], list[object]]:
    """Return the values of ``state`` without a home, and what changes with a write into one, or another in its place.

    That is a version, and on the CPU the number: versions miss some writes. Keep the values: their ids are in it.
    """
    counters, seen = list[object](), list[object]()
    for name, value in state.items():
        if name in homes:
            continue
        counters.append(value)
        if isinstance(value, Tensor):
            is_number = type(value) is Tensor and value.is_cpu and value.numel() == 1
            number = string_at(value.data_ptr(), value.nbytes) if is_number else None  # item() would be in traces
            seen.append((name, id(value), None if value.is_inference() else value._version, number))
        else:
            seen.append((name, value))
    return counters, seen


# What users see -------------------------------------------------------------------------------------------------------


def _waiting(method: Callable[..., Any]) -> Any:
    """Wrap ``method`` so that it first waits for the home of its parameter or, without one, for all homes."""

    @functools.wraps(method)
    def waiting(self: "OffloadedState", *args: Any) -> Any:
        with self._engine.between_steps():  # until the caller has the entry, and it counts as held
            if args:
                self._engine.wait_home(args[0])
            else:
                self._engine.wait_all_home()
            return method(self, *args)

    return waiting


class OffloadedState(defaultdict[Tensor, UserState]):
    """``optimizer.state`` of an offloaded optimizer: looking at a value waits until its home is up to date."""

    def __init__(self, engine: Any, items: Mapping[Tensor, UserState]) -> None:
        super().__init__(dict, items)
        self._engine = engine  # an Engine, which stores the state
        engine.lending.entries = weakref.ref(self)
        self._offered: dict[int, _Offered] = {}  # by address

    @property
    def unwaited(self) -> StateStore:
        """Return a view of the entries that does not wait, for the engine."""
        return StateStore(self)

    def is_entry_held(self, param: Tensor, *, ours: int = 0) -> bool:
        """Return whether code other than ``ours`` holders of ours has the entry of ``param``, and can see the state."""
        return param in self and sys.getrefcount(dict.get(self, param)) > _REFERENCES + ours

    def offer(self, values: Iterable[Any], homes: Container[int], after: object) -> None:
        """Remember that ``values`` are handed out to load into, after step ``after``; earlier values stay valid.

        Values whose ``id`` is among ``homes``, and earlier values, are referred to weakly: a strong reference would
        count as the user's, and keep memory.
        """
        self._offered = {at: one._replace(refer=TensorWeakRef(value)) for at, one, value in self._there()} | {
            at: _Offered(
                TensorWeakRef(value) if id(value) in homes else functools.partial(operator.getitem, [value], 0),
                _versions(value),
                after,
            )
            for value in values
            if (at := address_of(value))
        }

    def withdraw(self, values: Iterable[Any], *, is_load: bool = False) -> None:
        """Forget that ``values`` were handed out; after a load, mark all others as stale."""
        gone = set(map(address_of, values)) if self._offered else set()
        self._offered = {
            at: one._replace(refer=TensorWeakRef(value), after=STALE if is_load else one.after)
            for at, one, value in self._there()
            if at not in gone
        }

    def _there(self) -> list[tuple[int, "_Offered", Any]]:
        return [(at, one, value) for at, one in self._offered.items() if (value := one.refer()) is not None]

    def __bool__(self) -> bool:
        # torch's state-dict functions run a step to make state only if optimizer.state is empty. Loads into a class
        # that moves as a whole need that step: empty entries, which its train() may leave, do not count.
        return any(super().values()) if self._engine.layouts.capabilities.moves_whole else len(self) > 0

    @property
    def has_offered(self) -> bool:
        return any(one.after is not STALE for one in self._offered.values())

    def offered_after(self, value: object) -> Any:
        """Return after which step ``value`` was handed out; for a plain optimizer, the parameters that had state."""
        return self._offered[address_of(value)].after if self.was_offered(value) else None

    def was_offered(self, value: object) -> bool:
        """Return whether ``value`` shares memory with a live value that was handed out."""
        offered = self._offered.get(address_of(value))
        return offered is not None and offered.refer() is not None

    def is_untouched(self, value: object) -> bool:
        """Return whether ``value`` was handed out and has not been written since."""
        offered = self._offered.get(address_of(value))
        return (
            offered is not None
            and (template := offered.refer()) is not None
            and _versions(template) == offered.versions
        )

    def is_all_untouched(self, among: Iterable[Any] | None = None) -> bool:
        """Return whether values were handed out (``among`` the given ones), and none has been written since."""
        offered = [value for *_, value in self._there()] if among is None else list(filter(self.was_offered, among))
        return bool(offered) and all(map(self.is_untouched, offered))

    def __setitem__(self, key: Tensor, entry: UserState) -> None:
        if isinstance(key, Tensor):  # users add entries by names, with anything in them
            says = "optimizer.state[param] is a dict of the parameter's state"
            check_is(entry, Mapping | None, says, "optimizer.state[param]['exp_avg'] = tensor")
        super().__setitem__(key, entry)

    __getitem__ = _waiting(defaultdict.__getitem__)
    get = _waiting(defaultdict.get)
    pop = _waiting(defaultdict.pop)
    setdefault = _waiting(defaultdict.setdefault)
    popitem = _waiting(defaultdict.popitem)

    def items(self) -> ItemsView[Tensor, UserState]:  # type: ignore[override]
        """Return a view as ``dict.items`` does; each entry is looked up when the iteration reaches it."""
        self._engine.wait_all_home()
        return ItemsView(self)

    def values(self) -> ValuesView[UserState]:  # type: ignore[override]
        """Return a view as ``dict.values`` does; see :meth:`items`."""
        self._engine.wait_all_home()
        return ValuesView(self)

    def __iter__(self) -> Iterator[Tensor]:
        # Overridden so that dict(state), {**state} and update(state) look up each entry, instead of copying the table.
        return super().__iter__()

    def copy(self) -> defaultdict[Tensor, UserState]:  # type: ignore[override]
        """Return a plain ``defaultdict``, which no longer waits."""
        return defaultdict(dict, self.items())

    __copy__ = copy  # type: ignore[assignment]

    def __or__(self, other: Any) -> Any:
        return self.copy() | other

    def __ror__(self, other: Any) -> Any:
        return other | self.copy()

    def __reduce__(self) -> Any:
        return self.copy().__reduce__()

    def __repr__(self) -> str:
        return repr(self.copy())


class _Offered(NamedTuple):
    """A value that was handed out to load into: its versions then, and the step ``after`` which it was."""

    refer: Callable[[], Any]
    versions: tuple[int, ...]
    after: Any


STALE = frozenset[Any]()
"""Stands for the step of values that a later load has made stale."""


def address_of(value: object) -> int:
    """Return the address at which the memory of ``value`` begins; 0 if it has none."""
    leaves = leaves_of(value)
    return leaves[0].data_ptr() if leaves and leaves[0].numel() else 0


def _versions(value: Tensor) -> tuple[int, ...]:
    """Return counters that change with each write into ``value``, its local tensor, or that tensor's leaves."""
    return (*version_of(value), *(leaf._version for leaf in leaves_of(value)))


# Homes for what others made: state from before attaching, loaded, or exchanged by the user ----------------------------


def is_exchanged(shard: StateShard, state: UserState) -> bool:
    """Return whether ``state`` holds another tensor where a home should be."""
    for name, home in shard.homes.items():  # noqa: SIM110  # a generator would cost as much as all the rest of a step
        if state.get(name, home) is not home:
            return True
    return False


def adopt(entries: Iterable[tuple[StateShard, UserState]]) -> None:
    """Copy tensors that replaced homes in ``optimizer.state`` into those homes, and put the homes back.

    Everything is checked before anything is written. A source that is itself a home (states that were swapped between
    parameters) is read before it is overwritten. ``None`` counts as absent: SGD resets its momentum so.

    Raises:
        ValueError: a tensor has another shape or dtype than its place; nothing has changed.
    """
    exchanged = [
        (shard, state, name, state[name])
        for shard, state in entries
        for name, home in shard.homes.items()
        if state.get(name) is not None and state[name] is not home
    ]
    for shard, _, name, value in exchanged:
        wanted, got = forms_of(shard.homes[name]), forms_of(value)
        if got != wanted:
            raise ValueError(
                f"optimizer.state[{shard.name}][{name!r}]: expected local tensors {wanted}, got {got}. Put a tensor of "
                "that shape and dtype there, or delete optimizer.state[param] as a whole. Nothing has been changed."
            )
    overwritten = sorted(span_of(leaf) for shard, _, name, _ in exchanged for leaf in shard.home.leaves[name])
    copies: list[tuple[Tensor, Tensor]] = []
    for shard, _, name, value in exchanged:
        for source, target in zip(leaves_of(value), leaves_of(shard.homes[name]), strict=True):
            if source.data_ptr() != target.data_ptr() or source.stride() != target.stride():
                begin, end = span_of(source)
                last = bisect.bisect_left(overwritten, (end, 0)) - 1  # spans of homes do not overlap
                copies.append((source.clone() if last >= 0 and begin < overwritten[last][1] else source, target))
    while copies:
        source, target = copies.pop()
        target.copy_(source)
        del source, target  # references that are left would count as the user's
    for shard, state, name, _ in exchanged:
        state[name] = shard.homes[name]


def apart(loaded: Entries, shards: Mapping[Tensor, StateShard]) -> dict[Tensor, UserState]:
    """Copy values of ``loaded`` that lie in another parameter's home: a load may write that before it reads them."""
    homes = sorted((*span_of(leaf), id(shard)) for shard in shards.values() for leaf in shard.home.all_leaves())

    def own(value: Any, shard: StateShard) -> Any:
        for begin, end in map(span_of, leaves_of(value)):
            last = homes[bisect.bisect_left(homes, (end, 0, 0)) - 1]  # spans of homes do not overlap
            if begin < last[1] and last[0] < end and last[2] != id(shard):
                return over_local(value, local_shard(value).clone())
        return value

    return {
        param: {name: own(value, shards[param]) if homes else value for name, value in saved.items()}
        for param, saved in loaded.items()
    }


def span_of(tensor: Tensor) -> tuple[int, int]:
    """Return the first address of the memory of ``tensor``, and the address behind its last byte."""
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (at := tensor.data_ptr()), at + (reach + 1) * tensor.itemsize if tensor.numel() else at
