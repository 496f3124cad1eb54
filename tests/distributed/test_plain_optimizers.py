"""The functions for state dicts on several ranks, with and without offload: one loads what the other has saved."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import optim
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict as torchs

from fsdp_offload import OffloadPolicy
from fsdp_offload.checkpoint import get_optimizer_state_dict, load, save, set_optimizer_state_dict
from tests.distributed import models
from tests.distributed.launch import spawn
from tests.distributed.models import Net, batch, build, decay_groups
from tests.parity import attach, local, same_bits

pytestmark = pytest.mark.distributed

FLAT: dict[str, Any] = {"flatten_optimizer_state_dict": True}
LAYOUTS: dict[str, models.ShardNet] = {"even": models.shard_even, "columns": models.shard_columns}


def built(shard: models.ShardNet, *, offload: bool, seed: int = 0) -> tuple[Net, optim.Optimizer]:
    net = build(shard, seed=seed)
    optimizer = optim.AdamW(decay_groups(net), lr=1e-2, amsgrad=True)
    if offload:
        attach(optimizer, model=net, policy=OffloadPolicy(bucket_bytes=1024, device_bytes=5 * 1024))
    return net, optimizer


def train(net: Net, optimizer: optim.Optimizer, *steps: int) -> None:
    for step in steps:
        net(batch(8 * step + net.data_rank)).backward()
        optimizer.step()
        optimizer.zero_grad()


def assert_same(one: tuple[Net, optim.Optimizer], other: tuple[Net, optim.Optimizer]) -> None:
    for mine, theirs in zip(one[0].parameters(), other[0].parameters(), strict=True):
        assert same_bits(local(mine.detach()), local(theirs.detach()))
        states = [optimizer.state[param] for (_, optimizer), param in ((one, mine), (other, theirs))]
        assert states[0].keys() == states[1].keys()
        for name, value in states[0].items():
            assert type(value) is type(states[1][name])
            assert same_bits(local(value), local(states[1][name]))


def save_on(rank: int, ranks: int, path: Path, shard: models.ShardNet, *, offload: bool) -> None:
    net, optimizer = built(shard, offload=offload)
    train(net, optimizer, 0, 1)
    state = {"model": net.state_dict(), "optimizer": get_optimizer_state_dict(net, optimizer, **FLAT)}
    save(state, checkpoint_id=path)


def load_on(rank: int, ranks: int, path: Path, shard: models.ShardNet) -> None:
    runs = [built(shard, offload=offload, seed=seed) for seed, offload in enumerate((True, False))]
    for net, optimizer in runs:
        state = {
            "model": net.state_dict(),
            "optimizer": get_optimizer_state_dict(net, optimizer, for_load=True, **FLAT),
        }
        load(state, checkpoint_id=path)
        set_optimizer_state_dict(net, optimizer, state["optimizer"])
    assert_same(*runs)
    for net, optimizer in runs:
        train(net, optimizer, 2, 3)
    assert_same(*runs)
    # Each rank takes its part of a full one.
    plain = built(shard, offload=False, seed=2)
    full = torchs(*runs[1], options=StateDictOptions(full_state_dict=True))
    assert not any(
        isinstance(value, torch.distributed.tensor.DTensor) for value in full["state"]["odd.weight"].values()
    )
    set_optimizer_state_dict(*plain, full)
    plain[0].load_state_dict(runs[1][0].state_dict())
    assert_same(runs[1], plain)


@pytest.mark.parametrize("offload", [False, True], ids=["plain", "offloaded"])
@pytest.mark.parametrize("shard", LAYOUTS.values(), ids=LAYOUTS)
def test_either_loads_what_one_has_saved(tmp_path: Path, shard: models.ShardNet, offload: bool) -> None:
    path = tmp_path / "saved"
    spawn(partial(save_on, offload=offload), 3, tmp_path, path, shard, module=__name__)
    spawn(load_on, 2, tmp_path, path, shard)
