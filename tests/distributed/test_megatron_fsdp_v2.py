"""Megatron-FSDP v2 (``megatron_fsdp.experimental``): whole rows of each parameter, as its group packs them.

The groups and buffers are its own. Its hooks on modules need a GPU: here gradients are put where its reduction does.
"""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp_offload import OffloadPolicy, is_offloaded, offload_optimizer
from fsdp_offload.checkpoint import (
    get_optimizer_state_dict,
    load,
    save,
    set_optimizer_state_dict,
    with_parameter_chunks,
)
from fsdp_offload.fsdp.dtensor import local_shard
from tests.distributed.launch import mesh, spawn

pytest.importorskip("megatron_fsdp.experimental")
pytestmark = pytest.mark.distributed

SHAPES = {"up": (7, 6), "gate": (2, 4), "down": (5, 3), "bias": (4,), "norm": (1, 2)}
STATE = ("exp_avg", "exp_avg_sq")


class Block(nn.Module):
    def __init__(self, fill: float) -> None:
        super().__init__()
        for number, (name, shape) in enumerate(SHAPES.items()):
            numel = torch.Size(shape).numel()
            self.register_parameter(name, nn.Parameter(fill * (torch.arange(numel).view(shape) + 50.0 * number)))


def gradients(step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(shape, generator=generator) for shape in SHAPES.values()]


def plainly_trained(steps: int) -> tuple[Block, torch.optim.AdamW]:
    block = Block(0.01)
    optimizer = torch.optim.AdamW(block.parameters(), lr=0.1)
    for step in range(steps):
        for param, grad in zip(block.parameters(), gradients(step), strict=True):
            param.grad = grad
        optimizer.step()
    return block, optimizer


def packed(tensors: list[Tensor], ranks: int) -> Any:
    from megatron_fsdp.experimental.dbuffer import DBuffer
    from megatron_fsdp.experimental.placement import Flat

    return DBuffer.distribute_tensors(tensors, mesh(ranks), [Flat()])


def sharded(fill: float, ranks: int, *, offload: bool = True) -> tuple[Block, Any, Any]:
    from megatron_fsdp.experimental.parameter_group import FsdpParameterGroup
    from megatron_fsdp.experimental.placement import Flat, Placements
    from megatron_fsdp.mixed_precision import MixedPrecisionPolicy

    block, flat = Block(fill), [Flat()]
    placements = Placements(dp_axes=[0], parameter=flat, gradient=flat, optimizer=flat)
    group = FsdpParameterGroup(block, dict(block.named_parameters()), mesh(ranks), placements, MixedPrecisionPolicy())
    optimizer = torch.optim.AdamW(block.parameters(), lr=0.1)
    if offload:
        offload_optimizer(optimizer, policy=OffloadPolicy(bucket_bytes=1024))
    return block, optimizer, group


def train(block: Block, optimizer: Any, ranks: int, steps: range) -> None:
    for step in steps:
        grads = packed(gradients(step), ranks)
        for number, param in enumerate(block.parameters()):
            param.grad = grads.get_dtensor(number)
        optimizer.step()
        optimizer.zero_grad()


def assert_trained(block: Block, optimizer: Any, ranks: int, steps: int) -> None:
    whole, reference = plainly_trained(steps)
    params = list(block.parameters())
    for expected, got in (
        ([*whole.parameters()], params),
        *(
            ([reference.state[p][n] for p in whole.parameters()], [optimizer.state[p][n] for p in params])
            for n in STATE
        ),
    ):
        parts = packed(expected, ranks)
        for number, tensor in enumerate(got):
            assert torch.equal(local_shard(tensor).view(-1), parts.get_local_tensor(number).view(-1))


def let_parameters_know(block: Block, optimizer: Any) -> None:
    """As a refusal says: of parameters whose group is not known."""
    from megatron_fsdp.uneven_dtensor import update_uneven_dtensor_chunk_metadata

    for param in block.parameters():
        del param._mfsdp_parameter_group  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=r"nothing says how\. .*update_uneven_dtensor_chunk_metadata\(param\)"):
        get_optimizer_state_dict(block, optimizer)
    for param in block.parameters():
        update_uneven_dtensor_chunk_metadata(param)


def save_on(rank: int, ranks: int, path: Path, *, with_group: bool) -> None:
    block, optimizer, group = sharded(0.01, ranks)
    assert group.main_weight.layout.size > sum(torch.Size(shape).numel() for shape in SHAPES.values()), "no gaps"
    train(block, optimizer, ranks, range(3))
    if not with_group:
        let_parameters_know(block, optimizer)
    optimizer_state = get_optimizer_state_dict(block, optimizer)
    save({"model": with_parameter_chunks(block, block.state_dict()), "optimizer": optimizer_state}, checkpoint_id=path)


def load_on(rank: int, ranks: int, path: Path, *, offload: bool = True) -> None:
    block, optimizer, _ = sharded(0.0, ranks, offload=offload)
    state = get_optimizer_state_dict(block, optimizer, for_load=True)
    load({"model": with_parameter_chunks(block, block.state_dict()), "optimizer": state}, checkpoint_id=path)
    set_optimizer_state_dict(block, optimizer, state)
    assert is_offloaded(optimizer) == offload
    assert_trained(block, optimizer, ranks, 3)
    train(block, optimizer, ranks, range(3, 5))
    assert_trained(block, optimizer, ranks, 5)


def load_full_on(rank: int, ranks: int) -> None:
    whole, reference = plainly_trained(3)
    block, optimizer, _ = sharded(0.01, ranks)
    set_optimizer_state_dict(block, optimizer, torch_full(whole, reference))
    for name in STATE:
        parts = packed([reference.state[param][name] for param in whole.parameters()], ranks)
        for number, param in enumerate(block.parameters()):
            assert torch.equal(local_shard(optimizer.state[param][name]), parts.get_local_tensor(number))


def torch_full(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import StateDictOptions
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict as torchs

    return torchs(model, optimizer, options=StateDictOptions(full_state_dict=True))


@pytest.mark.parametrize("with_group", [True, False])
def test_state_and_model_are_saved_and_loaded_at_other_rows(with_group: bool, tmp_path: Path) -> None:
    path = tmp_path / "saved"
    spawn(partial(save_on, with_group=with_group), 3, tmp_path, path, module=__name__)
    spawn(load_on, 2, tmp_path, path)
    spawn(partial(load_on, offload=False), 4, tmp_path, path, module=__name__)


def test_each_rank_takes_its_rows_of_a_full_state_dict(tmp_path: Path) -> None:
    spawn(load_full_on, 3, tmp_path)
