"""Items, which have a home on the host and perhaps a place on the device, and the blocks that places are made of.

The marks that protect bytes are kept here, with the bytes, and nowhere else. Each wait for them names its rule:

- R1: a write to a place waits for the place's last users.
- R2: a read of a home waits for the last store into it.
- R3: a read of a place waits for the load or update that filled it.
- R4: a write to a home waits for its readers, or goes to the item's spare home instead.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from ..device.lanes import Mark

BytesAtHome = Sequence[tuple[Tensor, int]]
"""Host bytes, and the offset in the place to which they belong."""

PASSING = 3
"""Blocks for items in transit, without those of kept items: one is loaded, one updated, one stored."""


@dataclass(eq=False)
class Block:
    """Device bytes that are handed from item to item.

    Attributes:
        memory: flat bytes.
        free: R1: marks of the last users; the next owner waits for them before it writes.
        views: of groups whose parameters have lain there, by their number: what a gather reads.
        number: in the order in which they were made.
    """

    memory: Tensor
    free: list[Mark] = field(default_factory=list)
    views: dict[int, list[Tensor]] = field(default_factory=dict)
    number: int = 0


@dataclass(eq=False)
class Pool:
    """Blocks of one size, so that what comes fits where something else went.

    Attributes:
        nbytes: of each block.
        count: how many there may be at any point of the iteration.
        beyond: how many more there may be at this one, or less where they are below zero.
        lasting: of these, those that may come now, as they need not leave soon.
        made: how many there are, used or not.
        free: those that no item has, the one that was freed first in front.
        apart: those whose memory has been given back, the first one behind; they get other memory when they come again.
        least, most: an update needs as many as ``least``, and more than ``most`` would be of no use.
        transit: blocks for items that pass through: one is loaded, some are updated, one is stored.
        passing: those of ``count`` that no kept item takes.
    """

    nbytes: int
    count: int
    made: int = 0
    beyond: int = 0
    lasting: int = 0
    free: list[Block] = field(default_factory=list)
    apart: list[Block] = field(default_factory=list)
    least: int = 1
    most: int = 1
    transit: int = PASSING
    passing: int = 1


@dataclass(eq=False, repr=False)
class Home:
    """Host bytes of an item, here without spare ones and without others; none of what stays on the device.

    Attributes:
        bytes: those that are the home now.
        stored: R2: the last store.
        read: R4, by lane: who still reads them.
        exposed_at: the number of steps when others looked at it, who may have written it since; ``None``: no look since
            the last update, and no tensor of others over it.
        seen: the version when others looked, or the place was filled or stored after that.
    """

    bytes: BytesAtHome = ()
    stored: Mark | None = None
    read: dict[str, Mark] = field(default_factory=dict)
    exposed_at: int | None = None
    seen: object = None

    def changed(self) -> BytesAtHome:
        """Return the part of ``bytes`` that updates change."""
        return self.bytes

    def turn(self) -> BytesAtHome | None:
        """After an update: return the spare bytes if they are the home from now on (R4, without a wait; a guess)."""
        return None

    def wait_unread(self) -> None:
        """Block the host until no checkpoint's writer reads what a store will write (R4, on the host)."""

    def is_held(self) -> bool:
        """Return whether others have tensors over it. Called only while it is exposed.

        Only ``step()`` updates and stores state that is held, which lies at home between steps: all that others write
        there counts, seen or not. Parameters that are held are stored behind their update.
        """
        return False

    def version(self) -> object:
        """Return a count of what others have written here. Our own copies do not count."""
        return None

    def see(self) -> None:
        """Note that place and home are the same now."""
        self.seen = self.version()

    def expose(self, step: int) -> None:
        """Note that others are about to look at it, which is as new as the place, and may write it."""
        if self.exposed_at is None:
            self.exposed_at, self.seen = step, self.version()

    def waits_for_step(self) -> bool:
        """Return whether others hold tensors over it, so that an update must not change it before ``step()``."""
        return self.exposed_at is not None and self.is_held()


@dataclass(eq=False, repr=False)
class Item:
    """Bytes with a home: the state of one bucket, or the parameters of one group.

    Without bytes: parameters that stay on the device, of which only marks are kept.

    Attributes:
        name: for people.
        nbytes: of its place.
        pool: whose blocks it fits.
        home: its bytes on the host.
        fixed: tensors of parameters that stay on the device, for lanes that look for races.
        exists: there is something at home or in the place; before the first step there is no state.
        block: its place; ``None``: it is not on the device.
        dirty: its home is older than its place.
        kept: prefetches do not evict it, and it is stored only when somebody asks.
        ready: R3: whoever filled or changed the place.
        updated: the last update, wherever its bytes are by now.
        beside: by bucket: updates on the CPU, whose parts of the parameters are others than those of ``updated``.
        used: by lane: who has read the place since it was filled or changed.
        known_to: lanes that have waited for ``ready`` already.
    """

    name: str
    nbytes: int = 0
    pool: Pool | None = None
    home: Home = field(default_factory=Home)
    fixed: Sequence[Tensor] = ()
    exists: bool = True
    block: Block | None = None
    dirty: bool = False
    kept: bool = False
    ready: Mark | None = None
    updated: Mark | None = None
    beside: dict[int, Mark] = field(default_factory=dict)
    used: dict[str, Mark] = field(default_factory=dict)
    known_to: set[str] = field(default_factory=set)

    @property
    def stays(self) -> bool:
        """Return whether it is stored only when somebody asks, and not behind its update."""
        return self.kept and self.home.exposed_at is None

    def is_fresh(self) -> bool:
        """Return whether the place counts: it is newer than the home, or nobody has written the home since."""
        home = self.home
        return home.exposed_at is None or self.dirty or home.seen == home.version()

    def written(self, mark: Mark) -> None:
        """Note that an update has changed the place, up to ``mark``: its home is older now, if it has one."""
        self.ready = self.updated = mark
        self.dirty, self.exists = bool(self.nbytes), True
        if self.home.exposed_at is not None and not self.home.is_held():
            self.home.exposed_at = None  # nobody has looked at what the next store makes of it
        self.used.clear()  # the update has waited for all of them
        self.known_to.clear()

    def copies(self, at_home: BytesAtHome) -> list[tuple[Tensor, Tensor]]:
        """Pair bytes ``at_home``, some or all of them, with those in the place."""
        assert self.block is not None, self.name
        memory = self.block.memory
        return [(one, memory[offset : offset + one.numel()]) for one, offset in at_home]

    def place(self) -> Sequence[Tensor]:
        """The bytes that an update of it writes."""
        return self.fixed if self.block is None else [self.block.memory[: self.nbytes]]


@dataclass(eq=False)
class Use:
    """A point of the iteration at which items are needed on the device."""

    name: object
    items: tuple[Item, ...]
    gathers: bool = False
