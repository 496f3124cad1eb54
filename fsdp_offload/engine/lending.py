"""Homes that others read while training goes on: a step must not write them.

::

    lend(reader, homes) ──▶ redirect_stores(the step's shards) ──▶ the step stores into spare homes ──▶ commit_moves

A shard with a spare place lives in either, in turns: the step loads from the one and stores into the other, so moving
costs nothing. Without a spare place, or where that is read as well, the step waits for the reader.
"""

import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial

from ..planning.schedule import BucketStep
from ..state.adopt import adopt, is_exchanged
from ..state.layout import Reader
from ..state.shard import Home, StateShard
from ..state.store import StateStore
from ..torch_compat.dtensor import version_of
from .executor import Pipeline
from .homes import Plan

logger = logging.getLogger(__name__)

_SPOILED = (
    "Optimizer state was written in place while an asynchronous save was being written: that checkpoint holds some of "
    "the old values and some of the new ones. Do not use it; save again. Wait for the future of dcp.async_save() "
    "before you write into optimizer.state, or put other tensors there."
)


class Lending:
    """Knows who reads which homes of one plan.

    Attributes:
        homes_of_parameters: homes of parameters that do not live with their state, and whether they are there now.
    """

    def __init__(self, plan: Plan, pipeline: Pipeline) -> None:
        self._plan = plan
        self._pipeline = pipeline
        self._readers: list[Reader] = []  # some of them may have finished
        self._is_spoiled = False
        self.homes_of_parameters: Callable[[], Iterable[tuple[Home, bool]]] = tuple

    def homes_by_address(self) -> dict[int, tuple[Home, bool]]:
        """The place that begins a tensor at an address, and whether the state lives there now. Host memory only."""
        of_state = (
            (place, place is shard.home)
            for shard in self._plan.shards.values()
            # Resident state that is away is copied, since it may leave again at any time.
            for place in (shard.host_places if shard.resident else shard.places)
            if not (shard.resident and place is shard.home)
        )
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
        """Whether nobody has written into what was lent. Nothing of ours does; and a write cannot be kept from a file.

        Raises:
            RuntimeError: somebody has. Once; training may go on.
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
        """Copy what the user has exchanged for a home into the home. All at once: it may be another one of ours.

        Raises:
            RuntimeError: see :meth:`check_unspoiled`; nothing has begun yet.
        """
        self.check_unspoiled()
        entries = [(shard, states.get(shard.param)) for shard in shards]
        exchanged = [(shard, state) for shard, state in entries if state and is_exchanged(shard, state)]
        if exchanged:
            self._pipeline.synchronize()  # what was put there may be another parameter's home, still being stored
            self.wait()
            adopt(exchanged)

    def redirect_stores(
        self, updated: Sequence[StateShard], steps: Sequence[BucketStep], elsewhere: Collection[StateShard] = ()
    ) -> list[StateShard]:
        """Keep a step from writing homes that others read, and those of ``elsewhere``, whose other place is free.

        Returns:
            The shards that it will store in their other place; hand them to :meth:`commit_moves` when it has.
        """
        self._readers = [reader for reader in self._readers if reader.is_reading()]
        if not self._readers and not elsewhere:
            return []
        chosen = set(elsewhere)
        moving = dict.fromkeys(shard for shard in updated if shard in chosen or _has_to_move(shard))
        # Neighbours in a bucket that have no gradient: their bytes do not change, so there is nothing to store.
        idle = {shard for shard in self._plan.shards.values() if shard.home.is_read()} - moving.keys()

        def side_of(shard: StateShard) -> int | None:
            return 1 - shard.side if shard in moving else None if shard in idle else shard.side

        touched = {number for shard in (*moving, *idle) for number in shard.buckets}
        for step in steps:
            if step.store and step.bucket in touched:
                # Made when the store is issued: by then the device has work.
                self._pipeline.buckets[step.bucket].store_copies = partial(self._plan[step.bucket].copies, side_of)
        return list(moving)

    def commit_moves(self, moved: Sequence[StateShard], steps: Sequence[BucketStep], states: StateStore) -> None:
        """The state of ``moved`` lives in their other place from now on."""
        self.move(moved, states)
        self.store_home(steps)

    def move_back(self, moved: Sequence[StateShard], states: StateStore) -> None:
        """The inverse of :meth:`commit_moves`."""
        self.move(moved, states)
        for number in {number for shard in moved for number in shard.buckets}:
            self._pipeline.buckets[number].live_at(*self._plan[number].live_copies())

    @staticmethod
    def move(moved: Iterable[StateShard], states: StateStore) -> None:
        """The state of ``moved`` lives in their other place from now on, and ``states`` says so. Nothing is copied."""
        for shard in moved:
            state, old = states.get(shard.param), shard.homes
            shard.flip()
            state.update((name, home) for name, home in shard.homes.items() if state.get(name) is old[name])

    def store_home(self, steps: Iterable[BucketStep]) -> None:
        """What is stored of these buckets from now on goes to the homes again, where these are now."""
        for step in steps:
            bucket = self._pipeline.buckets[step.bucket]
            if bucket.store_copies is not None:
                bucket.live_at(*self._plan[step.bucket].live_copies())


def _versions(homes: Sequence[Home]) -> list[tuple[int, ...]]:
    """Changes with every write into one of the homes: through a DTensor, its local tensor, or what that consists of."""
    return [
        (*version_of(value), *(leaf._version for leaf in home.leaves[name]))
        for home in homes
        for name, value in home.values.items()
    ] + [(home.weights._version,) for home in homes if home.weights is not None]


def _has_to_move(shard: StateShard) -> bool:
    """Whether its home is being read, and another place is free. Waits where there is none."""
    if not shard.home.is_read():
        return False
    if len(shard.places) > 1:
        shard.places[1 - shard.side].wait_unread()
        return True
    shard.home.wait_unread()
    return False
