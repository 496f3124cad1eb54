"""State shards to buckets: every byte is moved exactly once, in ranges that every kernel can take."""

import itertools
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fsdp_offload.core import packing
from fsdp_offload.core.packing import CUT_NUMEL, ArenaLayout, Move, Packed, Range, ShardSpec, join_copies, plan_buckets
from fsdp_offload.device.arena import ALIGN_BYTES


def adam(numel: int, *, itemsize: int = 4, cuttable: bool = True) -> ShardSpec:
    return ShardSpec(numel, (numel * itemsize,) * 2, cuttable)


@st.composite
def shards(draw: st.DrawFn) -> ShardSpec:
    numel = draw(st.one_of(st.integers(0, 300), st.integers(0, 5000)))
    if numel == 0:
        return ShardSpec(0, (0,) * draw(st.integers(0, 3)), cuttable=False)
    if draw(st.booleans()):
        itemsizes = draw(st.lists(st.sampled_from([1, 2, 4, 8]), max_size=3))
        return ShardSpec(numel, tuple(numel * itemsize for itemsize in itemsizes), cuttable=True)
    return ShardSpec(numel, tuple(draw(st.lists(st.integers(0, 9000), max_size=3))), cuttable=False)


quick = settings(max_examples=50, deadline=None)  # no deadline: cores are shared with other tests
plans = given(st.lists(shards(), max_size=12), st.integers(1024, 20_000))


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES


def copies_of(bucket: Packed, homes: ArenaLayout) -> list[Move]:
    return join_copies((copy for _, copy in bucket.leaf_copies), homes.breaks)


def leaf_range_nbytes(shard: ShardSpec, piece: Range, leaf: int) -> int:
    """Bytes of one leaf's part of ``piece``, without padding."""
    if piece.start == 0 and piece.stop == shard.numel:
        return shard.leaf_nbytes[leaf]
    return shard.leaf_nbytes[leaf] // shard.numel * (piece.stop - piece.start)


@quick
@plans
def test_ranges_cover_each_shard_once_in_order(specs: list[ShardSpec], bucket_bytes: int) -> None:
    buckets, _ = plan_buckets(specs, bucket_bytes)
    ranges = [piece for bucket in buckets for piece in bucket.ranges]
    assert [piece.shard for piece in ranges] == sorted(piece.shard for piece in ranges)
    for number, spec in enumerate(specs):
        mine = [piece for piece in ranges if piece.shard == number]
        assert (mine[0].start, mine[-1].stop) == (0, spec.numel)
        assert all(one.stop == other.start for one, other in itertools.pairwise(mine))
        assert len(mine) == 1 or spec.cuttable
        assert len(mine) == 1 or all(piece.stop > piece.start for piece in mine)
        assert not any(one.stop % CUT_NUMEL for one in mine[:-1]), "a cut that vectorized kernels cannot take"


@quick
@plans
def test_each_byte_of_each_leaf_is_moved_by_one_copy_to_where_its_bucket_expects_it(
    specs: list[ShardSpec], bucket_bytes: int
) -> None:
    """All of them aligned. A bucket of whole shards is one copy."""
    buckets, homes = plan_buckets(specs, bucket_bytes)
    assert not any(offset % ALIGN_BYTES for offset, _ in leaves_at_home(specs, homes))
    moved: Counter[int] = Counter()  # home bytes
    for bucket in buckets:
        copies = copies_of(bucket, homes)
        assert not any(value % ALIGN_BYTES for copy in copies for value in copy)
        if all((piece.start, piece.stop) == (0, specs[piece.shard].numel) for piece in bucket.ranges):
            assert [copy.nbytes for copy in copies] == ([bucket.nbytes] if bucket.nbytes else [])
        home_of_place = {
            copy.place_offset + byte: copy.home_offset + byte for copy in copies for byte in range(copy.nbytes)
        }
        assert len(home_of_place) == sum(copy.nbytes for copy in copies), "copies overlap in the place"
        assert max(home_of_place, default=-1) < max(1, bucket.nbytes)
        moved.update(home_of_place.values())
        for piece, offsets in zip(bucket.ranges, bucket.leaf_offsets, strict=True):
            spec = specs[piece.shard]
            for leaf, place_offset in enumerate(offsets):
                assert place_offset % ALIGN_BYTES == 0
                skipped = spec.leaf_nbytes[leaf] // spec.numel * piece.start if piece.start else 0
                home = homes.offsets[piece.shard][leaf] + skipped
                for byte in range(leaf_range_nbytes(spec, piece, leaf)):
                    assert home_of_place[place_offset + byte] == home + byte
    assert set(moved.values()) <= {1}, "a byte is moved by two buckets"
    assert max(moved, default=-1) < homes.nbytes


