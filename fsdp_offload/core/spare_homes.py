"""State that a checkpoint's writer reads while training goes on: an update moves it to spare homes (R4).

::

    a save lends homes ──▶ updates of the next step: spare_home() of each bucket ──▶ commit(): optimizer.state follows

A shard may be cut into several buckets. Each of them has its bytes in the spare home from its own update on, and all of
them have been updated when the step is complete: then the shard lives there.
"""

from collections.abc import Iterable
from functools import partial

from ..optimizers import Conventions
from ..state.shard import StateShard
from ..state.store import StateStore
from .homes import Plan
from .items import BytesAtHome, Item
from .lending import Lending
from .plan import Bucket


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
