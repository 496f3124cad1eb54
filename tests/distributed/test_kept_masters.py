"""Sharded low-precision models with masters go on from checkpoints as fp32 ones, which are sharded in the same way."""

import copy
import io
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn, optim
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict as torch_get_optimizer_state_dict
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from fsdp_offload import remove_offload
from fsdp_offload.checkpoint import get_optimizer_state_dict, load, set_optimizer_state_dict
from fsdp_offload.torch_compat.dtensor import local_shard, over_local
from tests.distributed import models
from tests.distributed.launch import DEVICE_TYPE, agree, mesh, run_cases, spawn
from tests.distributed.models import batch, build
from tests.distributed.test_sharded_checkpoints import TINY
from tests.parity import MakeOptimizer, Run, attach
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


def adamw(params: Iterable[nn.Parameter], **options: bool) -> optim.Optimizer:
    return optim.AdamW(params, lr=1e-2, **options)


# Without offload -----------------------------------------------------------------------------------------------------


def test_without_offload(tmp_path: Path) -> None:
    spawn(run_plain, 2, tmp_path)


def run_plain(rank: int, world_size: int) -> None:
    del rank, world_size
    shards = {"even": models.shard_even, "columns": models.shard_columns}
    run_cases({f"{name}, {kind}": partial(plain, shard, kind) for name, shard in shards.items() for kind in KINDS})


def plain(shard: models.ShardNet, kind: str) -> Iterator[str]:
    twins = make_twins(shard, adamw, kind)
    remove_offload(twins.low.optimizer)
    yield from train(twins, 4)


# Checkpoints ---------------------------------------------------------------------------------------------------------

SAVED_BY = {"3 ranks": (3, models.shard_even), "4 ranks, TP and FSDP": (4, models.shard_tensor_parallel)}
LOADED_BY: dict[int, models.ShardNet] = {1: models.shard_even, 2: models.shard_columns, 4: models.shard_even}


def twins_of_files(shard: models.ShardNet, kind: str, seed: int = 0) -> Twins:
    """The fp32 side is offloaded as well, without masters: its files are as tested elsewhere."""
    twins = make_twins(shard, adamw, kind, seed=seed)
    attach(twins.full.optimizer, policy=TINY, model=twins.full.model)
    return twins


def state_of(run: Run, *, for_load: bool) -> dict[str, Any]:
    optimizer = get_optimizer_state_dict(run.model, run.optimizer, for_load=for_load)
    return {"model": get_model_state_dict(run.model), "optimizer": optimizer}


def saves(shard: models.ShardNet, kind: str, folder: Path) -> Iterator[str]:
    """After two steps: ``extra`` has had no gradient, and neither side has state for it."""
    twins = twins_of_files(shard, kind)
    yield from train(twins, 2)
    for run, name in zip(twins, ("full", "low"), strict=True):
        dcp.save(state_of(run, for_load=False), checkpoint_id=folder / name)


def loads(shard: models.ShardNet, kind: str, folder: Path) -> Iterator[str]:
    twins = twins_of_files(shard, kind, seed=1)
    for run, name in zip(twins, ("full", "low"), strict=True):
        state = state_of(run, for_load=True)
        load(state, checkpoint_id=folder / name)
        set_model_state_dict(run.model, state["model"])
        set_optimizer_state_dict(run.model, run.optimizer, state["optimizer"])
    twins.steps = 2
    twins.updated = {name for name in twins.low.params if not name.startswith("extra")}
    yield from agree(f"loaded: {problem}" for problem in twins.differences())
    yield from train(twins, 3)


def run_saves(rank: int, world_size: int, folder: Path) -> None:
    del rank
    run_cases(
        {
            f"{name}, {kind}": partial(saves, shard, kind, folder / name / kind)
            for name, (ranks, shard) in SAVED_BY.items()
            for kind in KINDS
            if ranks == world_size
        }
    )


def run_loads(rank: int, world_size: int, folder: Path) -> None:
    del rank
    run_cases(
        {
            f"{name}, {kind}": partial(loads, LOADED_BY[world_size], kind, folder / name / kind)
            for name in SAVED_BY
            for kind in KINDS
        }
    )


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if DEVICE_TYPE != "cpu" and torch.accelerator.device_count() < 4:
        pytest.skip("needs 4 devices")
    folder = tmp_path_factory.mktemp("checkpoints")
    for ranks, _ in SAVED_BY.values():
        spawn(run_saves, ranks, folder, folder)
    return folder


@world_sizes(2, 1, 4)
def test_a_checkpoint_goes_on_with_another_number_of_ranks(world_size: int, checkpoints: Path, tmp_path: Path) -> None:
    spawn(run_loads, world_size, tmp_path, checkpoints)


# Full state dicts ----------------------------------------------------------------------------------------------------

FULL = StateDictOptions(full_state_dict=True)
ON_FIRST_RANK = StateDictOptions(full_state_dict=True, cpu_offload=True)


def test_remainders_are_gathered(tmp_path: Path) -> None:
    """They are int16, which neither gloo nor NCCL carries."""
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
        copy = torch.load(io.BytesIO(saved_by_torch(value)), weights_only=False)
        assert type(copy) is DTensor

    twins = make_twins(models.shard_even, adamw, "remainder")
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
    spawn(run_full_loads, world_size, tmp_path)


def run_full_loads(rank: int, world_size: int) -> None:
    shards = (models.shard_even, models.shard_columns, models.shard_tensor_parallel)
    run_cases({f"{shard.__name__}, {kind}": partial(full_loads, shard, kind) for shard in shards for kind in KINDS})


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


def saved_by_torch(value: torch.Tensor) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()
