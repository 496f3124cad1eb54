"""Packs state shards into buckets: which bytes move together, their offsets at home and in a place. Pure arithmetic.

A *leaf* is one dense tensor of a parameter's state (``exp_avg``, the codes of a quantized moment). At home, every leaf
is contiguous for its whole shard, since users and checkpoints see it as one tensor. A bucket holds whole shards or flat
ranges of them. Whole shards are laid out in the arena as in the place, so a bucket of them is one copy; a range of a
cut shard costs one copy for each leaf.
"""

import bisect
import itertools
from collections.abc import Container, Iterable, Iterator, Sequence
from typing import NamedTuple

from ..device.arena import BREAK_BYTES, PAGE_BYTES, aligned

CUT_NUMEL = 64
"""Cut shards at multiples of this many elements: vectorized kernels may round a vector's tail differently."""

_SMALL_BUCKET_BYTES = 16 << 20
"""Size below which launching a bucket costs as much as copying it."""


class ShardSpec(NamedTuple):
    """One parameter's state on this rank, as far as packing needs it."""

    numel: int  # elements of the parameter's local shard
    leaf_nbytes: tuple[int, ...]
    cuttable: bool  # may be cut into ranges; every leaf then has ``numel`` elements
    together: int = 0  # only shards with the same number share a bucket


class Range(NamedTuple):
    """The elements ``[start, stop)`` of a flattened shard."""

    shard: int
    start: int
    stop: int


class Move(NamedTuple):
    """Bytes that move in one copy between the arena and a place."""

    home_offset: int
    place_offset: int
    nbytes: int


class Packed(NamedTuple):
    """Ranges that are loaded, updated and stored together."""

    ranges: tuple[Range, ...]
    leaf_offsets: tuple[tuple[int, ...], ...]  # for each range, the offset of each leaf in the place
    leaf_copies: tuple[tuple[int, Move], ...]  # pairs of a shard's number and the copy of one of its leaves
    nbytes: int  # size of the place


class ArenaLayout(NamedTuple):
    """Offsets of shards in an arena, in bytes."""

    offsets: tuple[tuple[int, ...], ...]  # for each shard, the offset of each leaf
    ends: tuple[int, ...]  # for each shard, the offset of its end
    breaks: tuple[int, ...]  # page-aligned offsets that no leaf and no copy crosses: memory may be divided there

    @property
    def nbytes(self) -> int:
        return self.end_of(len(self.ends))

    def count_within(self, nbytes: int) -> int:
        return bisect.bisect_right(self.ends, nbytes)

    def end_of(self, count: int) -> int:
        """Return the offset at which the first ``count`` shards end."""
        return self.ends[count - 1] if count else 0


def place_homes(shards: Iterable[Sequence[int]]) -> ArenaLayout:
    """Lay shards end to end; each is given as the bytes of its leaves."""
    offsets, ends, breaks = [], [], [0]
    end = 0
    for leaf_nbytes in shards:
        if end - breaks[-1] >= BREAK_BYTES:
            end = aligned(end, PAGE_BYTES)
            breaks.append(end)
        *begins, end = itertools.accumulate(map(aligned, leaf_nbytes), initial=end)
        offsets.append(tuple(begins))
        ends.append(end)
    return ArenaLayout(tuple(offsets), tuple(ends), tuple(breaks[1:]))


def plan_buckets(shards: Sequence[ShardSpec], bucket_bytes: int) -> tuple[tuple[Packed, ...], ArenaLayout]:
    """Pack ``shards``, in the given order, into buckets of at most ``bucket_bytes`` as far as cuts allow.

    If there are many buckets, the first and the last are smaller: nothing overlaps with the first load and the last
    store, so they should be short.

    Args:
        shards: this rank's state shards. Empty ones (``numel == 0``) belong to a bucket like any other.
        bucket_bytes: largest size of a bucket. A shard that does not fit the rest of a bucket is cut there if it is
            ``cuttable``; otherwise it begins the next bucket, even if it is larger than that.

    Returns:
        The buckets, and the homes of the shards.
    """
    homes = place_homes(shard.leaf_nbytes for shard in shards)
    return tuple(lay_out(ranges, shards, homes) for ranges in _pack(shards, bucket_bytes)), homes


