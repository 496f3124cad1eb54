"""State shards to buckets: which bytes move together, where they live at home and where in a slot. Pure arithmetic.

A *leaf* is one dense tensor of a parameter's state (``exp_avg``, the codes of a quantized moment). At home, every leaf
is contiguous for its whole shard, since users and checkpoints see it as one tensor. A bucket holds whole shards or flat
ranges of them. Whole shards lie in the arena just as in the slot, so a bucket of them is one copy; a range of a cut
shard costs one copy for each leaf.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

ALIGN_BYTES = 64
"""Every leaf starts on a multiple of this: more than the widest vector access of torch's fused kernels (32 bytes)."""

CUT_NUMEL = 64
"""Cuts fall on multiples of this many elements: vectorized kernels may round a vector's tail differently."""


class ShardSpec(NamedTuple):
    """One parameter's state on this rank, as far as planning needs it."""

    numel: int  # elements of the parameter's local shard
    leaf_nbytes: tuple[int, ...]
    cuttable: bool  # every leaf then has ``numel`` elements


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
    copies: tuple[Copy, ...]
    nbytes: int  # of the slot


class BucketPlan(NamedTuple):
    """All buckets, and where each shard's leaves live in the arena."""

    buckets: tuple[Bucket, ...]
    home_offsets: tuple[tuple[int, ...], ...]  # for each shard, where each leaf begins in the arena
    home_nbytes: int


def plan_buckets(shards: Sequence[ShardSpec], bucket_bytes: int) -> BucketPlan:
    """Pack ``shards``, in the given order, into buckets of at most ``bucket_bytes`` as far as cuts allow.

    Args:
        shards: this rank's state shards. Empty ones (``numel == 0``) belong to a bucket like any other.
        bucket_bytes: the size not to exceed. A shard with more state is cut if it may be, else it is a bucket alone.

    Returns:
        The buckets, and offsets in bytes into an arena of ``home_nbytes`` bytes.
    """
    homes = _HomeOffsets(shards)
    buckets = tuple(_lay_out(ranges, shards, homes) for ranges in _pack(shards, bucket_bytes))
    return BucketPlan(buckets, tuple(homes.of_shard(index) for index in range(len(shards))), homes.nbytes)


def _pack(shards: Sequence[ShardSpec], bucket_bytes: int) -> Iterator[tuple[Range, ...]]:
    current: list[Range] = []
    filled_bytes = 0
    for index, shard in enumerate(shards):
        for piece in _pieces(index, shard, bucket_bytes):
            piece_bytes = sum(_leaf_range_nbytes(shard, piece))
            if current and filled_bytes + piece_bytes > bucket_bytes:
                yield tuple(current)
                current, filled_bytes = [], 0
            current.append(piece)
            filled_bytes += piece_bytes
    if current:
        yield tuple(current)


def _pieces(index: int, shard: ShardSpec, bucket_bytes: int) -> Iterator[Range]:
    """The shard whole if it fits or must stay whole, else in nearly equal ranges that each fit."""
    shard_bytes = sum(_aligned(nbytes) for nbytes in shard.leaf_nbytes)
    if not shard.cuttable or shard_bytes <= bucket_bytes:
        yield Range(index, 0, shard.numel)
        return
    bytes_per_unit = CUT_NUMEL * sum(nbytes // shard.numel for nbytes in shard.leaf_nbytes)
    units_per_piece = max(1, (bucket_bytes - ALIGN_BYTES * len(shard.leaf_nbytes)) // bytes_per_unit)
    units = -(-shard.numel // CUT_NUMEL)
    pieces = -(-units // units_per_piece)
    for piece in range(pieces):
        start, stop = units * piece // pieces, units * (piece + 1) // pieces
        yield Range(index, start * CUT_NUMEL, min(stop * CUT_NUMEL, shard.numel))


def _lay_out(ranges: tuple[Range, ...], shards: Sequence[ShardSpec], homes: "_HomeOffsets") -> Bucket:
    leaf_offsets: list[tuple[int, ...]] = []
    copies: list[Copy] = []
    slot_end = 0
    for piece in ranges:
        shard = shards[piece.shard]
        offsets = []
        for leaf, nbytes in enumerate(_leaf_range_nbytes(shard, piece)):
            offsets.append(slot_end)
            if nbytes:
                skipped = shard.leaf_nbytes[leaf] // shard.numel * piece.start if piece.start else 0
                copies.append(Copy(homes.of_leaf(piece.shard, leaf) + skipped, slot_end, nbytes))
            slot_end += nbytes
        leaf_offsets.append(tuple(offsets))
    return Bucket(ranges, tuple(leaf_offsets), tuple(_merge(copies)), slot_end)


def _leaf_range_nbytes(shard: ShardSpec, piece: Range) -> list[int]:
    """Slot bytes of each leaf of ``piece``, with the padding that keeps the next leaf aligned."""
    if (piece.start, piece.stop) == (0, shard.numel):
        return [_aligned(nbytes) for nbytes in shard.leaf_nbytes]
    return [_aligned(nbytes // shard.numel * (piece.stop - piece.start)) for nbytes in shard.leaf_nbytes]


def _merge(copies: Sequence[Copy]) -> Iterator[Copy]:
    """Join copies that continue each other at home and in the slot."""
    current: Copy | None = None
    for copy in copies:
        if current is not None and (
            copy.home_offset - current.home_offset == copy.slot_offset - current.slot_offset == current.nbytes
        ):
            current = current._replace(nbytes=current.nbytes + copy.nbytes)
            continue
        if current is not None:
            yield current
        current = copy
    if current is not None:
        yield current


class _HomeOffsets:
    """Gives each shard its place in the arena when a bucket first asks for it."""

    def __init__(self, shards: Sequence[ShardSpec]) -> None:
        self._shards = shards
        self._offsets: dict[int, tuple[int, ...]] = {}
        self.nbytes = 0

    def of_shard(self, shard: int) -> tuple[int, ...]:
        if shard not in self._offsets:
            offsets = []
            for nbytes in self._shards[shard].leaf_nbytes:
                offsets.append(self.nbytes)
                self.nbytes += _aligned(nbytes)
            self._offsets[shard] = tuple(offsets)
        return self._offsets[shard]

    def of_leaf(self, shard: int, leaf: int) -> int:
        return self.of_shard(shard)[leaf]


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES
