"""Chunk metadata: every element of the global tensor in exactly one chunk, and where torch and the data say."""

import itertools
import math
import tracemalloc
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry, TensorMeta
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_offload.checkpoint import Chunk, ShardChunks, ShardTensor, chunks_of, with_chunks
from fsdp_offload.checkpoint.chunks import Cut, contiguous_strides, cut_chunks, ragged_chunks
from fsdp_offload.fsdp.dtensor import local_shard, over_local
from tests.process_groups import process_group

Shape = tuple[int, ...]

shapes = st.lists(st.integers(0, 9), min_size=1, max_size=4).map(tuple)
small_shapes = st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple)


@st.composite
def shardings(draw: Callable[..., Any]) -> tuple[Shape, Shape, tuple[Placement, ...]]:
    """Global shape, mesh shape, placements."""
    shape = draw(shapes)
    mesh_shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple))
    dims = st.integers(0, len(shape) - 1)
    strided = st.builds(lambda dim, factor: _StridedShard(dim, split_factor=factor), dims, st.integers(1, 5))
    placement = st.one_of(st.just(Replicate()), st.builds(Shard, dims), strided)
    return shape, mesh_shape, tuple(draw(placement) for _ in mesh_shape)


# --- parts made by placements ----------------------------------------------------------------------------------------


@settings(max_examples=400, deadline=None)
@given(shardings())
@example(((5,), (4,), (Shard(0),)))  # 2, 2, 1, 0 rows
@example(((9, 4), (2, 2), (_StridedShard(0, split_factor=2), Shard(0))))  # FSDP2 with tensor parallelism
@example(((7, 2), (3,), (_StridedShard(0, split_factor=2),)))  # several rectangles
@example(((3, 5), (2, 2, 2), (Shard(0), Shard(1), Shard(0))))
def test_chunks_hold_what_torch_puts_on_each_rank(sharding: tuple[Shape, Shape, tuple[Placement, ...]]):
    shape, mesh_shape, placements = sharding
    whole = torch.arange(math.prod(shape)).view(shape)
    for coordinate in coordinates(mesh_shape):
        local = sharded(whole, mesh_shape, placements, coordinate)
        found = cut_chunks(shape, cuts_of(mesh_shape, placements, coordinate))
        assert found.local_shape == tuple(local.shape)
        assert_holds(found, whole, local)


def test_empty_parts_are_all_the_same_chunk():
    parts = [cut_chunks((5, 3), (Cut(0, 8, part),)) for part in range(8)]
    assert {part.chunks[0][:2] for part in parts[5:]} == {((5, 0), (0, 3))}


def test_rows_that_follow_each_other_are_one_rectangle():
    assert len(cut_chunks((8, 2), (Cut(0, 1, 0, split_factor=4),)).chunks) == 1
    assert len(cut_chunks((8, 2), (Cut(0, 2, 0, split_factor=2), Cut(0, 2, 1))).chunks) == 1


# --- ragged parts ----------------------------------------------------------------------------------------------------


@settings(max_examples=300, deadline=None)
@given(shapes, st.data())
def test_ragged_parts_tile_the_tensor(shape: Shape, data: st.DataObject):
    numel = math.prod(shape)
    inner = data.draw(st.lists(st.integers(0, numel), max_size=5))
    bounds = [0, *sorted(inner), numel]
    whole = torch.arange(numel).view(shape)
    parts = []
    for begin, end in itertools.pairwise(bounds):
        parts.append(chunks_of(shape, (begin, end)))
        assert_holds(parts[-1], whole, whole.flatten()[begin:end])
        assert len(parts[-1].chunks) <= 2 * len(shape) - 1
        assert [chunk.local_start for chunk in parts[-1].chunks] == running_starts(parts[-1])
    assert_tile(shape, parts)


@settings(max_examples=100, deadline=None)
@given(small_shapes, st.data())
def test_a_flat_range_of_a_rectangle(shape: Shape, data: st.DataObject):
    offsets = tuple(data.draw(st.integers(0, size - 1)) for size in shape)
    sizes = tuple(data.draw(st.integers(1, size - offset)) for size, offset in zip(shape, offsets, strict=True))
    begin = data.draw(st.integers(0, math.prod(sizes)))
    end = data.draw(st.integers(begin, math.prod(sizes)))
    whole = torch.arange(math.prod(shape)).view(shape)
    rectangle = whole[tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))]
    found = ragged_chunks(shape, (offsets, sizes), begin, end)
    assert_holds(found, whole, rectangle.flatten()[begin:end])


def test_empty_ranges_are_all_the_same_chunk_and_scalars_have_none():
    assert chunks_of((4, 3), (0, 0)) == chunks_of((4, 3), (12, 12)) == chunks_of((4, 3), slice(5, 5))
    assert chunks_of((4, 3), (5, 5)).chunks[0][:2] == cut_chunks((4, 3), (Cut(0, 5, 4),)).chunks[0][:2]
    assert chunks_of((), (0, 0)).chunks == ()
    assert chunks_of((), (0, 1)).chunks == chunks_of(()).chunks