def _pack(shards: Sequence[ShardSpec], most_bytes: int) -> Iterator[tuple[Range, ...]]:
    total_bytes = sum(aligned(nbytes) for shard in shards for nbytes in shard.leaf_nbytes)
    # Divide a little state into two buckets: with one, nothing overlaps.
    bucket_bytes = min(most_bytes, max(aligned(total_bytes // 2), _SMALL_BUCKET_BYTES))
    done_bytes = 0
    for _, grouped in itertools.groupby(enumerate(shards), key=lambda numbered: numbered[1].together):
        run = list(grouped)
        is_even = all(shard.cuttable for _, shard in run)
        left_bytes = sum(aligned(nbytes) for _, shard in run for nbytes in shard.leaf_nbytes)  # of the run, not packed
        ranges: list[Range] = []
        filled_bytes = 0
        for index, shard in run:
            start, stop = 0, -1
            while stop < shard.numel:
                # Make buckets of a run alike: blocks have one size, and what a bucket leaves of its block is lost.
                # (Cuts do not fall exactly where buckets would be even.)
                parts = max(1, -(-left_bytes // bucket_bytes))
                limit_bytes = min(bucket_bytes, left_bytes // parts * 65 // 64 + CUT_NUMEL * 64)
                limit_bytes = limit_bytes if is_even else bucket_bytes
                if total_bytes >= 16 * most_bytes:
                    ramp_bytes = min(done_bytes, (total_bytes - done_bytes) // 2)
                    limit_bytes = max(bucket_bytes // 4, min(limit_bytes, ramp_bytes))
                # Full: the rest of the run fits the other parts, even if inexact cuts leave 1/64 of them unused.
                is_full = left_bytes - filled_bytes <= (parts - 1) * bucket_bytes * 63 // 64
                room_bytes = limit_bytes - filled_bytes
                stop = _take_until(shard, start, room_bytes, bucket_bytes, is_first=not ranges, is_full=is_full)
                if stop > start or shard.numel == 0:
                    ranges.append(Range(index, start, stop))
                    filled_bytes += sum(_leaf_range_nbytes(shard, start, stop))
                if stop < shard.numel:
                    yield tuple(ranges)
                    done_bytes, left_bytes = done_bytes + filled_bytes, left_bytes - filled_bytes
                    ranges, filled_bytes, start = [], 0, stop
        yield tuple(ranges)
        done_bytes += filled_bytes


def _take_until(
    shard: ShardSpec, start: int, room_bytes: int, bucket_bytes: int, *, is_first: bool, is_full: bool
) -> int:
    """Return the element of ``shard`` up to which the rest of a bucket takes it: the end, a cut, or ``start``."""
    if sum(_leaf_range_nbytes(shard, start, shard.numel)) <= max(0, room_bytes):
        return shard.numel
    if not shard.cuttable:
        return shard.numel if is_first else start
    is_small = sum(shard.leaf_nbytes) <= bucket_bytes // 4
    if is_full and not is_first and (is_small or room_bytes < bucket_bytes // 8):
        return start  # a cut is not worth it: it costs a copy for every leaf
    units = room_bytes // (CUT_NUMEL * sum(nbytes // shard.numel for nbytes in shard.leaf_nbytes))
    if units < 1 and not is_first:
        return start
    return min(start + max(1, units) * CUT_NUMEL, shard.numel)


def lay_out(ranges: tuple[Range, ...], shards: Sequence[ShardSpec], homes: ArenaLayout) -> Packed:
    """Lay ``ranges`` of ``shards`` end to end in a place."""
    leaf_offsets: list[tuple[int, ...]] = []
    copies: list[tuple[int, Move]] = []
    end = 0
    for number, start, stop in ranges:
        shard = shards[number]
        sizes = _leaf_range_nbytes(shard, start, stop)
        *offsets, end = itertools.accumulate(sizes, initial=end)
        leaf_offsets.append(tuple(offsets))
        for home, whole, offset, nbytes in zip(homes.offsets[number], shard.leaf_nbytes, offsets, sizes, strict=True):
            if nbytes:
                copies.append((number, Move(home + whole // shard.numel * start if start else home, offset, nbytes)))
    return Packed(ranges, tuple(leaf_offsets), tuple(copies), end)


def _leaf_range_nbytes(shard: ShardSpec, start: int, stop: int) -> list[int]:
    """Return the bytes of each leaf of a range in a place, with the padding that keeps the next leaf aligned."""
    if start == 0 and stop == shard.numel:
        return [aligned(nbytes) for nbytes in shard.leaf_nbytes]
    return [aligned(nbytes // shard.numel * (stop - start)) for nbytes in shard.leaf_nbytes]


def join_copies(copies: Iterable[Move], breaks: Container[int]) -> list[Move]:
    """Join copies that continue each other at home and in the place, unless memory may be divided between them."""
    joined: list[Move] = []
    for copy in copies:
        home, place, nbytes = joined[-1] if joined else (0, 0, 0)
        if copy[:2] == (home + nbytes, place + nbytes) and joined and copy.home_offset not in breaks:
            joined[-1] = Move(home, place, nbytes + copy.nbytes)
        else:
            joined.append(copy)
    return joined


def choose_host_share(sizes: Sequence[int], fraction: float) -> list[bool]:
    """Choose which parameters the CPU updates; ``sizes``: elements of each, 0 if the CPU cannot update it.

    Choose from the end, since a backward reduces these gradients first. Take a parameter if that brings the share
    nearer to ``fraction``. All ranks with a copy of the same shard have to choose alike, since the CPU's kernels round
    differently from the device's, and the choice is not saved.
    """
    left_bytes, chosen = round(fraction * sum(sizes)), [False] * len(sizes)
    for index in reversed(range(len(sizes))):
        chosen[index] = 0 < sizes[index] < 2 * left_bytes
        left_bytes -= sizes[index] * chosen[index]
    return chosen
