"""Parameters that live on the host, on several ranks: gradients without room on some, and other numbers of ranks."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from fsdp_offload.core.attached import Engine, engine_of
from fsdp_offload.torch_compat.dtensor import local_shard
from tests.distributed import models
from tests.distributed.launch import mesh, run_cases, spawn
from tests.distributed.models import Net, ShardNet, batch, build, decay_groups
from tests.overlapping import POLICIES
from tests.parity import attach, leaves, same_bits
from tests.policies import with_share
from tests.tiers import some_cases

pytestmark = pytest.mark.distributed


def stay_gathered(net: Net) -> None:
    models.shard_groups(net, mesh=mesh(dist.get_world_size()), reshard_after_forward=False)


def gather_ahead(net: Net) -> None:
    models.shard_even(net)
    net.set_modules_to_forward_prefetch(list(net.blocks))
    net.blocks[1].set_modules_to_backward_prefetch([net.blocks[0]])


EVERYWHERE: tuple[ShardNet, ...] = (
    *(models.shard_even, models.shard_root_only, models.shard_columns, models.shard_mixed_precision),
    *(models.shard_bfloat16, stay_gathered, gather_ahead),
)


class Training:
    def __init__(self, shard: ShardNet, fields: dict[str, Any] | None) -> None:
        self.net = build(shard)
        self.optimizer = torch.optim.AdamW(decay_groups(self.net), lr=1e-2)
        self.losses: list[Tensor] = []
        self.step = 0
        if fields is not None:
            policy = with_share(**{"bucket_bytes": 1024, "passing": 5 * 1024, "parameters": True, **fields})
            attach(self.optimizer, model=self.net, policy=policy)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            loss = self.net(batch(100 * self.step + self.net.data_rank))
            loss.backward()
            self.losses.append(loss.detach())
            self.optimizer.step()
            self.optimizer.zero_grad()
            if self.step % 3 == 1:
                with torch.no_grad():
                    self.losses.append(self.net(batch(999), extra=False))
                # As model.to() where it changes nothing; on GPUs, homes and gathered parameters are on two devices.
                self.net._apply(lambda tensor: tensor)
            self.step += 1

    def states(self) -> dict[str, Any]:
        return {
            "model": get_model_state_dict(self.net),
            "optimizer": get_optimizer_state_dict(self.net, self.optimizer),
        }

    def load(self, states: dict[str, Any]) -> None:
        set_model_state_dict(self.net, states["model"])
        set_optimizer_state_dict(self.net, self.optimizer, optim_state_dict=states["optimizer"])

    def everything(self) -> dict[str, Tensor]:
        found = {f"loss {number}": loss for number, loss in enumerate(self.losses)}
        for name, param in self.net.state_dict().items():
            found[name] = local_shard(param.detach())
        for name, param in self.net.named_parameters():
            for key, value in sorted(self.optimizer.state.get(param, {}).items()):
                found |= {f"{name} {key} {number}": leaf for number, leaf in enumerate(leaves(value))}
        return found


def differences(plain: Training, host: Training) -> list[str]:
    one, other = plain.everything(), host.everything()
    assert one.keys() == other.keys()
    return [name for name in one if not same_bits(one[name], other[name])]


def train_without_room(shard: ShardNet, ranks: set[int]) -> list[str]:
    """Gradients do not fit on some ranks, which update in their first backward; the others do not."""
    plain = Training(shard, None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "_gradients_fit", lambda _: dist.get_rank() not in ranks)
        host = Training(shard, POLICIES["iteration"])
        for training in (plain, host):
            training.train(6)
    frees = engine_of(host.optimizer).frees_all_gradients
    problems = [] if frees == (dist.get_rank() in ranks) else ["gradients are freed from the first backward on, or not"]
    return problems + differences(plain, host)


def run_without_room(rank: int, world_size: int, every: int) -> None:
    del rank
    run_cases(
        {
            f"{shard.__name__}, {ranks}": partial(train_without_room, shard, ranks)
            for shard in EVERYWHERE
            for ranks in ({0}, {world_size - 1}, set(range(world_size)))
        },
        every,
    )


@some_cases({2: 0, 3: 7})
def test_gradients_that_do_not_fit_on_some_ranks(world_size: int, every: int, tmp_path: Path) -> None:
    spawn(run_without_room, world_size, tmp_path, every)


def save(folder: Path, name: str) -> list[str]:
    plain, host = Training(models.shard_even, None), Training(models.shard_even, POLICIES[name])
    for one, where in ((plain, "plain"), (host, "host")):
        one.train(4)
        dcp.save(one.states(), checkpoint_id=folder / where)
    return differences(plain, host)


def resume(folder: Path, name: str) -> list[str]:
    """Each from the other's file."""
    plain, host = Training(models.shard_even, None), Training(models.shard_even, POLICIES[name])
    for one, where in ((plain, "host"), (host, "plain")):
        one.train(1)  # its own parameters are on their way when others come
        states = one.states()
        dcp.load(states, checkpoint_id=folder / where)
        one.load(states)
        one.train(4)
    return differences(plain, host)


def run_checkpoints(rank: int, world_size: int, folder: Path, action: Callable[[Path, str], list[str]]) -> None:
    del rank, world_size
    run_cases({name: partial(action, folder / name, name) for name in POLICIES})


def test_saved_on_two_ranks_and_resumed_on_three(tmp_path: Path) -> None:
    spawn(run_checkpoints, 2, tmp_path, tmp_path, save)
    spawn(run_checkpoints, 3, tmp_path, tmp_path, resume)
