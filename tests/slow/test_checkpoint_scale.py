"""16,384 ranks and 1,000 tensors, in one process: DCP's own planner accepts what every rank says, and says it fast.

Meshes know their ranks and have no process group, so each rank is an object and nothing is sent. DCP's checks of a plan
look at one tensor over all ranks; so a few tensors of every kind are planned on all ranks, and all tensors on a few.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard
from torch.optim import AdamW

from fsdp_offload import OffloadPolicy, offload_optimizer
from fsdp_offload.checkpoint import chunks_of, get_optimizer_state_dict, with_chunks
from fsdp_offload.checkpoint.chunks import part_of

Shape = tuple[int, ...]

RANKS = 16_384
MESHES: dict[str, tuple[int, ...]] = {"fsdp": (RANKS,), "hsdp": (4, RANKS // 4), "fsdp, tp": (RANKS // 8, 8)}


@cache
def ranks_in(mesh: str) -> Tensor:
    return torch.arange(RANKS).view(MESHES[mesh])


def mesh_of(mesh: str, rank: int) -> DeviceMesh:
    """The mesh as that rank sees it."""
    return DeviceMesh("cpu", ranks_in(mesh), _init_backend=False, _rank=rank)


class MeshOfAllRanks(DeviceMesh):
    """One rank after the other: making 16,384 meshes takes longer than all plans."""

    def __init__(self, mesh: str) -> None:
        super().__init__("cpu", ranks_in(mesh), _init_backend=False, _rank=0)
        self.at: Shape = (0,) * self.ndim

    def each_rank(self) -> Iterator[int]:
        for rank, at in enumerate(itertools.product(*map(range, self.shape))):
            self.at = at
            yield rank

    def get_coordinate(self) -> Shape:
        return self.at

    def _sym_get_coordinate(self, index: int) -> int:
        return self.at[index]


def dtensor(mesh: DeviceMesh, placements: Sequence[Placement], shape: Shape, local: Tensor | None = None) -> DTensor:
    """By default without data: DCP plans with the global shape, the mesh and the placements."""
    stride = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
    local = torch.empty(0, device="meta") if local is None else local
    meta = TensorMeta(torch.Size(shape), stride, local.dtype)
    return DTensor(local, DTensorSpec(mesh, tuple(placements), meta), requires_grad=False)


def plan_of(state_dict: dict[str, Tensor], rank: int) -> SavePlan:
    planner = DefaultSavePlanner()
    planner.set_up_planner(state_dict, is_coordinator=rank == 0)
    return planner.create_local_plan()


def global_plan(plans: list[SavePlan]) -> Metadata:
    """DCP's own, with its deduplication and its validation: bounds, overlaps, and that nothing is missing."""
    planner = DefaultSavePlanner()
    planner.set_up_planner({}, is_coordinator=True)
    return planner.create_global_plan(plans)[1]


# A few tensors, all ranks --------------------------------------------------------------------------------------------


Parts = Callable[[DTensor, int], Tensor]
"""What a rank of that number saves of a tensor."""


def plain(like: DTensor, rank: int) -> Tensor:
    return like


def interleaved(like: DTensor, rank: int) -> Tensor:
    """Torch lists the rows one by one, which takes 50 ms for each rank: ours brings its own chunks."""
    tensor = with_chunks(like, torch.empty(chunks_of(like).local_shape, device="meta"))
    if rank % 1777 == 0 and len(chunks_of(like).chunks) == 1:
        assert_plan_is_of_chunks(plan_of({"exp_avg": like}, rank), {"exp_avg": tensor})  # torch's own
    return tensor


def ragged(like: DTensor, rank: int) -> Tensor:
    """It begins and ends in mid-row, and its neighbour goes on there; the last ranks have nothing."""
    begin, end = part_of(math.prod(like.shape), RANKS - 11, rank)
    return with_chunks(like, torch.empty(end - begin, device="meta"), chunks_of(tuple(like.shape), (begin, end)))


