"""ShardTensor: chunks that travel with the data through DCP's save and load, staging, copies and pickling.

In one process: the local tensor has the whole global tensor, as several chunks. ``distributed/test_ragged_checkpoints``
has parts of it on each rank.
"""

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.staging import BlockingAsyncStager, DefaultStager, StagingOptions
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from fsdp_offload.checkpoint import ShardTensor, chunks_of, save, with_chunks, with_parameter_chunks
from fsdp_offload.fsdp.dtensor import local_shard, over_local
from tests.loading import ragged as ragged_parts

SHAPE = (5, 3, 2)
WHOLE = torch.arange(30.0).view(SHAPE)


@pytest.fixture
def plain(mesh: DeviceMesh) -> DTensor:
    """As FSDP2 would have it."""
    return distribute_tensor(WHOLE, mesh, [Shard(0)])


@pytest.fixture
def ragged(mesh: DeviceMesh) -> Tensor:
    """The whole, in one flat buffer of eight chunks."""
    return ragged_parts(WHOLE, mesh, 7, 13)


STAGERS: dict[str, Callable[[], Any]] = {
    "default": lambda: DefaultStager(StagingOptions(False, False, False, False)),
    "blocking": BlockingAsyncStager,
    "blocking, cached": lambda: BlockingAsyncStager(cache_staged_state_dict=True),
}


@pytest.mark.parametrize("stager", STAGERS)
def test_a_staged_copy_is_isolated(ragged: Tensor, stager: str):
    staged = STAGERS[stager]().stage({"a": ragged})["a"]
    local_shard(ragged).zero_()
    assert isinstance(local_shard(staged), ShardTensor)
    assert torch.equal(local_shard(staged).local, WHOLE.flatten())
    index = MetadataIndex("a", chunks_of(ragged).chunks[-1].offsets)
    assert torch.equal(staged.__get_tensor_shard__(index), WHOLE[3:])


def test_a_stager_that_would_lose_the_chunks_fails(ragged: Tensor):
    """What a stager does that puts a plain tensor into the copied DTensor and fills it."""
    with pytest.raises(RuntimeError, match="DefaultStager"):
        torch.empty(30).copy_(local_shard(ragged))


# --- copies ----------------------------------------------------------------------------------------------------------


def pickled(value: Any, **kwargs: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer, **kwargs)


COPIES: dict[str, Callable[[Tensor], Tensor]] = {
    "clone": Tensor.clone,
    "deepcopy": copy.deepcopy,
    "to": lambda tensor: tensor.to("cpu", copy=True),
    "double": Tensor.double,
    "pointwise": lambda tensor: tensor + 0,
    "torch.save": lambda tensor: pickled(tensor, weights_only=False),
    "torch.save, weights_only": lambda tensor: pickled(tensor, weights_only=True),
}


@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("inside", [True, False], ids=["in a DTensor", "bare"])
def test_copies_carry_the_chunks_and_have_memory_of_their_own(ragged: Tensor, way: str, inside: bool):
    copied = COPIES[way](ragged if inside else local_shard(ragged))
    local_shard(ragged).zero_()
    assert isinstance(local_shard(copied), ShardTensor)
    assert chunks_of(copied) == chunks_of(ragged)
    assert torch.equal(local_shard(copied).local, WHOLE.flatten().to(copied.dtype))


def test_detach_shares_the_memory(ragged: Tensor):
    detached = ragged.detach()
    local_shard(ragged).fill_(3)
    assert isinstance(local_shard(detached), ShardTensor)
    assert local_shard(detached).local.eq(3).all()


@pytest.mark.parametrize("make", [torch.zeros_like, torch.empty_like, torch.ones_like])
def test_state_made_like_it_carries_the_chunks(ragged: Tensor, make: Callable[[Tensor], Tensor]):
    assert chunks_of(make(ragged)) == chunks_of(ragged)
    assert isinstance(local_shard(make(ragged)), ShardTensor)


def test_other_operations_give_plain_tensors():
    shard = ShardTensor(torch.arange(4.0), chunks_of((4,)))
    assert type(shard.flip(0)) is Tensor
    assert type(shard.sum()) is Tensor
    assert shard.sum() == 6


@pytest.mark.parametrize("name", ["fill_", "copy_", "add_"])
def test_a_write_through_the_wrapper_counts_in_its_memory(name: str) -> None:
    """By which the tensors of ``for_load=True`` are known to have been loaded."""
    memory = torch.zeros(4)
    shard = ShardTensor(memory, chunks_of((4,)))
    assert getattr(shard, name)(torch.ones(4) if name == "copy_" else 1) is shard
    assert memory._version == 1
    torch._foreach_mul_([shard], 2)
    assert torch.equal(memory, torch.full((4,), 2.0))


def test_flatten_and_unflatten():
    shard = ShardTensor(torch.arange(4.0), chunks_of((4,)))
    names, context = shard.__tensor_flatten__()
    inner = {name: getattr(shard, name) for name in names}
    again = ShardTensor.__tensor_unflatten__(inner, context, shard.size(), shard.stride())
    assert again.local is shard.local
    assert again.shard_chunks == shard.shard_chunks


# --- refusals --------------------------------------------------------------------------------------------------------


def test_wrong_memory_is_refused(plain: DTensor):
    with pytest.raises(ValueError, match="expected a local tensor of 3 elements"):
        ShardTensor(torch.zeros(4), chunks_of((4,), (0, 3)))
    with pytest.raises(ValueError, match="expected chunks of a tensor of shape"):
        with_chunks(plain, torch.zeros(4), chunks_of((4,)))


def test_chunks_of_another_tensor_are_not_saved(tmp_path: Path, plain: DTensor):
    wrong = over_local(plain, ShardTensor(torch.zeros(4), chunks_of((4,))))
    with pytest.raises(dcp.api.CheckpointException, match="its chunks are those of a tensor of"):
        dcp.save({"a": wrong}, checkpoint_id=tmp_path / "checkpoint")
    assert not list(tmp_path.glob("checkpoint/*.distcp"))


def test_values_whose_placements_say_it_all_are_taken_over_as_they_are(plain: DTensor):
    model = nn.ParameterDict({"weight": nn.Parameter(plain)})
    assert with_parameter_chunks(model, {"weight": plain})["weight"] is plain


def test_a_chunk_that_is_not_there_is_an_error(ragged: Tensor):
    with pytest.raises(ValueError, match="has no chunk at"):
        ragged.__get_tensor_shard__(MetadataIndex("a", (4, 2, 1)))


def test_a_writer_that_keeps_one_chunk_is_refused(tmp_path: Path, ragged: Tensor, plain: DTensor):
    pytest.importorskip("safetensors")
    writer = dcp.HuggingFaceStorageWriter(str(tmp_path))
    with pytest.raises(ValueError, match=r"one chunk .* would silently drop the others of state\.a"):
        save({"state": {"a": ragged, "b": plain}}, storage_writer=writer)
    assert not list(tmp_path.glob("*.safetensors"))
    save({"a": with_chunks(plain)}, storage_writer=writer)
    save({"a": ragged}, storage_writer=dcp.FileSystemWriter(tmp_path))
