"""A bucket that passes through the ring: where its newest bytes are, and its copies.

    home ──L──▶ loading ──U──▶ in slot ──S──▶ storing ──(store finished)──▶ home

State that the optimizer creates in a step has nothing to load and goes from *home* straight to *in slot*.
"""

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from enum import Enum

from torch import Tensor

from ..device.lanes import Copy, Lane
from ..planning.ring_layout import Placement
from ..planning.schedule import Kind


class Residency(Enum):
    """Where the newest bytes of a bucket are, and what that costs in device memory."""

    HOME = "home"  # in the arena; no device memory
    LOADING = "loading"  # in the arena, and on their way to the ring
    IN_SLOT = "in slot"  # in the ring only: the arena is older
    STORING = "storing"  # in the ring, and on their way to the arena


_NEXT = {
    Residency.HOME: (Residency.LOADING, Residency.IN_SLOT),
    Residency.LOADING: (Residency.IN_SLOT, Residency.HOME),  # home: what was loaded is not needed after all
    Residency.IN_SLOT: (Residency.STORING,),
    # The next load is ordered behind the store on the device, so the host need not have seen it finish.
    Residency.STORING: (Residency.HOME, Residency.LOADING, Residency.IN_SLOT),
}


@dataclass
class StagedBucket:
    """A bucket's bytes at home and in the ring.

    Attributes:
        placement: its place in the ring, as of the last schedule; ``None`` for state that is resident on the device.
        copies: for each transfer the two ``uint8`` ranges: in the arena, and the offset in its place.
        state_copies: the same without parameters; ``None`` if there are none. They come into the slot in another way
            then, or by ``copies`` as well: that is chosen for each load.
        store_copies: makes what replaces ``copies`` in the store of one step, where state moves to another home.
    """

    placement: Placement | None
    copies: Sequence[tuple[Tensor, int]]
    state_copies: Sequence[tuple[Tensor, int]] | None = None
    store_copies: Callable[[], Sequence[tuple[Tensor, int]]] | None = None
    weights_loaded: bool = False
    residency: Residency = Residency.HOME
    _pieces: dict[tuple[Kind, bool], Sequence[Copy]] = field(default_factory=dict, init=False)  # cut once

    @property
    def has_weights(self) -> bool:
        """Whether parameters pass through with their state."""
        return self.state_copies is not None

    @property
    def copied_bytes(self) -> int:
        """Bytes that one load or one store moves."""
        return sum(home.numel() for home, _ in self.copies)

    def place(self, placement: Placement) -> None:
        """Pass through another place of the ring from now on."""
        if placement != self.placement:
            self.placement = placement
            self._pieces = {}

    def loads(self, lane: Lane, block: Tensor) -> Sequence[Copy]:
        """From its homes to its slot in ``block``, as the lane wants them."""
        key: tuple[Kind, bool] = ("L", self.weights_loaded)
        if key not in self._pieces:
            copies = self.copies if self.state_copies is None or self.weights_loaded else self.state_copies
            slots = self._slots(block, copies)
            self._pieces[key] = lane.cut([(slot, home) for slot, (home, _) in zip(slots, copies, strict=True)])
        return self._pieces[key]

    def stores(self, lane: Lane, block: Tensor) -> Sequence[Copy]:
        """From its slot in ``block`` to its homes, or for once to other ones, as the lane wants them."""
        if self.store_copies is not None:
            return self._cut_stores(lane, block, self.store_copies())
        if ("S", True) not in self._pieces:
            self._pieces["S", True] = self._cut_stores(lane, block, self.copies)
        return self._pieces["S", True]

    def _cut_stores(self, lane: Lane, block: Tensor, copies: Sequence[tuple[Tensor, int]]) -> Sequence[Copy]:
        slots = self._slots(block, copies)
        return lane.cut([(home, slot) for slot, (home, _) in zip(slots, copies, strict=True)])

    def _slots(self, block: Tensor, copies: Sequence[tuple[Tensor, int]]) -> list[Tensor]:
        assert self.placement is not None
        begin = self.placement.offset
        return [block[begin + at : begin + at + home.numel()] for home, at in copies]

    def leave(self, blocks: Container[int]) -> None:
        """If it passes through one of these blocks, that is another allocation from now on."""
        if self.placement is not None and self.placement.block in blocks:
            self._pieces = {}

    def live_at(self, copies: Sequence[tuple[Tensor, int]], state_copies: Sequence[tuple[Tensor, int]] | None) -> None:
        """Have other homes from now on."""
        self.copies, self.state_copies, self.store_copies, self._pieces = copies, state_copies, None, {}

    def move_to(self, residency: Residency) -> None:
        """Note where the newest bytes are now."""
        assert residency in _NEXT[self.residency], f"a bucket cannot go from {self.residency} to {residency}"
        self.residency = residency
