"""Homes that others read while training goes on: an update must not write them (R4).

A shard with a spare home lives in either, in turns. Without one, or where that is read as well, the store waits for the
reader::

    a save lends homes ──▶ updates of the next step: spare_home() of each bucket ──▶ commit(): optimizer.state follows

A shard may be cut into several buckets. Each of them has its bytes in the spare home from its own update on, and all of
them have been updated when the step is complete: then the shard lives there.
"""

import logging
from collections.abc import Callable, Container, Iterable, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from ..core.items import BytesAtHome, Item
from ..fsdp.dtensor import version_of
from ..state.shard import Home, Housed, Reader, StateShard
from ..state.store import StateStore, adopt, is_exchanged
from .homes import AnyHoused, Plan, PlannedBucket

logger = logging.getLogger(__name__)

_SPOILED = (
    "Optimizer state, or a parameter that lives on the host, was written in place while an asynchronous save was being "
    "written: that checkpoint holds some of the old values and some of the new ones. Do not use it; save again. Wait "
    "for the future of dcp.async_save() before you write there, or put other tensors into optimizer.state."
)


class Lending:
    """Knows who reads which homes of one plan, and moves state and parameters to spare ones.

    Attributes:
        moving: what lives in its other home once the step is complete; parameters move at once, unless it is a guess.
        guessing: updates may be taken back, so none of them may change a home.
    """

    def __init__(self, plan: Plan, settle: Callable[[], None], gradient: Callable[[Tensor], Tensor | None]) -> None:
        """Take what brings everything home, as homes are about to be written, and what finds a gradient."""
        self._plan, self._settle, self._gradient = plan, settle, gradient
        self.moving: dict[Housed, None] = {}
        self.guessing = False
        self._readers: list[Reader] = []  # some of them may have finished
        self._is_spoiled = False

    def homes_by_address(self) -> dict[int, tuple[Home, bool]]:
        """By the address of each tensor over a home: that home, and whether state lives there now. Host memory only."""
        return {
            leaf.data_ptr(): (place, place is one.home)
            for one in self._plan.housed()
            for place in one.places
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

    # Spare homes ------------------------------------------------------------------------------------------------------

    def serve(self, planned: PlannedBucket[Any], item: Item) -> None:
        """Let the item of a bucket ask here for its home."""
        item.spare_home = partial(self._spare_home, planned)
        item.wait_unread = partial(self._wait_unread, planned)

    def turn(self, planned: PlannedBucket[AnyHoused]) -> list[AnyHoused]:
        """An update changes a bucket; returns what of it lives in the other home when the step is complete."""
        shards = planned.changed()
        for shard in shards:
            spare, turns = shard.spare, self.guessing or shard.home.is_read()
            if turns and spare is not None and shard not in self.moving and self._may_move(shard):
                spare.wait_unread()
                self.moving[shard] = None
        return [shard for shard in shards if shard in self.moving]

    def _may_move(self, one: Housed) -> bool:
        # Without a gradient, its other buckets may not be updated in this step, and their bytes would stay behind.
        return not isinstance(one, StateShard) or len(one.buckets) == 1 or self._gradient(one.param) is not None

    def _spare_home(self, planned: PlannedBucket[Any]) -> BytesAtHome | None:
        if not self.turn(planned):
            return None
        if not self.guessing:
            self._move_parameters()
        return planned.copies(self.side_of)

    def side_of(self, one: Housed) -> int:
        """Which of its places is the newest."""
        return 1 - one.side if one in self.moving else one.side

    def _wait_unread(self, planned: PlannedBucket[Any]) -> None:
        for one in planned.changed():
            one.places[self.side_of(one)].wait_unread()

    def commit(self, states: StateStore, done: Container[int] | None = None) -> None:
        """A step is complete, or has failed when the buckets ``done`` were: state moves of which all buckets were."""
        for shard in self.moving:
            if isinstance(shard, StateShard) and (done is None or all(number in done for number in shard.buckets)):
                shard.move(states.get)
        self.moving = {}

    def commit_guesses(self) -> None:
        """Updates of this step will not be taken back."""
        self.guessing = False
        self._move_parameters()

    def drop_guesses(self) -> None:
        """Updates of this step have been taken back: nothing moves."""
        self.guessing, self.moving = False, {}

    def _move_parameters(self) -> None:
        for one in [one for one in self.moving if not isinstance(one, StateShard)]:
            one.move(lambda _: {})
            del self.moving[one]


def _versions(homes: Sequence[Home]) -> list[tuple[int, ...]]:
    """Changes with every write into one of the homes: through a DTensor, its local tensor, or what that consists of."""
    return [
        (*version_of(value), *(leaf._version for leaf in home.leaves[name]))
        for home in homes
        for name, value in home.values.items()
    ] + [tuple(one._version for one in (home.weights, home.stand_in) if one is not None) for home in homes]