STRIDED = (_StridedShard(0, split_factor=8), Shard(0))
KINDS: dict[str, tuple[Parts, str, tuple[Placement, ...], Shape]] = {
    "even": (plain, "fsdp", (Shard(0),), (2 * RANKS, 3)),
    "uneven, some ranks empty": (plain, "fsdp", (Shard(0),), (RANKS + 5000, 2)),
    "fewer rows than ranks": (plain, "fsdp", (Shard(0),), (1000, 2)),
    "columns": (plain, "fsdp", (Shard(1),), (3, RANKS + 1)),
    "replicated and sharded": (plain, "hsdp", (Replicate(), Shard(0)), (RANKS, 2)),
    "two dimensions": (plain, "fsdp, tp", (Shard(0), Shard(1)), (3 * RANKS // 8 - 1, 64)),
    "interleaved, uneven": (interleaved, "fsdp, tp", STRIDED, (2 * RANKS + 77, 2)),
    "interleaved, few rows": (interleaved, "fsdp, tp", STRIDED, (100, 3)),
    "flat buffer": (ragged, "fsdp", (Shard(0),), (RANKS, 7, 5)),
    "hardly any elements": (ragged, "fsdp", (Shard(0),), (90, 10, 3)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_all_ranks_of_one_tensor_are_a_valid_plan(kind: str) -> None:
    part, mesh, placements, shape = KINDS[kind]
    of_all_ranks = MeshOfAllRanks(mesh)
    like = dtensor(of_all_ranks, placements, shape)
    plans = []
    for rank in of_all_ranks.each_rank():
        tensor = part(like, rank)
        plans.append(plan_of({"exp_avg": tensor}, rank))
        if rank % 5 == 0 and part is not interleaved:
            assert_plan_is_of_chunks(plans[-1], {"exp_avg": tensor})
    assert_filled(global_plan(plans), shape)
    assert max(len(plan.items) for plan in plans) == (4 if kind == "flat buffer" else 1)


def assert_filled(metadata: Metadata, shape: Shape) -> None:
    (found,) = metadata.state_dict_metadata.values()
    assert isinstance(found, TensorStorageMetadata)
    assert found.size == shape
    assert sum(math.prod(chunk.sizes) for chunk in found.chunks) == math.prod(shape)


def assert_plan_is_of_chunks(plan: SavePlan, tensors: dict[str, Tensor]) -> None:
    """The write items are the chunks, in their order, under their names."""
    wanted = [
        (name, chunk.offsets, chunk.offsets, chunk.sizes, tensor.shape)
        for name, tensor in tensors.items()
        for chunk in chunks_of(tensor).chunks
    ]
    found = []
    for item in plan.items:
        data = item.tensor_data
        assert data is not None
        found.append((item.index.fqn, item.index.offset, data.chunk.offsets, data.chunk.sizes, data.size))
    assert found == wanted


# All tensors, a few ranks --------------------------------------------------------------------------------------------


PARAMETERS = 500  # two state tensors each

PLACED: list[tuple[str, tuple[Placement, ...]]] = [
    *[("fsdp", (Shard(0),)), ("hsdp", (Replicate(), Shard(0))), ("fsdp, tp", (Shard(0), Shard(1)))] * 4,
    ("fsdp, tp", STRIDED),  # for which torch takes 15 ms each
]


def shapes() -> Iterator[Shape]:
    """Matrices and vectors, all of them different, from fewer rows than ranks to several on each."""
    for number in itertools.count(1):
        yield (97 * number if number % 2 else 13 * number, 16)
        yield (71 * number,)


class Layers(nn.Module):
    """The parameters of one rank, with the memory that it really has."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        meshes = {mesh: mesh_of(mesh, rank) for mesh in MESHES}
        for number, shape in zip(range(PARAMETERS), shapes(), strict=False):
            mesh, placements = PLACED[number % len(PLACED)]
            if len(shape) == 1 and placements[-1] == Shard(1):
                placements = (Replicate(), Shard(0))
            local = torch.ones(chunks_of(dtensor(meshes[mesh], placements, shape)).local_shape)
            # nn.Parameter(...) detaches, and torch remembers what that gives, for whichever rank asked first.
            param = dtensor(meshes[mesh], placements, shape, local).requires_grad_()
            param._is_param = True
            setattr(self, f"layer{number:03}", param)


@pytest.mark.filterwarnings("ignore:offload_optimizer:UserWarning")
@pytest.mark.parametrize("rank", [0, 1021, 16_383])
def test_a_thousand_tensors_of_one_rank_are_planned_as_their_chunks(rank: int) -> None:
    model = Layers(rank)
    optimizer = AdamW(model.parameters())
    offload_optimizer(optimizer, model=model, policy=OffloadPolicy(bucket_bytes=1 << 16))
    state = get_optimizer_state_dict(model, optimizer, for_load=True, flatten_optimizer_state_dict=True)
    tensors = {key: value for key, value in state.items() if "exp_avg" in key}
    assert len(tensors) == 2 * PARAMETERS
    plan = plan_of(tensors, rank)
    assert_plan_is_of_chunks(plan, tensors)
    assert plan == plan_of(tensors, rank)
    offsets = {item.index.fqn: item.index.offset for item in plan.items}
    for name, param in model.named_parameters():  # state lies where its parameter lies
        assert offsets[f"state.{name}.exp_avg"] == offsets[f"state.{name}.exp_avg_sq"] == chunks_of(param).chunks[0][0]
