"""The entries of ``optimizer.state``, as the rooms below the user see them."""

from collections.abc import Iterable
from typing import Any, Protocol

from torch import Tensor

UserState = dict[str, Any]


class StateStore(Protocol):
    """``optimizer.state`` as the engine sees it: looking at an entry neither waits nor makes one."""

    def get(self, param: Tensor) -> UserState:
        """The state of ``param``; an empty one that is not kept if there is none."""

    def of(self, param: Tensor) -> UserState:
        """The state of ``param``, made if there is none."""

    def move_last(self, params: Iterable[Tensor]) -> None:
        """Put the entries of ``params`` that exist behind all others, in this order."""
