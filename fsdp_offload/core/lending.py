"""Homes that others read while training goes on: an update must not write them (R4).

A shard with a spare place has its home in either, in turns: :class:`~.readers.SpareHomes` moves it. Without a spare
place, or where that is read as well, the store waits for the reader.
"""

import logging
from collections.abc import Callable, Iterable, Sequence

from ..state.adopt import adopt, is_exchanged
from ..state.layout import Reader
from ..state.shard import Home, StateShard
from ..state.store import StateStore
from ..torch_compat.dtensor import version_of
from .homes import Plan

logger = logging.getLogger(__name__)

_SPOILED = (
    "Optimizer state, or a parameter that lives on the host, was written in place while an asynchronous save was being "
    "written: that checkpoint holds some of the old values and some of the new ones. Do not use it; save again. Wait "
    "for the future of dcp.async_save() before you write there, or put other tensors into optimizer.state."
)


class Lending:
    """Knows who reads which homes of one plan.

    Attributes:
        homes_of_parameters: homes of parameters that do not live with their state, and whether they are there now.
    """

    def __init__(self, plan: Plan, settle: Callable[[], None]) -> None:
        """Take what brings everything home: homes are about to be written."""
        self._plan, self._settle = plan, settle
        self._readers: list[Reader] = []  # some of them may have finished
        self._is_spoiled = False
        self.homes_of_parameters: Callable[[], Iterable[tuple[Home, bool]]] = tuple

    def homes_by_address(self) -> dict[int, tuple[Home, bool]]:
        """By the address of each tensor over a home: that home, and whether state lives there now. Host memory only."""
        shards = self._plan.shards.values()
        of_state = ((place, place is shard.home) for shard in shards for place in shard.places)
        return {
            leaf.data_ptr(): (place, is_home)
            for place, is_home in (*of_state, *self.homes_of_parameters())
            for leaf in place.all_leaves()
            if leaf.numel()
        }

    def lend(self, reader: Reader, homes: Iterable[Home]) -> None:
        """From now on nothing writes ``homes`` until ``reader`` has finished; they hold the newest bytes."""
        homes = list(homes)
        for home in homes:
            home.readers.append(reader)
        self._readers.append(reader)
        before = _versions(homes)

        def look() -> None:
            if _versions(homes) != before:
                self._is_spoiled = True
                logger.error(_SPOILED)

        reader.when_over(look)

    def check_unspoiled(self) -> None:
        """Raise if somebody has written into what was lent: the checkpoint may have that write. We ourselves never do.

        Raises:
            RuntimeError: somebody has. It is raised once; training may go on.
        """
        if self._is_spoiled:
            self._is_spoiled = False
            raise RuntimeError(_SPOILED)

    def wait(self) -> None:
        """Block until nobody else reads any home."""
        for reader in self._readers:
            reader.wait()
        self._readers = []

    def adopt_user_tensors(self, shards: Iterable[StateShard], states: StateStore) -> None:
        """Copy tensors that the user has put in place of homes into these. All at once: they may be homes themselves.

        Raises:
            RuntimeError: see :meth:`check_unspoiled`; nothing has begun yet.
        """
        self.check_unspoiled()
        entries = [(shard, states.get(shard.param)) for shard in shards]
        exchanged = [(shard, state) for shard, state in entries if state and is_exchanged(shard, state)]
        if exchanged:
            self._settle()  # what was put there may be another parameter's home, still being stored
            self.wait()
            adopt(exchanged)

    @staticmethod
    def move(moved: Iterable[StateShard], states: StateStore) -> None:
        """The state of ``moved`` lives in their other place from now on, and ``states`` says so. Nothing is copied."""
        for shard in moved:
            state, old = states.get(shard.param), shard.homes
            shard.flip()
            state.update((name, home) for name, home in shard.homes.items() if state.get(name) is old[name])


def _versions(homes: Sequence[Home]) -> list[tuple[int, ...]]:
    """Changes with every write into one of the homes: through a DTensor, its local tensor, or what that consists of."""
    return [
        (*version_of(value), *(leaf._version for leaf in home.leaves[name]))
        for home in homes
        for name, value in home.values.items()
    ] + [tuple(one._version for one in (home.weights, home.stand_in) if one is not None) for home in homes]