@pytest.mark.parametrize("flat_range", [(-1, 2), (3, 2), (0, 13), slice(None, 3), slice(0, 4, 2)])
def test_impossible_ranges_are_refused(flat_range: Any):
    with pytest.raises(ValueError, match="flat range"):
        chunks_of((4, 3), flat_range)


# --- read off tensors ------------------------------------------------------------------------------------------------


PLACED = [
    ((7, 4), (4,), (Shard(0),)),
    ((4, 6), (3,), (Shard(1),)),
    ((7, 4), (2, 2), (Replicate(), Shard(0))),
    ((7, 4), (2, 2), (Shard(0), Shard(1))),
    ((7, 4), (2, 2), (_StridedShard(0, split_factor=2), Shard(0))),
    ((9, 5, 2), (2, 2, 2), (Replicate(), _StridedShard(0, split_factor=2), Shard(0))),
    ((9, 5, 2), (2, 3, 2), (Shard(0), Shard(0), Shard(1))),
]


@pytest.mark.parametrize(("shape", "mesh_shape", "placements"), PLACED, ids=str)
def test_chunks_of_dtensors(shape: Shape, mesh_shape: Shape, placements: tuple[Placement, ...]):
    whole = torch.arange(math.prod(shape)).view(shape)
    for mesh, coordinate in all_ranks(mesh_shape):
        tensor = dtensor(mesh, placements, shape)
        local = sharded(whole, mesh_shape, tensor.placements, coordinate)
        assert_holds(chunks_of(tensor), whole, local)
        (torchs,) = tensor.__create_chunk_list__()
        assert (torchs.offsets, torchs.sizes) == chunks_of(tensor).chunks[0][:2]


def test_a_shard_order_of_its_own_is_followed():
    """torch's own goes from left to right here, and names the rows of another rank."""
    whole = torch.arange(8)
    for mesh, coordinate in all_ranks((2, 2)):
        meta = TensorMeta(whole.shape, whole.stride(), whole.dtype)
        spec = DTensorSpec(mesh, (Shard(0), Shard(0)), meta, shard_order=(ShardOrderEntry(0, (1, 0)),))
        local = whole.chunk(2)[coordinate[1]].chunk(2)[coordinate[0]]
        assert_holds(chunks_of(DTensor(local, spec, requires_grad=False)), whole, local)


def test_a_shard_order_of_the_mesh_is_followed():
    """Megatron-FSDP leaves it there; the spec says what torch makes of no order."""
    whole = torch.arange(48).view(8, 6)
    for mesh, (outer, middle, inner) in all_ranks((2, 2, 2)):
        mesh._shard_order = [2, 0, 1]
        tensor = dtensor(mesh, (Shard(0), Shard(1), Shard(0)), (8, 6))
        local = whole.chunk(2)[inner].chunk(2)[outer].chunk(2, 1)[middle]
        assert_holds(chunks_of(tensor), whole, local)
        strided = dtensor(mesh, (_StridedShard(0, split_factor=2), Replicate(), Shard(0)), (8, 6))
        assert_holds(chunks_of(strided), whole, whole.chunk(2)[inner].chunk(2)[outer])  # it says the order itself


def test_what_has_no_chunks_is_refused():
    for mesh, _ in all_ranks((2,)):
        with pytest.raises(ValueError, match="this part of a tensor has 2"):
            chunks_of(dtensor(mesh, (_StridedShard(0, split_factor=2),), (8, 2)), (0, 1))


def test_a_rank_outside_the_mesh_has_no_chunks():
    with process_group("fake", rank=2, world_size=3):
        mesh = DeviceMesh("cpu", [0, 1])
        assert chunks_of(dtensor(mesh, (Shard(0),), (4, 3))) == ShardChunks((4, 3), (0,), ())


def test_a_shard_tensor_says_its_own():
    ragged = chunks_of((6, 2), (1, 8))
    assert chunks_of(ShardTensor(torch.zeros(7), ragged)) is ragged
    for mesh, _ in all_ranks((2,)):
        assert chunks_of(with_chunks(dtensor(mesh, (Shard(0),), (6, 2)), torch.zeros(7), ragged)) is ragged


def test_plain_tensors_and_shapes_are_whole():
    assert chunks_of(torch.zeros(3, 2)) == chunks_of((3, 2)) == cut_chunks((3, 2), ())


def test_a_megatron_parameter_without_a_slice_goes_by_its_placements():
    for mesh, _ in all_ranks((2,), names=("dp_shard",)):
        param: Any = dtensor(mesh, (Replicate(),), (3, 2))
        param.megatron_fsdp_dist_index = SimpleNamespace(tp_dim=None)
        assert chunks_of(param) == chunks_of((3, 2))


