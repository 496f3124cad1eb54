"""Full state dicts of sharded low-precision models with masters, which fp32 ones, sharded in the same way, tell.

Their training is an axis of the conformance suite, their checkpoints are in ``test_layout_matrix.py``.
"""

import copy
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict as torch_get_optimizer_state_dict
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from fsdp_offload import remove_offload
from fsdp_offload.checkpoint import set_optimizer_state_dict
from fsdp_offload.fsdp.dtensor import local_shard, over_local
from tests.cpu.test_shard_tensor import pickled
from tests.distributed import models
from tests.distributed.launch import DEVICE_TYPE, agree, mesh, spawn, spawn_cases
from tests.distributed.models import batch, build
from tests.distributed.test_sharded_checkpoints import TINY
from tests.parity import MakeOptimizer, Run, adamw
from tests.tiers import world_sizes
from tests.twins import Twins, twins_of

pytestmark = pytest.mark.distributed

KINDS = ("fp32", "remainder")


def make_twins(
    shard: models.ShardNet, optimizer: MakeOptimizer, kind: str, dtype: torch.dtype = torch.bfloat16, seed: int = 0
) -> Twins:
    low = build(shard, seed=seed, prepare=lambda net: net.to(dtype))
    full = build(shard, seed=seed, prepare=lambda net: net.to(dtype).float())
    twins = twins_of(full, low, optimizer, kind, dtype)
    twins.add_masters()
    twins.attach(TINY, with_model=True)
    return twins


def gradients(run: Run, step: int) -> None:
    """``extra`` is used from the third step on."""
    run.model(batch(step * 8 + run.model.data_rank), extra=step >= 2).backward()


def train(twins: Twins, steps: int) -> Iterator[str]:
    """What is different, in words; nothing if all is the same."""
    for _ in range(steps):
        twins.update(gradients)
        found = [f"after {twins.steps} steps: {problem}" for problem in twins.differences()]
        problems = agree(found)
        if problems:
            yield from problems[:4]
            return


FULL = StateDictOptions(full_state_dict=True)
ON_FIRST_RANK = StateDictOptions(full_state_dict=True, cpu_offload=True)


def test_remainders_are_gathered(tmp_path: Path) -> None:
    """They are int16, which neither gloo nor NCCL carries; also where the offload has gone, and masters stay."""
    spawn(run_gathered, 2, tmp_path)


def run_gathered(rank: int, world_size: int) -> None:
    # Every pattern of 16 bits, those of NaNs as well, in rows that two ranks share unevenly.
    for dtype in (torch.int16, torch.uint16):
        bits = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(dtype)
        whole = torch.cat([bits, bits[:7]]).to(DEVICE_TYPE)
        over = mesh(world_size)
        like = distribute_tensor(torch.zeros(len(whole), device=DEVICE_TYPE), over, [Shard(0)])
        value = over_local(like, whole.chunk(world_size)[over.get_local_rank()].clone())
        for gathered in (value.full_tensor(), value.to("cpu").to(DEVICE_TYPE).detach().full_tensor()):
            assert gathered.dtype is dtype
            assert torch.equal(gathered.view(torch.uint8), whole.view(torch.uint8))
        assert type(pickled(value, weights_only=False)) is DTensor

    twins = make_twins(models.shard_even, adamw, "remainder")
    remove_offload(twins.low.optimizer)
    assert not list(train(twins, 3))
    model, optimizer = twins.low.model, twins.low.optimizer
    assert bool(torch_get_optimizer_state_dict(model, optimizer, options=ON_FIRST_RANK)) == (rank == 0)
    full = torch_get_optimizer_state_dict(model, optimizer, options=FULL)
    assert full["state"]
    for param, state in full["state"].items():
        own = optimizer.state[dict(model.named_parameters())[param]]
        assert state["master_param"].dtype is torch.int16
        for name, gathered in state.items():
            part = own[name]
            if isinstance(part, DTensor):
                over = part.device_mesh
                part, gathered = local_shard(part), gathered.chunk(over.size())[over.get_local_rank()]
            assert torch.equal(part.cpu(), gathered.cpu()), (param, name)


@world_sizes(2, 4)
def test_full_state_dicts_are_loaded(world_size: int, tmp_path: Path) -> None:
    """Each rank copies its part, uneven and empty ones and several rectangles, whatever collectives carry."""
    shards = (models.shard_even, models.shard_columns, models.shard_tensor_parallel)
    cases = {f"{shard.__name__}, {kind}": partial(full_loads, shard, kind) for shard in shards for kind in KINDS}
    spawn_cases(cases, world_size, tmp_path)


def full_loads(shard: models.ShardNet, kind: str) -> Iterator[str]:
    twins = make_twins(shard, adamw, kind)
    yield from train(twins, 3)
    model, optimizer = twins.low.model, twins.low.optimizer
    before = {param: [leaf.clone() for leaf in local_leaves(state)] for param, state in optimizer.state.items()}
    full = copy.deepcopy(torch_get_optimizer_state_dict(model, optimizer, options=FULL))  # counters are the optimizer's
    for state in optimizer.state.values():
        for leaf in local_leaves(state):
            leaf.add_(1)
    set_optimizer_state_dict(model, optimizer, full)
    for param, leaves in before.items():
        if not all(map(torch.equal, leaves, local_leaves(optimizer.state[param]))):
            yield f"state of shape {tuple(param.shape)} is not what was saved"


def local_leaves(state: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    return [local_shard(value) for value in state.values()]
