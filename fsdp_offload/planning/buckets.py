"""State shards to buckets: which bytes move together, where they live at home and where in a slot. Pure arithmetic.

A *leaf* is one dense tensor of a parameter's state (``exp_avg``, the codes of a quantized moment). At home, every leaf
is contiguous for its whole shard, since users and checkpoints see it as one tensor. A bucket holds whole shards or flat
ranges of them. Whole shards lie in the arena just as in the slot, so a bucket of them is one copy; a range of a cut
shard costs one copy for each leaf.
"""

from collections.abc import Container, Iterable, Iterator, Sequence
from typing import NamedTuple

ALIGN_BYTES = 64
"""Every leaf starts on a multiple of this: more than the widest vector access of torch's fused kernels (32 bytes)."""

CUT_NUMEL = 64
"""Cuts fall on multiples of this many elements: vectorized kernels may round a vector's tail differently."""

BREAK_BYTES = 256 << 20
"""About every so many bytes of the arena lies a break, so that its memory can be prepared in parallel pieces."""

PAGE_BYTES = 4096

_SMALL_BUCKET_BYTES = 16 << 20
"""Below this, launching a bucket costs as much as copying it."""


class ShardSpec(NamedTuple):
    """One parameter's state on this rank, as far as planning needs it."""

    numel: int  # elements of the parameter's local shard
    leaf_nbytes: tuple[int, ...]
    cuttable: bool  # every leaf then has ``numel`` elements
    together: int = 0  # only shards of one number share a bucket
    padding_nbytes: int = 0  # of its home, behind the first leaf: no slot has them, and no copy moves them


class Range(NamedTuple):
    """The elements ``[start, stop)`` of a flattened shard."""

    shard: int
    start: int
    stop: int


class Copy(NamedTuple):
    """Bytes that move as one transfer between the arena and a slot."""

    home_offset: int
    slot_offset: int
    nbytes: int


class Bucket(NamedTuple):
    """What is loaded, updated and stored together."""

    ranges: tuple[Range, ...]
    leaf_offsets: tuple[tuple[int, ...], ...]  # for each range, where each leaf begins in the slot
    leaf_copies: tuple[tuple[int, Copy], ...]  # the shard, and a copy of one leaf of it
    copies: tuple[Copy, ...]  # the same, joined where they continue each other
    nbytes: int  # of the slot


class BucketPlan(NamedTuple):
    """All buckets, and where each shard's leaves live in the arena."""

    buckets: tuple[Bucket, ...]
    home_offsets: tuple[tuple[int, ...], ...]  # for each shard, where each leaf begins in the arena
    home_nbytes: int
    home_breaks: tuple[int, ...]  # page-aligned offsets that no leaf and no copy crosses: memory may be divided there


def plan_buckets(shards: Sequence[ShardSpec], bucket_bytes: int) -> BucketPlan:
    """Pack ``shards``, in the given order, into buckets of at most ``bucket_bytes`` as far as cuts allow.

    Where there are many buckets, the first and the last are smaller: nothing overlaps with the first load and the last
    store, so they should be short.

    Args:
        shards: this rank's state shards. Empty ones (``numel == 0``) belong to a bucket like any other.
        bucket_bytes: the size not to exceed. A shard that does not fit into what is left of a bucket is cut there if it
            may be; one that may not and is larger than this is a bucket alone.

    Returns:
        The buckets, and offsets in bytes into an arena of ``home_nbytes`` bytes.
    """
    homes = HomeOffsets(shards)
    buckets = tuple(_lay_out(ranges, shards, homes) for ranges in _Packer(shards, bucket_bytes).pack())
    home_offsets = tuple(homes.of_shard(index) for index in range(len(shards)))
    return BucketPlan(buckets, home_offsets, homes.nbytes, tuple(sorted(homes.breaks)))


