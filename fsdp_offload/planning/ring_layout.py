"""Where buckets lie in the ring of staging memory; pure."""

from collections.abc import Sequence
from typing import NamedTuple


class Placement(NamedTuple):
    """Place at which a bucket passes through the ring, in bytes of one of its blocks.

    Two buckets that overlap can never be there together.
    """

    offset: int
    nbytes: int
    block: int = 0

    def overlaps(self, other: "Placement") -> bool:
        """Return whether the two share a byte."""
        if self.block != other.block or not self.nbytes or not other.nbytes:
            return False
        return self.offset < other.offset + other.nbytes and other.offset < self.offset + self.nbytes


class RingBlocks(NamedTuple):
    """Sizes of the blocks of a ring."""

    nbytes: tuple[int, ...]  # of each block
    lasting: int = 0  # so many of them, from the first on, stay once they are there; the others come and go

    @property
    def lasting_bytes(self) -> int:
        """Of the blocks that stay."""
        return sum(self.nbytes[: self.lasting])

    @property
    def passing_bytes(self) -> int:
        """Of the blocks that come and go."""
        return sum(self.nbytes[self.lasting :])


def divide_ring(bucket_nbytes: Sequence[int], ring_bytes: int, block_bytes: int) -> tuple[int, ...]:
    """The bytes of the blocks that make up a ring of at most ``ring_bytes`` bytes, of which each comes and goes alone.

    Where the ring holds all buckets, blocks of at most ``block_bytes`` are cut to them, in this order. Else all are
    alike, and a little larger: the small bucket at the end of a group, often a few biases and norms, then passes beside
    a large one, in whatever order they come, and has no block for itself. There is always one for the largest bucket.
    """
    if ring_bytes <= block_bytes:
        return (ring_bytes,) if ring_bytes else ()
    if sum(bucket_nbytes) <= ring_bytes:
        blocks: list[int] = []
        for nbytes in bucket_nbytes:
            if blocks and blocks[-1] + nbytes <= block_bytes:
                blocks[-1] += nbytes
            else:
                blocks.append(nbytes)
        return tuple(blocks)
    block_bytes = min(ring_bytes, block_bytes + block_bytes // 32)
    first_bytes = max(block_bytes, *bucket_nbytes)
    return (first_bytes, *(block_bytes,) * ((ring_bytes - first_bytes) // block_bytes))


def place_in_ring(bucket_nbytes: Sequence[int], block_nbytes: Sequence[int]) -> list[Placement]:
    """Give each bucket a place in a ring of these blocks, one behind the other, round and round.

    In the order of a step: neighbours in it then pass beside each other, whatever their numbers. A block without enough
    room is passed over. A bucket larger than every block starts at 0; the first block then has to be as large.
    """
    placements = []
    block = cursor = 0
    for nbytes in bucket_nbytes:
        if cursor + nbytes > block_nbytes[block]:
            following = (*range(block + 1, len(block_nbytes)), *range(block + 1))
            block = next((number for number in following if nbytes <= block_nbytes[number]), 0)
            cursor = 0
        placements.append(Placement(cursor, nbytes, block))
        cursor += nbytes
    return placements
