"""Homes that others read while training goes on: an update must not write them (R4).

A shard with a spare home lives in either, in turns. Without one, or where that is read as well, the store waits for the
reader::

    a save lends homes ──▶ updates of the next step: spare_home() of each bucket ──▶ commit(): optimizer.state follows

A shard may be cut into several buckets. Each of them has its bytes in the spare home from its own update on, and all of
them have been updated when the step is complete: then the shard lives there.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from ..fsdp.dtensor import version_of
from ..optimizers import Conventions
from ..state.shard import Home, Reader, StateShard
from ..state.store import StateStore, adopt, is_exchanged
from .buckets import Bucket
from .homes import Plan
from .items import BytesAtHome, Item

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
            shard.side = 1 - shard.side
            state.update((name, home) for name, home in shard.homes.items() if state.get(name) is old[name])


class SpareHomes:
    """Moves the state of one optimizer to spare homes.

    Attributes:
        moving: shards that live in their other home once the step is complete.
        guessing: updates may be taken back, so none of them may change a home.
    """

    def __init__(self, plan: Plan, conventions: Conventions) -> None:
        self._plan, self._conventions = plan, conventions
        self.moving: dict[StateShard, None] = {}
        self.guessing = False

    def serve(self, number: int, item: Item) -> None:
        """Let the item of a bucket's state ask here for its home."""
        item.spare_home = partial(self._spare_home, number)
        item.wait_unread = partial(self._wait_unread, number)

    def turn(self, number: int) -> list[StateShard]:
        """An update changes a bucket; returns which of its shards live in their other home after the step."""
        shards = list(self._plan[number].covers())
        for shard in shards:
            turns = shard not in self.moving and (self.guessing or shard.home.is_read())
            if turns and self._may_move(shard):
                shard.places[1 - shard.side].wait_unread()
                self.moving[shard] = None
        return [shard for shard in shards if shard in self.moving]

    def _spare_home(self, number: int) -> BytesAtHome | None:
        return self._plan[number].copies(self._side_of) if self.turn(number) else None

    def _may_move(self, shard: StateShard) -> bool:
        # Without a gradient, its other buckets may not be updated in this step, and their bytes would stay behind.
        updated = len(shard.buckets) == 1 or self._conventions.gradient(shard.param) is not None
        return updated and len(shard.places) > 1

    def _side_of(self, shard: StateShard) -> int:
        return 1 - shard.side if shard in self.moving else shard.side

    def _wait_unread(self, number: int) -> None:
        for shard in self._plan[number].covers():
            home = shard.places[self._side_of(shard)]
            if home.readers:
                home.wait_unread()

    def commit(self, states: StateStore) -> None:
        """A step is complete."""
        Lending.move(self.moving, states)
        self.moving = {}

    def commit_done(self, buckets: Iterable[Bucket], done: Iterable[Bucket], states: StateStore) -> None:
        """A step has failed when these were ``done``: shards move if all of their buckets were, and others stay."""
        numbers = {bucket.number for bucket in done}
        moved = [shard for shard in self.moving if numbers.issuperset(shard.buckets)]
        for bucket in buckets if self.moving else ():
            if bucket.state.nbytes:
                bucket.state.home = self._plan[bucket.number].copies(
                    lambda shard: 1 - shard.side if shard in moved else shard.side
                )
        Lending.move(moved, states)
        self.moving = {}


def _versions(homes: Sequence[Home]) -> list[tuple[int, ...]]:
    """Changes with every write into one of the homes: through a DTensor, its local tensor, or what that consists of."""
    return [
        (*version_of(value), *(leaf._version for leaf in home.leaves[name]))
        for home in homes
        for name, value in home.values.items()
    ] + [tuple(one._version for one in (home.weights, home.stand_in) if one is not None) for home in homes]