class _Packer:
    """Fills one bucket after the other."""

    def __init__(self, shards: Sequence[ShardSpec], bucket_bytes: int) -> None:
        self._shards = shards
        self._left_bytes = sum(aligned(nbytes) for shard in shards for nbytes in shard.leaf_nbytes)
        # A little state is two buckets rather than one: with one, nothing overlaps.
        self._bucket_bytes = min(bucket_bytes, max(aligned(self._left_bytes // 2), _SMALL_BUCKET_BYTES))
        self._ramps = self._left_bytes >= 16 * bucket_bytes
        self._done_bytes = 0
        self._ranges: list[Range] = []
        self._filled_bytes = 0

    def pack(self) -> Iterator[tuple[Range, ...]]:
        """The ranges of each bucket."""
        for index, shard in enumerate(self._shards):
            if self._ranges and self._shards[self._ranges[-1].shard].together != shard.together:
                yield self._flush()
            start = 0
            while start < shard.numel or start == 0:
                stop = self._take_until(shard, start)
                if stop > start or shard.numel == 0:
                    self._add(Range(index, start, stop))
                if stop == shard.numel:
                    break
                yield self._flush()
                start = stop
        if self._ranges:
            yield self._flush()

    def _take_until(self, shard: ShardSpec, start: int) -> int:
        """How far ``shard`` goes into the current bucket: to its end, to a cut, or not at all (``start``)."""
        room_bytes = self._limit_bytes() - self._filled_bytes
        if sum(_leaf_range_nbytes(shard, start, shard.numel)) <= room_bytes:
            return shard.numel
        if not shard.cuttable:
            return start if self._ranges else shard.numel
        small = sum(shard.leaf_nbytes) <= self._bucket_bytes // 4
        if self._ranges and (small or room_bytes < self._bucket_bytes // 8):
            return start  # not worth a cut: each costs a copy for every leaf
        unit_bytes = CUT_NUMEL * sum(nbytes // shard.numel for nbytes in shard.leaf_nbytes)
        units = room_bytes // unit_bytes
        if units < 1:
            return start if self._ranges else min(start + CUT_NUMEL, shard.numel)
        return min(start + units * CUT_NUMEL, shard.numel)

    def _limit_bytes(self) -> int:
        if not self._ramps:
            return self._bucket_bytes
        ramp_bytes = min(self._done_bytes, self._left_bytes // 2)
        return max(self._bucket_bytes // 4, min(self._bucket_bytes, ramp_bytes))

    def _add(self, piece: Range) -> None:
        self._ranges.append(piece)
        self._filled_bytes += sum(_leaf_range_nbytes(self._shards[piece.shard], piece.start, piece.stop))

    def _flush(self) -> tuple[Range, ...]:
        ranges = tuple(self._ranges)
        self._done_bytes += self._filled_bytes
        self._left_bytes -= self._filled_bytes
        self._ranges, self._filled_bytes = [], 0
        return ranges


def _lay_out(ranges: tuple[Range, ...], shards: Sequence[ShardSpec], homes: "HomeOffsets") -> Bucket:
    leaf_offsets: list[tuple[int, ...]] = []
    copies: list[tuple[int, Copy]] = []
    slot_end = 0
    for piece in ranges:
        shard = shards[piece.shard]
        offsets = []
        for leaf, nbytes in enumerate(_leaf_range_nbytes(shard, piece.start, piece.stop)):
            offsets.append(slot_end)
            if nbytes:
                skipped = shard.leaf_nbytes[leaf] // shard.numel * piece.start if piece.start else 0
                copy = Copy(homes.of_shard(piece.shard)[leaf] + skipped, slot_end, nbytes)
                copies.append((piece.shard, copy))
            slot_end += nbytes
        leaf_offsets.append(tuple(offsets))
    joined = tuple(join_copies((copy for _, copy in copies), homes.breaks))
    return Bucket(ranges, tuple(leaf_offsets), tuple(copies), joined, slot_end)


def _leaf_range_nbytes(shard: ShardSpec, start: int, stop: int) -> list[int]:
    """Slot bytes of each leaf of a range, with the padding that keeps the next leaf aligned."""
    if start == 0 and stop == shard.numel:
        return [aligned(nbytes) for nbytes in shard.leaf_nbytes]
    return [aligned(nbytes // shard.numel * (stop - start)) for nbytes in shard.leaf_nbytes]


def join_copies(copies: Iterable[Copy], breaks: Container[int]) -> Iterator[Copy]:
    """Join copies that continue each other at home and in the slot, unless memory may be divided between them."""
    current: Copy | None = None
    for copy in copies:
        if (
            current is not None
            and copy.home_offset - current.home_offset == copy.slot_offset - current.slot_offset == current.nbytes
            and copy.home_offset not in breaks
        ):
            current = current._replace(nbytes=current.nbytes + copy.nbytes)
            continue
        if current is not None:
            yield current
        current = copy
    if current is not None:
        yield current


class HomeOffsets:
    """Gives each shard its place in the arena when it is first asked for.

    Attributes:
        breaks: page-aligned offsets that no leaf crosses.
        nbytes: of the arena so far.
    """

    def __init__(self, shards: Sequence[ShardSpec]) -> None:
        self._shards = shards
        self._offsets: dict[int, tuple[int, ...]] = {}
        self._last_break = 0
        self.breaks: set[int] = set()
        self.nbytes = 0

    def of_shard(self, shard: int) -> tuple[int, ...]:
        """Where each leaf of ``shard`` begins."""
        if shard not in self._offsets:
            if self.nbytes - self._last_break >= BREAK_BYTES:
                self.nbytes = self._last_break = aligned(self.nbytes, PAGE_BYTES)
                self.breaks.add(self.nbytes)
            offsets = []
            padding_nbytes = self._shards[shard].padding_nbytes
            for nbytes in self._shards[shard].leaf_nbytes:
                offsets.append(self.nbytes)
                self.nbytes += aligned(nbytes + padding_nbytes)
                padding_nbytes = 0
            self._offsets[shard] = tuple(offsets)
        return self._offsets[shard]


def aligned(nbytes: int, to_bytes: int = ALIGN_BYTES) -> int:
    """The next multiple of ``to_bytes``."""
    return -(-nbytes // to_bytes) * to_bytes
