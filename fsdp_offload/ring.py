"""The staging memory of one optimizer: those blocks of the device's ring that it has now.

::

    enter ──▶ used by loads, updates, stores ──▶ given back: what was used first goes first

A block belongs to the device (:mod:`transfer`), which has other optimizers as well: one of them may need a larger one.
"""

from collections.abc import Callable

from torch import Tensor

from .transfer import Block, DeviceLink, Lane, Mark


class Ring:
    """Blocks by number.

    Attributes:
        nbytes: how much is there.
    """

    def __init__(self, link: DeviceLink, user: int) -> None:
        """Nothing is there yet; ``user`` tells users of the device's blocks apart."""
        self.nbytes = 0
        self._link = link
        self._user = user
        self._blocks: dict[int, Block] = {}  # in the order of their last use

    def __contains__(self, number: int) -> bool:
        return number in self._blocks

    def memory(self, number: int) -> Tensor:
        """Of a block that is there: ``uint8``, of shape ``(nbytes,)``."""
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
            self.nbytes -= before.memory.numel()
        self._blocks[number] = block
        self.nbytes += block.memory.numel()
        return before is not None

    def note_use(self, number: int, lane: Lane | None, end: Mark) -> None:
        """An action has been issued that uses a block until ``end``; ``lane``: ``None`` for the current stream's."""
        block = self._blocks[number] = self._blocks.pop(number)  # now the last in the order
        if lane is not None:
            block.last[lane] = end

    def give_back(self, keep_bytes: int) -> set[int]:
        """Give back blocks, those first that were used first, until no more than ``keep_bytes`` are there.

        Each is free once its own actions have ended, for which the current stream waits, and if no other optimizer
        needs it.

        Returns:
            Their numbers: nobody may keep views of their memory.
        """
        gone: set[int] = set()
        while self.nbytes > keep_bytes:
            number = next(iter(self._blocks))
            self.nbytes -= self._blocks.pop(number).memory.numel()
            self._link.give_back(number, self._user)
            gone.add(number)
        return gone