def leaves_at_home(specs: list[ShardSpec], homes: ArenaLayout) -> list[tuple[int, int]]:
    """Offset and bytes of each leaf."""
    leaves = [zip(offsets, spec.leaf_nbytes, strict=True) for spec, offsets in zip(specs, homes.offsets, strict=True)]
    return list(itertools.chain.from_iterable(leaves))


@quick
@plans
@example([ShardSpec(4000, (32_000, 32_000, 32_000), cuttable=True)], 1024)  # 64 elements of it are more than a bucket
def test_buckets_keep_within_their_size_where_cuts_allow(specs: list[ShardSpec], bucket_bytes: int) -> None:
    for bucket in plan_buckets(specs, bucket_bytes)[0]:
        smallest = [
            sum(map(aligned, (CUT_NUMEL * nbytes // max(1, spec.numel) for nbytes in spec.leaf_nbytes)))
            if spec.cuttable
            else sum(map(aligned, spec.leaf_nbytes))
            for spec in (specs[piece.shard] for piece in bucket.ranges)
        ]
        indivisible = sum(map(bool, smallest)) == 1 and max(smallest) > bucket_bytes
        assert bucket.nbytes <= bucket_bytes or indivisible


@quick
@plans
@example([ShardSpec(2048, (8192,), cuttable=False)] * 3, 20_000)  # breaks without padding before them
def test_no_leaf_and_no_copy_crosses_a_break(specs: list[ShardSpec], bucket_bytes: int) -> None:
    """The arena is locked in pieces that end at breaks, and a copy across two pieces is refused by the driver."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "BREAK_BYTES", 5000)
        buckets, homes = plan_buckets(specs, bucket_bytes)
    assert list(homes.breaks) == sorted(set(homes.breaks))
    assert not any(offset % 4096 for offset in homes.breaks)
    pieces = list(itertools.pairwise([0, *homes.breaks, homes.nbytes]))
    moved = [(copy.home_offset, copy.nbytes) for bucket in buckets for copy in copies_of(bucket, homes)]
    for offset, nbytes in leaves_at_home(specs, homes) + moved:
        assert any(begin <= offset and offset + nbytes <= end for begin, end in pieces)


@quick
@given(st.lists(st.integers(6_400, 50_000_000), min_size=1, max_size=40), st.sampled_from([1, 2, 4]))
def test_host_memory_is_the_state_within_one_percent(numels: list[int], itemsize: int) -> None:
    specs = [adam(numel, itemsize=itemsize) for numel in numels]
    exact_bytes = sum(sum(spec.leaf_nbytes) for spec in specs)
    assert exact_bytes <= plan_buckets(specs, 64 << 20)[1].nbytes <= 1.01 * exact_bytes


def test_biases_and_norms_beside_their_matrices_cost_less_than_one_percent() -> None:
    """A block of a transformer over 8 ranks: its vectors are short, and padding is what they mostly are."""
    width, ranks = 1024, 8
    matrices = [adam(rows * width // ranks) for rows in (3 * width, width, 4 * width, 4 * width)]
    vectors = [adam(size // ranks) for size in (width, width, 3 * width, width, 4 * width, width)]
    specs = [spec for _ in range(24) for spec in (*matrices, *vectors)]
    exact_bytes = sum(sum(spec.leaf_nbytes) for spec in specs)
    assert plan_buckets(specs, 64 << 20)[1].nbytes <= 1.01 * exact_bytes


# By hand -------------------------------------------------------------------------------------------------------------


def shown(planned: Sequence[Packed]) -> str:
    """Shard, begin and end of each range; buckets have a bar between them."""
    buckets = ([f"{piece.shard}:{piece.start}-{piece.stop}" for piece in bucket.ranges] for bucket in planned)
    return " | ".join(map(" ".join, buckets))


WHOLE = adam(4096, cuttable=False)
CUTS: dict[str, tuple[list[ShardSpec], int, str]] = {
    "small shards share a bucket": ([adam(16), adam(10), adam(16)], 1024, "0:0-16 1:0-10 2:0-16"),
    "a large shard fills buckets": ([adam(300)], 1280, "0:0-128 | 0:128-256 | 0:256-300"),
    "a small shard is not cut to fill one": ([adam(448), adam(128)], 4096, "0:0-448 | 1:0-128"),
    "the end of a cut shard shares one": ([adam(192), adam(16)], 1280, "0:0-128 | 0:128-192 1:0-16"),
    "what must stay whole is alone": ([adam(16), WHOLE, adam(16)], 1024, "0:0-16 | 1:0-4096 | 2:0-16"),
    # An optimizer must see these: Adam gives an empty shard its counter, although nothing is moved.
    "empty ones and those without state": ([adam(0), ShardSpec(70, (), cuttable=True)], 1024, "0:0-0 1:0-70"),
}


@pytest.mark.parametrize(("specs", "bucket_bytes", "ranges"), CUTS.values(), ids=CUTS)
def test_which_ranges_share_a_bucket(specs: list[ShardSpec], bucket_bytes: int, ranges: str) -> None:
    assert shown(plan_buckets(specs, bucket_bytes)[0]) == ranges


def test_a_cut_fills_what_is_left_of_a_bucket() -> None:
    buckets, _ = plan_buckets([adam(64), adam(4096)], 4096)
    assert buckets[0].ranges == (Range(0, 0, 64), Range(1, 0, 448))
    assert [bucket.nbytes for bucket in buckets] == [4096] * 8 + [512]
    assert [bucket.nbytes for bucket in plan_buckets([adam(1024)], 2048)[0]] == [2048] * 4


def test_buckets_of_a_group_are_alike() -> None:
    """Places have one size: in those of full buckets, what the last one does not fill is lost."""
    numels = [numel << 10 for numel in (9216, 3072, 3072, 9216, 24576, 24576, 24576, 3, 3)]  # of a Llama's block
    specs = [adam(numel) for numel in numels]
    most_bytes = 3 * sum(aligned(8 * numel) for numel in numels) // 8
    buckets, _ = plan_buckets(specs, most_bytes)
    sizes = [bucket.nbytes for bucket in buckets]
    assert len(sizes) == 3
    assert max(sizes) <= 1.05 * min(sizes)


@quick
@given(st.lists(st.integers(1, 300).map(lambda units: adam(units * 1000)), min_size=1, max_size=12), st.integers(2, 9))
def test_a_group_is_divided_into_as_many_buckets_as_it_must_be(specs: list[ShardSpec], parts: int) -> None:
    """Places have one size: each rest would take one, too."""
    total_bytes = sum(aligned(nbytes) for spec in specs for nbytes in spec.leaf_nbytes)
    bucket_bytes = max(64 << 10, -(-total_bytes // parts) * 33 // 32)  # as bucket_bytes_for chooses
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "_SMALL_BUCKET_BYTES", 1 << 30)
        buckets, _ = plan_buckets(specs, bucket_bytes)
    assert len(buckets) == max(1, -(-total_bytes // bucket_bytes))


def test_the_first_and_the_last_of_many_buckets_are_small() -> None:
    """Nothing overlaps with the first load and the last store."""
    sizes = [bucket.nbytes for bucket in plan_buckets([adam(64 * 1024)], 16_384)[0]]
    assert max(sizes) == 16_384
    assert max(sizes[0], sizes[-1]) <= 16_384 / 4
    assert len(sizes) <= 32 + 6


@pytest.mark.parametrize("bucket_bytes", [1024, 1 << 30])
def test_nothing_to_offload_is_no_bucket(bucket_bytes: int) -> None:
    assert plan_buckets([], bucket_bytes) == ((), ((), (), ()))