def test_a_parameter_of_megatron_fsdp_v2_has_the_rows_that_its_group_packs():
    """30 elements of 3 parameters, one behind the other, of which the two ranks have 18 and 12."""
    shapes, starts = ((4, 3), (5, 2), (2, 3)), (0, 14, 24)
    rows = [((0, 4), (0, 2), (2, 0)), ((4, 0), (2, 3), (0, 2))]
    for (mesh, (rank,)), parts in zip(all_ranks((2,)), rows, strict=True):
        layout = SimpleNamespace(tensor_shapes=shapes, tensor_to_offset=starts)
        group: Any = type("Group", (), {})()
        buffer = torch.empty(12 if rank else 18)
        group.main_weight = SimpleNamespace(layout=layout, offset=18 * rank, local_buffer=buffer)
        sizes = [(count, *shape[1:]) for (_, count), shape in zip(parts, shapes, strict=True)]
        made = [nn.Parameter(placed(mesh, *pair)) for pair in zip(sizes, shapes, strict=True)]
        group.fsdp_parameters = [SimpleNamespace(sharded=param) for param in made]
        for param, shape, (first, count) in zip(made, shapes, parts, strict=True):
            param._mfsdp_parameter_group = weakref.ref(group)  # type: ignore[attr-defined]
            (found,) = chunks_of(param).chunks
            assert found[:2] == ((first if count else shape[0], 0), (count, *shape[1:]))
        copy: Any = made[0].detach().clone()
        copy._mfsdp_parameter_group = group  # of the released version; of no parameter of the group, nothing is known
        with pytest.raises(ValueError, match="nothing says how"):
            chunks_of(copy)
        layout.tensor_shapes = ((2, 3), *shapes[1:])
        with pytest.raises(ValueError, match=r"of shape \(4, 3\) has \(2, 3\) in its group"):
            chunks_of(made[0])


# --- what a local tensor says of itself, and what it costs -----------------------------------------------------------


def placed(mesh: DeviceMesh, sizes: Shape, shape: Shape) -> DTensor:
    stride = contiguous_strides(shape)
    placement = Shard(0) if shape else Replicate()
    return DTensor.from_local(torch.zeros(sizes), mesh, [placement], run_check=False, shape=shape, stride=stride)


def uneven(mesh: DeviceMesh, shape: Shape, offsets: Shape, sizes: Shape) -> DTensor:
    """As Megatron's ``update_uneven_dtensor_chunk_metadata`` leaves it: two functions on the local tensor."""
    made = placed(mesh, sizes, shape)
    local: Any = local_shard(made)
    chunk = ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes))
    local.__create_chunk_list__ = lambda: [chunk]
    local.__create_write_items__ = lambda fqn, tensor: [(fqn, chunk)] if tensor.to_local().numel() else []
    return made


def test_what_a_local_tensor_says_wins_over_its_placements():
    """4 and 8 rows, which ``Shard(0)`` would read as 6 and 6."""
    rows = [(0, 4), (4, 8)]
    parts = []
    for (mesh, _), (begin, count) in zip(all_ranks((2,)), rows, strict=True):
        parts.append(chunks_of(uneven(mesh, (12, 5), (begin, 0), (count, 5))))
        assert parts[-1].chunks == (Chunk((begin, 0), (count, 5), 0, (5, 1)),)
    assert_tile((12, 5), parts)
    for mesh, _ in all_ranks((1,)):
        assert chunks_of(uneven(mesh, (), (), ())) == chunks_of(())


def test_an_empty_part_that_says_where_it_would_begin_collides_with_nothing():
    for (mesh, _), begin in zip(all_ranks((2,)), (0, 12), strict=True):
        assert chunks_of(uneven(mesh, (12, 5), (begin, 0), (0, 5))).chunks[0].offsets == (12, 0)


def test_a_tensor_made_like_another_says_the_same():
    for mesh, _ in all_ranks((2,)):
        param = uneven(mesh, (12, 5), (4, 0), (8, 5))
        home = over_local(param, torch.zeros(8, 5, dtype=torch.float64))
        assert chunks_of(home) == chunks_of(param)
        assert home.__create_write_items__("x", home)[0][1].sizes == (8, 5)
        carried = with_chunks(param)
        assert chunks_of(carried) == chunks_of(param)
        assert [item.index.offset for item in carried.__create_write_items__("x", carried)] == [(4, 0)]
        whole_parts = over_local(param, torch.zeros(3, 5))  # another part of it
        assert not hasattr(local_shard(whole_parts), "__create_chunk_list__")


