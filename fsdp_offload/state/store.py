"""The entries of ``optimizer.state``, as the rooms below the user see them; and copies that updates may write."""

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from .shard import StateShard

UserState = dict[str, Any]


class StateStore(Protocol):
    """``optimizer.state`` as the engine sees it: looking at an entry neither waits nor makes one."""

    def get(self, param: Tensor) -> UserState:
        """The state of ``param``; an empty one that is not kept if there is none."""

    def of(self, param: Tensor) -> UserState:
        """The state of ``param``, made if there is none."""

    def move_last(self, params: Iterable[Tensor]) -> None:
        """Put the entries of ``params`` that exist behind all others, in this order."""


class OwnCounters:
    """The entries of ``optimizer.state`` with copies of all that is not a home, for updates to write."""

    def __init__(self, states: StateStore, shards: Mapping[Tensor, StateShard]) -> None:
        self.states, self._shards = states, shards
        self._own: dict[Tensor, UserState] = {}

    def get(self, param: Tensor) -> UserState:
        """Return the state of ``param``; an empty one that is not kept if there is none."""
        if param not in self._own:
            self.copy([param])
        return self._own.get(param, {})

    def copy(self, params: Iterable[Tensor]) -> None:
        """Copy the counters of ``params``, all in one operation: updates of these come next on the current stream."""
        copies, counters = [], []
        for param in params:
            state, homes = self.states.get(param), self._shards[param].homes
            if param in self._own or not state:
                continue
            self._own[param] = own = dict(state)
            for name, value in state.items():
                if isinstance(value, Tensor) and value is not homes.get(name):
                    own[name] = torch.empty_like(value)
                    copies.append(own[name])
                    counters.append(value)
        if copies:
            torch._foreach_copy_(copies, counters)

    def of(self, param: Tensor) -> UserState:
        """Return the state of ``param``, made if there is none."""
        return self.get(param) or self._own.setdefault(param, {})

    def move_last(self, params: Iterable[Tensor]) -> None:
        """Never called: entries are put in order when the step counts."""
        raise NotImplementedError

    def commit(self) -> None:
        """Give the user what updates have made of the copies."""
        targets, sources = [], []
        for param, own in self._own.items():
            state, homes = self.states.of(param), self._shards[param].homes
            for name in state.keys() - own.keys():
                del state[name]
            for name, value in own.items():
                current = state.get(name)
                if name in homes:
                    state.setdefault(name, homes[name])
                elif isinstance(value, Tensor) and isinstance(current, Tensor) and _alike(value, current):
                    targets.append(current)
                    sources.append(value)
                else:
                    state[name] = value
        if targets:
            torch._foreach_copy_(targets, sources)


def _alike(one: Tensor, other: Tensor) -> bool:
    return (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)
