"""The way back from updates that were guesses: places are forgotten, and old parameters come up again."""

from collections.abc import Callable, Sequence

from ..device.lanes import Copy
from ..fsdp.dtensor import version_of
from .buckets import Bucket
from .items import BytesAtHome, Item
from .loop import Core


class WayBack:
    """Undoes the updates of one step, in the terms of the core.

    Attributes:
        pairs_of: host bytes and device bytes of the parameters in a bucket, as far as they stay on the device.
    """

    def __init__(self, core: Core, pairs_of: Callable[[Bucket], Sequence[Copy]]) -> None:
        self.core, self.pairs_of = core, pairs_of
        self._before: dict[Item, tuple[BytesAtHome, object]] = {}  # homes, and their versions if users have looked
        self._stored: dict[Bucket, object] = {}  # versions of the old parameters that are on the host, or on their way

    def guard(self, bucket: Bucket) -> None:
        """Before the update of ``bucket``, store what take-back will load, unless it is on the host."""
        for item in bucket.streamed:
            if item not in self._before:
                if item.dirty:
                    self.core.cache.put(item)
                self._before[item] = item.home, item.version() if item.exposed else None
        for one in (bucket, *self.core.followers(bucket)):  # the update counts as a write of its parameters
            if one is bucket or one in self._stored:
                self.keep(one)

    def keep(self, bucket: Bucket) -> None:
        """Store the old parameters of ``bucket``, unless that has been done and nobody has written them since."""
        pairs, versions = self.pairs_of(bucket), [version_of(param) for param in bucket.params]
        if not pairs or self._stored.get(bucket) == versions:
            return
        lanes = self.core.lanes
        lanes.store.wait(lanes.compute.mark())  # R3: compute has waited for the last update; users write there, too
        lanes.store.copy(pairs)
        mark = lanes.store.mark()
        for item in bucket.weights:
            item.used["store"] = mark  # R1: the update writes what this reads
        self._stored[bucket] = versions

    def updated(self, bucket: Bucket) -> None:
        """The update of ``bucket`` has written its parameters: for other ranges of these it is not a user's write."""
        for other in self.core.followers(bucket):
            if other in self._stored:
                self._stored[other] = [version_of(param) for param in other.params]

    def is_written(self) -> bool:
        """Return whether somebody has written a home since its update."""
        return any(seen is not None and item.version() != seen for item, (_, seen) in self._before.items())

    def roll_back(self) -> None:
        """Undo all updates of this step, for what follows on the compute stream."""
        core, lanes = self.core, self.core.lanes
        core.wait_updated()  # updates read gradients that the user may write from now on
        core.cache.forget(self._before)
        for item, (home, _) in self._before.items():
            item.home = home
            item.home_read.clear()  # the update has waited for its loads, and the next one will for loads after them
            item.expose()  # tensors over this home are still the user's, and may be written before step()
        for bucket in filter(None, (*core.done, core.torn)):
            pairs = self.pairs_of(bucket)
            if pairs:
                for item in bucket.weights:
                    lanes.load.wait(item.ready, *item.used.values())  # R1: updates, gathers
                lanes.load.copy([(param, old) for old, param in pairs])
                mark = lanes.load.mark()
                for item in bucket.weights:
                    item.written(mark)
                lanes.compute.wait(mark)  # R3: the user may read them without a gather
        core.forget_updates()
        self.end()

    def end(self) -> None:
        """Nothing of this step is to be taken back any more."""
        self._before, self._stored = {}, {}
        self.core.guess = None
