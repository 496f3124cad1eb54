"""The staging memory of one optimizer: those blocks of the device's ring that it has now.

::

    enter ──▶ used by loads, updates, stores ──▶ given back: what was used first goes first

The first blocks may be there to last, while the others come and go with the room that the model leaves. A block
belongs to the device (:mod:`link`), which has other optimizers as well: one of them may need a larger one.
"""

from collections.abc import Callable

from torch import Tensor

from .lanes import Lane, Mark
from .link import Block, DeviceLink


class Ring:
    """Blocks by number.

    Attributes:
        nbytes: how much is there.
        passing_bytes: how much of it comes and goes.
    """

    def __init__(self, link: DeviceLink, user: int) -> None:
        """Nothing is there yet; ``user`` tells users of the device's blocks apart."""
        self.nbytes = self.passing_bytes = 0
        self._lasting = 0
        self._link = link
        self._user = user
        self._blocks: dict[int, Block] = {}  # in the order of their last use

    def __contains__(self, number: int) -> bool:
        return number in self._blocks

    def keep_first(self, count: int) -> None:
        """Let only the blocks from this number on come and go."""
        self._lasting = count
        self.passing_bytes = sum(self._blocks[number].memory.numel() for number in self._passing())

    def _passing(self) -> list[int]:
        return [number for number in self._blocks if number >= self._lasting]

    def lasts(self, number: int) -> bool:
        """Return whether a block stays, once it is there, until all are given back."""
        return number < self._lasting

    def memory(self, number: int) -> Tensor:
        """Return the memory of a block that is there: ``uint8``, of shape ``(nbytes,)``."""
        return self._blocks[number].memory

    def enter(self, number: int, nbytes: int, wait: Callable[[Mark], None]) -> bool:
        """Have a block of at least ``nbytes`` bytes.

        Args:
            number: of the block.
            nbytes: what has to fit into it.
            wait: lets what follows on the current stream start only after a mark.

        Returns:
            Whether it is another one than before, of which nobody may keep views.
        """
        block, before = self._link.block(number, nbytes, self._user), self._blocks.get(number)
        if block is before:
            return False
        if before is not None:
            # Another optimizer has needed a larger one. The memory of this one is free from now on, and the current
            # stream may get it.
            for mark in before.last.values():
                wait(mark)
            self._count(number, -before.memory.numel())
        self._blocks[number] = block
        self._count(number, block.memory.numel())
        return before is not None

    def note_use(self, number: int, lane: Lane | None, end: Mark) -> None:
        """Note an issued action that uses a block until ``end``; ``lane``: ``None`` for the current stream's."""
        block = self._blocks[number] = self._blocks.pop(number)  # now the last in the order
        if lane is not None:
            block.last[lane] = end

    def _count(self, number: int, nbytes: int) -> None:
        self.nbytes += nbytes
        if not self.lasts(number):
            self.passing_bytes += nbytes

    def give_back(self, keep_bytes: int) -> set[int]:
        """Give back blocks that come and go, those first that were used first, until ``keep_bytes`` of them are left.

        Each is free once its own actions have ended, for which the current stream waits, and if no other optimizer
        needs it.

        Returns:
            Their numbers: nobody may keep views of their memory.
        """
        gone: set[int] = set()
        for number in self._passing():
            if self.passing_bytes <= keep_bytes:
                break
            self._give_back(number)
            gone.add(number)
        return gone

    def give_back_all(self) -> set[int]:
        """Give back all blocks, also those that are there to last, and return their numbers."""
        gone = set(self._blocks)
        for number in gone:
            self._give_back(number)
        return gone

    def _give_back(self, number: int) -> None:
        self._count(number, -self._blocks.pop(number).memory.numel())
        self._link.give_back(number, self._user)