def test_uneven_parts_that_nothing_or_something_wrong_is_said_of_are_refused():
    for mesh, _ in all_ranks((2,)):
        param = uneven(mesh, (12, 5), (4, 0), (8, 5))
        local: Any = local_shard(param)
        local.__create_chunk_list__ = lambda: [ChunkStorageMetadata(torch.Size((4, 0)), torch.Size((7, 5)))]
        with pytest.raises(ValueError, match=r"says that it is the chunk at \(4, 0\) of \(7, 5\) .*, and has shape"):
            chunks_of(param)
        del local.__create_chunk_list__
        with pytest.raises(ValueError, match=r"has \(6, 5\) on this rank, and its local tensor is \(8, 5\)"):
            chunks_of(param)


class NoOperations(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} was called")


@pytest.mark.parametrize(
    "placements", [(Shard(0), Shard(0)), (_StridedShard(0, split_factor=64), Shard(0)), (Replicate(), Shard(1))]
)
def test_no_tensor_no_collective_and_no_list_of_rows(placements: tuple[Placement, ...]):
    with process_group("fake", rank=777, world_size=16_384):
        mesh = init_device_mesh("cpu", (256, 64))
        tensor = dtensor(mesh, placements, (10**12, 64))
        cut_chunks.cache_clear()
        tracemalloc.start()
        with CommDebugMode() as collectives, NoOperations():
            found = chunks_of(tensor)
            chunks_of(tensor, (1, found.local_numel - 1))
        peak_bytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert collectives.get_total_counts() == 0
    assert peak_bytes < 200_000


def test_all_state_of_a_parameter_shares_one_answer():
    with process_group("fake", rank=3, world_size=8):
        param = dtensor(init_device_mesh("cpu", (8,)), (Shard(0),), (1000, 3))
        assert chunks_of(param) is chunks_of(over_local(param, torch.empty(125, 3, dtype=torch.bfloat16)))


def all_ranks(mesh_shape: Shape, names: tuple[str, ...] | None = None) -> Iterator[tuple[DeviceMesh, Shape]]:
    """The mesh as every rank sees it, one after the other."""
    for rank, coordinate in enumerate(coordinates(mesh_shape)):
        with process_group("fake", rank, math.prod(mesh_shape)):
            yield init_device_mesh("cpu", mesh_shape, mesh_dim_names=names), coordinate


def dtensor(mesh: DeviceMesh, placements: Sequence[Placement], shape: Shape) -> DTensor:
    """Without data: only mesh, placements and global shape."""
    like: dict[str, Any] = {"shape": torch.Size(shape), "stride": contiguous_strides(shape)}
    return DTensor.from_local(torch.empty(0, device="meta"), mesh, placements, run_check=False, **like)


def coordinates(mesh_shape: Sequence[int]) -> Iterator[Shape]:
    return itertools.product(*(range(n) for n in mesh_shape))


def cuts_of(mesh_shape: Shape, placements: Sequence[Placement], coordinate: Shape) -> tuple[Cut, ...]:
    along = zip(placements, mesh_shape, coordinate, strict=True)
    return tuple(
        Cut(placement.dim, parts, part, getattr(placement, "split_factor", 1))
        for placement, parts, part in along
        if not placement.is_replicate()
    )


def sharded(whole: Tensor, mesh_shape: Shape, placements: Sequence[Placement], coordinate: Shape) -> Tensor:
    """What torch puts onto a rank: the data themselves, cut by the placements, without any metadata."""
    for placement, parts, part in zip(placements, mesh_shape, coordinate, strict=True):
        if not placement.is_replicate():
            whole = placement._split_tensor(whole, parts, with_padding=False, contiguous=True)[0][part]
    return whole


def assert_holds(found: ShardChunks, whole: Tensor, local: Tensor) -> None:
    """Each chunk, viewed in the local buffer, is that rectangle of the whole; together they are all of the buffer."""
    buffer = local.flatten().clone()
    assert sum(chunk.numel for chunk in found.chunks) == found.local_numel == buffer.numel()
    for chunk in found.chunks:
        there = whole[tuple(slice(o, o + s) for o, s in zip(chunk.offsets, chunk.sizes, strict=True))]
        assert torch.equal(buffer.as_strided(chunk.sizes, chunk.local_strides, chunk.local_start), there)
        assert all(o + s <= n for o, s, n in zip(chunk.offsets, chunk.sizes, whole.shape, strict=True))


def assert_tile(shape: Shape, parts: Sequence[ShardChunks]) -> None:
    times = torch.zeros(shape, dtype=torch.int)
    for chunk in itertools.chain.from_iterable(part.chunks for part in parts):
        times[tuple(slice(o, o + s) for o, s in zip(chunk.offsets, chunk.sizes, strict=True))] += 1
    assert torch.equal(times, torch.ones_like(times))


def running_starts(found: ShardChunks) -> list[int]:
    return list(itertools.accumulate((chunk.numel for chunk in found.chunks[:-1]), initial=0))
