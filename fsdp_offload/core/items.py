"""Items, which have a home on the host and perhaps a place on the device, and the blocks in which places lie.

Most marks that protect bytes are kept here, with the bytes. Most waits for a mark name their rule:

- R1: a write to a place waits for the place's last users.
- R2: a read of a home waits for the last store into it.
- R3: a read of a place waits for the load or update that filled it.
- R4: a write to a home waits for its readers, or goes to the item's spare home instead.

*Others* are code outside of the engine that holds or reads these bytes: the user, a state dict, a checkpoint's writer.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from ..device.lanes import Lane, Mark

BytesAtHome = Sequence[tuple[Tensor, int]]
"""Pairs of host bytes (flat, ``uint8``) and their offset in the place (bytes)."""

PASSING = 3
"""Blocks for items in transit, on top of those of kept items: one is loaded, one updated, one stored."""


@dataclass(eq=False)
class Block:
    """Device bytes that are handed from item to item.

    Attributes:
        memory: uint8, flat, as long as its pool's ``nbytes``.
        lane: the lane in whose order it was allocated; a later allocation there may get the memory once it is freed.
        free: R1: marks of the last users; the next owner waits for them before it writes.
        views: by group number, flat views that gathers of this group read, if its parameters have lain here.
        number: position in the order in which the pool's blocks were made.
    """

    memory: Tensor
    lane: Lane
    free: list[Mark] = field(default_factory=list)
    views: dict[int, list[Tensor]] = field(default_factory=dict)
    number: int = 0


@dataclass(eq=False)
class Pool:
    """Interchangeable blocks: any item of the pool fits any block.

    Attributes:
        nbytes: size of each block.
        count: blocks allowed at every point of the iteration.
        beyond: blocks allowed at this point on top of ``count``; negative: fewer are allowed.
        lasting: blocks of ``beyond`` that may be allocated now, since they need not leave soon.
        made: blocks that exist, used or not.
        free: blocks without an item; the one freed first is in front.
        apart: blocks whose memory was given back, in reverse order of ``number``; they get new memory when used again.
        least, most: blocks that one update needs, and blocks beyond which nothing is gained.
        transit: blocks wanted for items that pass through: one is loaded, some are updated, one is stored.
        passing: blocks of ``count`` that no kept item takes.
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
    """Host bytes of an item. This base class has no spare home and is never held by others; it may have no bytes.

    Attributes:
        bytes: the bytes that are the home now; empty for parameters that stay on the device.
        stored: R2: mark of the last store.
        read: R4: by lane, the mark of its last read.
        exposed_at: ``Core.steps`` when others first looked at this home, which they may have written since. ``None``:
            others have not looked since the last update, and hold no tensor over this home.
        seen: the version at that look, or at the last load or store after it.
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
        """After an update, return the spare bytes if they become the home: readers or a roll-back need the old (R4)."""
        return None

    def wait_unread(self) -> None:
        """Block the host until no checkpoint's writer reads the bytes that a store will write (R4, on the host)."""

    def is_held(self) -> bool:
        """Return whether others have tensors over this home. Called only while it is exposed.

        Held state is updated and stored by ``step()`` only, and has no place between steps, so that each write to its
        home by others counts, even one that no version shows. Held parameters are stored right after their update.
        """
        return False

    def version(self) -> object:
        """Return a value that changes when others write here. Our own copies do not change it."""
        return None

    def see(self) -> None:
        """Note that place and home hold the same bytes now."""
        self.seen = self.version()

    def expose(self, step: int) -> None:
        """Note that others may read and write this home from now on. It is as new as the place."""
        if self.exposed_at is None:
            self.exposed_at, self.seen = step, self.version()

    def waits_for_step(self) -> bool:
        """Return whether others hold tensors over this home, so that no update may change it before ``step()``."""
        return self.exposed_at is not None and self.is_held()


@dataclass(eq=False, repr=False)
class Item:
    """Bytes with a home: the state of one bucket, or the parameters of one group.

    With ``nbytes=0`` it stands for parameters that stay on the device, and only carries their marks.

    Attributes:
        name: label in traces and messages.
        nbytes: size of its place.
        pool: the pool whose blocks it fits.
        home: its bytes on the host.
        exists: home or place holds values; state does not exist before the first step.
        block: the block that is its place; ``None``: it is not on the device.
        dirty: the home is older than the place.
        kept: prefetches do not evict it, and its updates are stored only if others, or a roll-back, need that.
        ready: R3: mark of the load or update that last wrote the place.
        updated: mark of the last update, even if the item has left the device since.
        cpu_updates: by bucket number, mark of the last update on the CPU, which writes another slice of the parameters
            than ``updated``.
        used: R1: by lane, mark of the last read of the place since it was filled or changed.
        known_to: names of lanes that have waited for ``ready`` already.
    """

    name: str
    nbytes: int = 0
    pool: Pool | None = None
    home: Home = field(default_factory=Home)
    exists: bool = True
    block: Block | None = None
    dirty: bool = False
    kept: bool = False
    ready: Mark | None = None
    updated: Mark | None = None
    cpu_updates: dict[int, Mark] = field(default_factory=dict)
    used: dict[str, Mark] = field(default_factory=dict)
    known_to: set[str] = field(default_factory=set)

    @property
    def stays(self) -> bool:
        """Return whether an update of this item needs no store: it is kept, and others have not looked at its home."""
        return self.kept and self.home.exposed_at is None

    def is_fresh(self) -> bool:
        """Return whether the place is valid: it is newer than the home, or others have not written the home since."""
        home = self.home
        return home.exposed_at is None or self.dirty or home.seen == home.version()

    def written(self, mark: Mark) -> None:
        """Note an update of the place that ends at ``mark``: the home, if it has bytes, is older now."""
        self.ready = self.updated = mark
        self.dirty, self.exists = bool(self.nbytes), True
        if self.home.exposed_at is not None and not self.home.is_held():
            self.home.exposed_at = None  # others have not seen the values that the next store writes
        self.used.clear()  # the update has waited for these readers
        self.known_to.clear()

    def copies(self, at_home: BytesAtHome) -> list[tuple[Tensor, Tensor]]:
        """Pair host bytes ``at_home``, all of the home or a part, with their bytes in the place."""
        assert self.block is not None, self.name
        memory = self.block.memory
        return [(one, memory[offset : offset + one.numel()]) for one, offset in at_home]

    def place(self) -> Sequence[Tensor]:
        """Return the bytes of the place, which an update of this item writes; nothing if there is no place."""
        return [] if self.block is None else [self.block.memory[: self.nbytes]]


@dataclass(eq=False)
class Use:
    """A point of the iteration at which items are needed on the device."""

    name: object
    items: tuple[Item, ...]
    gathers: bool = False
