"""Where parts lie in shards of a fused tensor: against the same parts cut out of the whole tensor by indexing."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from checkpoint_tools.core.regions import Comb, combs_of, part_chunks, span_of
from fsdp_offload.checkpoint import ShardChunks
from fsdp_offload.checkpoint.chunks import Cut, cut_chunks, ragged_chunks


def indices(comb: Comb) -> list[int]:
    return [comb.start + block * comb.distance + at for block in range(comb.blocks) for at in range(comb.length)]


# What a layout means -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "layout", "groups", "expected"),
    [
        ((2, 3), "concatenated", 1, [[0, 1], [2, 3, 4]]),
        ((3, 3), "interleaved", 1, [[0, 2, 4], [1, 3, 5]]),
        ((4, 2), "grouped", 2, [[0, 1, 3, 4], [2, 5]]),
    ],
)
def test_where_the_parts_lie(sizes, layout, groups, expected) -> None:
    assert [indices(comb) for comb in combs_of(sizes, layout, groups)] == expected


def test_stacked_parts_do_not_have_the_dimension() -> None:
    first, second = combs_of((1, 1), "stacked")
    assert [indices(first), indices(second)] == [[0], [1]]
    assert second.part_shape((5, 2, 3), 1) == (5, 3)
    (chunk,) = part_chunks(cut_chunks((6, 2, 3), (Cut(0, 2, 1),)), 1, second).chunks
    assert (chunk.offsets, chunk.sizes, chunk.local_start, chunk.local_strides) == ((3, 0), (3, 3), 3, (6, 1))


@pytest.mark.parametrize(
    ("sizes", "layout", "groups", "match"),
    [
        ((2, 3), "interleaved", 1, "equal sizes"),
        ((4, 3), "grouped", 2, "do not divide into 2 groups"),
        ((2, 2), "stacked", 1, "one index each"),
    ],
)
def test_sizes_that_a_layout_does_not_allow(sizes, layout, groups, match) -> None:
    with pytest.raises(ValueError, match=match):
        combs_of(sizes, layout, groups)


@given(st.data())
def test_the_parts_of_every_layout_are_a_partition(data: st.DataObject) -> None:
    combs = data.draw(layouts())
    everything = sorted(index for comb in combs for index in indices(comb))
    assert everything == list(range(sum(comb.size for comb in combs)))


# Shards --------------------------------------------------------------------------------------------------------------


@st.composite
def layouts(draw: st.DrawFn) -> tuple[Comb, ...]:
    kind = draw(st.sampled_from(["concatenated", "interleaved", "grouped", "stacked"]))
    if kind == "stacked":
        return combs_of((1,) * draw(st.integers(2, 3)), kind)
    if kind == "interleaved":
        return combs_of((draw(st.integers(0, 5)),) * draw(st.integers(2, 3)), kind)
    groups = draw(st.integers(1, 3)) if kind == "grouped" else 1
    sizes = draw(st.lists(st.integers(0, 4), min_size=2, max_size=4))
    return combs_of([size * groups for size in sizes], kind, groups)


@st.composite
def shards(draw: st.DrawFn, shape: tuple[int, ...]) -> list[ShardChunks]:
    """All ranks' parts of a tensor: cut by one or two mesh dimensions, strided too, or in flat ranges."""
    if draw(st.booleans()):
        numel = math.prod(shape)
        bounds = sorted(draw(st.lists(st.integers(0, numel), max_size=4)))
        whole = ((0,) * len(shape), shape)
        return [ragged_chunks(shape, whole, *pair) for pair in itertools.pairwise([0, *bounds, numel])]
    dims = st.integers(0, len(shape) - 1)
    cuts = draw(st.lists(st.tuples(dims, st.integers(1, 4), st.integers(1, 2)), min_size=1, max_size=2))
    if len({dim for dim, _, _ in cuts}) < len(cuts):
        cuts = cuts[:1]
    parts = itertools.product(*(range(count) for _, count, _ in cuts))
    return [
        cut_chunks(
            shape,
            tuple(Cut(dim, count, part, factor) for (dim, count, factor), part in zip(cuts, chosen, strict=True)),
        )
        for chosen in parts
    ]


def local_memory(whole: Tensor, shard: ShardChunks) -> Tensor:
    memory = torch.full((shard.local_numel,), -1.0)
    for chunk in shard.chunks:
        where = tuple(slice(at, at + size) for at, size in zip(chunk.offsets, chunk.sizes, strict=True))
        memory.as_strided(chunk.sizes, chunk.local_strides, chunk.local_start).copy_(whole[where])
    return memory


@given(st.data())
def test_parts_of_shards_are_shards_of_parts(data: st.DataObject) -> None:
    combs = data.draw(layouts())
    others = data.draw(st.lists(st.integers(1, 4), max_size=2))
    dim = data.draw(st.integers(0, len(others)))
    shape = (*others[:dim], sum(comb.size for comb in combs), *others[dim:])
    whole = torch.arange(float(math.prod(shape))).view(shape)
    ranks = data.draw(shards(shape))
    for comb in combs:
        expected = whole.index_select(dim, torch.tensor(indices(comb), dtype=torch.long))
        if comb.is_dropped:
            expected = expected.squeeze(dim)
        found = torch.full_like(expected, -2.0)
        written = torch.zeros_like(expected)
        for shard in ranks:
            memory = local_memory(whole, shard)
            part = part_chunks(shard, dim, comb)
            assert part.global_shape == tuple(expected.shape)
            begin, spanned = span_of(part)
            stretch = memory[begin : begin + spanned.local_numel]
            for chunk in spanned.chunks:
                where = tuple(slice(at, at + size) for at, size in zip(chunk.offsets, chunk.sizes, strict=True))
                start = stretch.storage_offset() + chunk.local_start
                found[where] = stretch.as_strided(chunk.sizes, chunk.local_strides, start)
                written[where] += 1
        assert torch.equal(found, expected)
        assert bool((written == 1).all())


def test_a_rank_without_anything_of_a_part_has_one_empty_chunk_at_its_end() -> None:
    first, second = combs_of((4, 4), "concatenated")
    lower = cut_chunks((8, 3), (Cut(0, 2, 0),))
    assert [chunk.sizes for chunk in part_chunks(lower, 0, first).chunks] == [(4, 3)]
    (empty,) = part_chunks(lower, 0, second).chunks
    assert (empty.offsets, empty.sizes) == ((4, 0), (0, 3))
    assert span_of(part_chunks(lower, 0, second))[1].local_numel == 0
