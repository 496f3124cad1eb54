"""``optimizer.state`` of an offloaded optimizer: the usual mapping, which waits for what is read."""

import copy
from collections import defaultdict
from collections.abc import ItemsView, Iterable, Iterator, Mapping, ValuesView
from typing import Any, Protocol

from torch import Tensor

from .store import UserState

LEFT_OUT = "_fsdp_offload_left_out"
"""Attribute of a tensor of optimizer state that a load has left as it was, until it is handed out again."""


def forget_left_out(state: Mapping[str, Any]) -> None:
    """``state`` is handed out: what an earlier load did not find says nothing about the next one."""
    for value in state.values():
        if isinstance(value, Tensor):
            vars(value).pop(LEFT_OUT, None)


class Homes(Protocol):
    """Whoever stores the state: what is read from a home waits for it."""

    def wait_home(self, param: Tensor) -> None:
        """Wait until the home of the state of ``param`` holds its newest bytes."""

    def wait_all_home(self) -> None:
        """Wait until every home holds its newest bytes."""


class OffloadedState(defaultdict[Tensor, UserState]):
    """``optimizer.state`` of an offloaded optimizer: looking at a value waits until its home is up to date.

    Attributes:
        offered: tensors that were handed out to load into, by address (``checkpoint/state_dict.py``).
    """

    def __init__(self, homes: Homes, items: Mapping[Tensor, UserState]) -> None:
        super().__init__(dict, items)
        self._homes = homes
        self.offered: dict[int, Any] = {}

    @property
    def unwaited(self) -> "UnwaitedStates":
        """View of the entries that does not wait, for the engine."""
        return UnwaitedStates(self)

    def __getitem__(self, param: Tensor) -> UserState:
        self._homes.wait_home(param)
        return super().__getitem__(param)

    def get(self, param: Tensor, default: Any = None) -> Any:
        """As ``dict.get``."""
        self._homes.wait_home(param)
        return super().get(param, default)

    def pop(self, param: Tensor, *default: Any) -> Any:
        """As ``dict.pop``."""
        self._homes.wait_home(param)
        return super().pop(param, *default)

    def setdefault(self, param: Tensor, default: Any = None) -> Any:
        """As ``dict.setdefault``."""
        self._homes.wait_home(param)
        return super().setdefault(param, default)

    def items(self) -> ItemsView[Tensor, UserState]:  # type: ignore[override]
        """As ``dict.items``."""
        self._homes.wait_all_home()
        return super().items()

    def values(self) -> ValuesView[UserState]:  # type: ignore[override]
        """As ``dict.values``."""
        self._homes.wait_all_home()
        return super().values()

    def popitem(self) -> tuple[Tensor, UserState]:
        """As ``dict.popitem``."""
        self._homes.wait_all_home()
        return super().popitem()

    def __iter__(self) -> Iterator[Tensor]:
        # Overridden only so that dict(state), {**state} and update(state) do not copy the table behind our back.
        return super().__iter__()

    def copy(self) -> defaultdict[Tensor, UserState]:  # type: ignore[override]
        """As ``defaultdict.copy``: a plain one, which no longer waits."""
        return defaultdict(dict, self.items())

    __copy__ = copy  # type: ignore[assignment]

    def __or__(self, other: Any) -> Any:
        return self.copy() | other

    def __ror__(self, other: Any) -> Any:
        return other | self.copy()

    def __deepcopy__(self, memo: dict[int, Any]) -> defaultdict[Tensor, UserState]:
        return copy.deepcopy(self.copy(), memo)

    def __reduce__(self) -> Any:
        return self.copy().__reduce__()

    def __repr__(self) -> str:
        return repr(self.copy())


class UnwaitedStates:
    """The entries of an :class:`OffloadedState` without waiting: the :class:`StateStore` of the engine."""

    def __init__(self, states: OffloadedState) -> None:
        self._states = states

    def get(self, param: Tensor) -> UserState:
        """The state of ``param``; empty and not kept if there is none."""
        return dict.get(self._states, param) or {}

    def of(self, param: Tensor) -> UserState:
        """The state of ``param``, made if there is none."""
        return defaultdict.__getitem__(self._states, param)

    def move_last(self, params: Iterable[Tensor]) -> None:
        """Put the entries of ``params`` that exist behind all others, in this order."""
        for param in params:
            if param in self._states:
                dict.__setitem__(self._states, param, dict.pop(self._states, param))
