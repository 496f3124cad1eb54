"""Items, which have a home on the host and perhaps a place on the device, and the blocks that places are made of.

The marks that protect bytes are kept here, with the bytes, and nowhere else. Each wait for them names its rule:

- R1: a write to a place waits for the place's last users.
- R2: a read of a home waits for the last store into it.
- R3: a read of a place waits for the load or update that filled it.
- R4: a write to a home waits for its readers, or goes to the item's spare home instead.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from ..device.lanes import Mark

BytesAtHome = Sequence[tuple[Tensor, int]]
"""Host bytes, and the offset in the place to which they belong."""


@dataclass(eq=False)
class Block:
    """Device bytes that are handed from item to item.

    Attributes:
        memory: flat bytes.
        free: R1: marks of the last users; the next owner waits for them before it writes.
    """

    memory: Tensor
    free: list[Mark] = field(default_factory=list)


@dataclass(eq=False)
class Pool:
    """Blocks of one size, so that what comes fits where something else went.

    Attributes:
        nbytes: of each block.
        count: how many there may be now.
        made: how many there are, used or not.
        free: those that no item has, the one that was freed first in front.
        least, most: an update needs as many as ``least``, and more than ``most`` would be of no use.
        passing: those that no kept item takes.
    """

    nbytes: int
    count: int
    made: int = 0
    free: list[Block] = field(default_factory=list)
    least: int = 1
    most: int = 1
    passing: int = 1


@dataclass(eq=False, repr=False)
class Item:
    """Bytes with a home: the state of one bucket, or the parameters of one group.

    Without bytes: parameters that stay on the device, of which only marks are kept.

    Attributes:
        name: for people.
        nbytes: of its place.
        pool: whose blocks it fits.
        home: its host bytes.
        stored: returns the part of ``home`` that updates change; ``None``: they change all of it.
        fixed: tensors of parameters that stay on the device, for lanes that look for races.
        wait_unread: blocks the host until no checkpoint's writer reads the home (R4, on the host).
        spare_home: called when an update has changed the place; returns the spare home if it is to be the home from now
            on, since a checkpoint's writer reads this one (R4, without a wait), or the update is a guess.
        is_held: returns whether others have tensors over the home. Called only while ``exposed``. State that is held
            is updated in ``step()`` alone, which also stores it, and lies at home between steps: whatever others write
            there counts, seen or not. Parameters that are held are stored behind their update.
        version: counts what others have written into the home. Our own copies do not count.
        exists: there is something at home or in the place; before the first step there is no state.
        block: its place; ``None``: it is not on the device.
        dirty: its home is older than its place.
        kept: prefetches do not evict it, and it is stored only when somebody asks.
        at_home: R2: the last store.
        ready: R3: whoever filled or changed the place.
        updated: the last update, wherever its bytes are by now.
        beside: by bucket: updates on the CPU, whose parts of the parameters are others than those of ``updated``.
        home_read: R4, by lane: who still reads the home.
        used: by lane: who has read the place since it was filled or changed.
        known_to: lanes that have waited for ``ready`` already.
        exposed: others have looked at the home since the last update, or hold tensors over it, and may have written it.
        exposed_at: the number of steps by then.
        seen: the version when the home was looked at, or the place was filled or stored after that.
    """

    name: str
    nbytes: int = 0
    pool: Pool | None = None
    home: BytesAtHome = ()
    stored: Callable[[], BytesAtHome] | None = None
    fixed: Sequence[Tensor] = ()
    wait_unread: Callable[[], None] = lambda: None
    spare_home: Callable[[], BytesAtHome | None] = lambda: None
    is_held: Callable[[], bool] = lambda: False
    version: Callable[[], object] = lambda: None
    exists: bool = True
    block: Block | None = None
    dirty: bool = False
    kept: bool = False
    at_home: Mark | None = None
    ready: Mark | None = None
    updated: Mark | None = None
    beside: dict[int, Mark] = field(default_factory=dict)
    home_read: dict[str, Mark] = field(default_factory=dict)
    used: dict[str, Mark] = field(default_factory=dict)
    known_to: set[str] = field(default_factory=set)
    exposed: bool = False
    exposed_at: int = 0
    seen: object = None

    @property
    def stays(self) -> bool:
        """Return whether it is stored only when somebody asks, and not behind its update."""
        return self.kept and not self.exposed

    def is_fresh(self) -> bool:
        """Return whether the place counts: it is newer than the home, or nobody has written the home since."""
        return not self.exposed or self.dirty or self.seen == self.version()

    def see(self) -> None:
        """Note that place and home are the same now."""
        if self.exposed:  # nobody else can have written it otherwise, and counting costs time
            self.seen = self.version()

    def expose(self, step: int) -> None:
        """Note that others are about to look at the home, which is as new as the place, and may write it."""
        if not self.exposed:
            self.exposed, self.exposed_at, self.seen = True, step, self.version()

    def stays_home(self) -> bool:
        """Return whether others hold tensors over the home, so that an update must not change it before ``step()``."""
        return self.exposed and self.is_held()

    def written(self, mark: Mark) -> None:
        """Note that an update has changed the place, up to ``mark``: its home is older now, if it has one."""
        self.ready = self.updated = mark
        self.dirty, self.exists = bool(self.nbytes), True
        self.exposed = self.stays_home()
        self.used.clear()  # the update has waited for all of them
        self.known_to.clear()

    def copies(self, *, changed: bool = False) -> list[tuple[Tensor, Tensor]]:
        """Pairs of bytes at home and in the place; ``changed``: those that an update may have changed."""
        assert self.block is not None, self.name
        memory, home = self.block.memory, self.stored() if changed and self.stored is not None else self.home
        return [(one, memory[offset : offset + one.numel()]) for one, offset in home]

    def place(self) -> Sequence[Tensor]:
        """The bytes that an update of it writes."""
        return self.fixed if self.block is None else [self.block.memory[: self.nbytes]]


@dataclass(eq=False)
class Use:
    """A point of the iteration at which items are needed on the device."""

    name: object
    items: tuple[Item, ...]
    gathers: bool = False
