"""``optimizer.state`` of an offloaded optimizer: the usual mapping, which waits for what is read."""

import copy
import functools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from torch import Tensor

from .store import StateStore, UserState


class Homes(Protocol):
    """Whoever stores the state: what is read from a home waits for it."""

    def wait_home(self, param: Tensor) -> None:
        """Wait until the home of the state of ``param`` holds its newest bytes."""

    def wait_all_home(self) -> None:
        """Wait until every home holds its newest bytes."""


def _waiting(method: Callable[..., Any]) -> Any:
    """``method``, which waits for the home of the parameter that it is given, or else for all."""

    @functools.wraps(method)
    def waiting(self: "OffloadedState", *args: Any) -> Any:
        if args:
            self._homes.wait_home(args[0])
        else:
            self._homes.wait_all_home()
        return method(self, *args)

    return waiting


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
    def unwaited(self) -> StateStore:
        """View of the entries that does not wait, for the engine."""
        return StateStore(self)

    __getitem__ = _waiting(defaultdict.__getitem__)
    get = _waiting(defaultdict.get)
    pop = _waiting(defaultdict.pop)
    setdefault = _waiting(defaultdict.setdefault)
    items = _waiting(defaultdict.items)
    values = _waiting(defaultdict.values)
    popitem = _waiting(defaultdict.popitem)

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
