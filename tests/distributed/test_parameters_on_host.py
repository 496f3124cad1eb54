"""Parameters that live on the host, on several ranks: any sharding, the same bits, files and collectives."""

import functools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer

from fsdp_offload.engine.engine import Engine, engine_of
from fsdp_offload.torch_compat.dtensor import local_shard
from tests.distributed import models
from tests.distributed.launch import mesh, run_cases, spawn
from tests.distributed.models import Net, ShardNet, batch, build, decay_groups
from tests.overlapping import POLICIES
from tests.parity import attach, leaves, same_bits
from tests.policies import with_share
from tests.tiers import some_cases

pytestmark = pytest.mark.distributed

Make = Callable[[Net], Optimizer]


def shard_by_two_after_forward(net: Net) -> None:
    models.shard_groups(net, mesh=mesh(dist.get_world_size()), reshard_after_forward=2)


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
FOUR: tuple[ShardNet, ...] = (models.shard_hybrid, models.shard_tensor_parallel, shard_by_two_after_forward)


def adamw(net: Net) -> Optimizer:
    return torch.optim.AdamW(decay_groups(net), lr=1e-2)


def muon(net: Net) -> Optimizer:
    return torch.optim.Muon([param for param in net.parameters() if param.dim() == 2], lr=0.02, ns_steps=1)


class Training:
    def __init__(self, shard: ShardNet, fields: dict[str, Any] | None, make: Make = adamw, **options: Any) -> None:
        self.net = build(shard, **options)
        self.optimizer = make(self.net)
        self.losses: list[Tensor] = []
        self.step = 0
        if fields is not None:
            policy = with_share(**{"bucket_bytes": 1024, "passing": 5 * 1024, "parameters": True, **fields})
            attach(self.optimizer, model=self.net, policy=policy)

    def train(self, steps: int, *, micro_batches: int = 1) -> None:
        for _ in range(steps):
            for micro in range(micro_batches):
                loss = self.net(batch(100 * self.step + 10 * micro + self.net.data_rank))
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
    return different(plain.everything(), host.everything())


def different(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    assert one.keys() == other.keys()
    return [name for name in one if not same_bits(one[name], other[name])]


def collectives() -> int:
    """How many have been issued, on all process groups."""
    return sum(group._get_sequence_number_for_group() for group in distributed_c10d._world.pg_map)


def collectives_of_six_steps(training: Training) -> int:
    """In the last two of them."""
    training.train(4, micro_batches=2)
    before = collectives()
    training.train(2, micro_batches=2)
    return collectives() - before


@functools.cache
def plain_six_steps(shard: ShardNet, make: Make, **options: Any) -> tuple[dict[str, Tensor], int]:
    """Once on each rank, for all policies: what training left behind, and its collectives."""
    plain = Training(shard, None, make, **options)
    counted = collectives_of_six_steps(plain)
    return {name: value.clone() for name, value in plain.everything().items()}, counted


def compare(shard: ShardNet, fields: dict[str, Any], make: Make = adamw, **options: Any) -> list[str]:
    """The same bits, by the same collectives."""
    plain, wanted = plain_six_steps(shard, make, **options)
    host = Training(shard, fields, make, **options)
    problems = []
    counted = collectives_of_six_steps(host)
    if counted != wanted:
        problems.append(f"collectives {counted}, plain {wanted}")
    engine = engine_of(host.optimizer)
    homes = [shard.home.weights for shard in engine.plan.shards.values() if shard.sharded is not None]
    if not homes or any(home is None for home in homes):
        problems.append("parameters are not at home")
    return problems + different(plain, host.everything())


def run_layouts(rank: int, world_size: int, shards: tuple[ShardNet, ...], every: int) -> None:
    del rank
    cases: dict[str, Any] = {
        f"{shard.__name__}, {name}": partial(compare, shard, fields)
        for shard in shards
        for name, fields in POLICIES.items()
    }
    if models.shard_even in shards:
        cases |= {f"tied, {name}": partial(compare, models.shard_even, POLICIES[name], tied=True) for name in POLICIES}
    if world_size == 2:  # torch's own fails on uneven shards
        cases |= {f"muon, {name}": partial(compare, models.shard_even, POLICIES[name], muon) for name in POLICIES}
    run_cases(cases, every)


@some_cases({2: 7, 3: 8, 4: 0})
def test_layouts(world_size: int, every: int, tmp_path: Path) -> None:
    """With 3 ranks no parameter divides evenly, and some have nothing on the last."""
    spawn(run_layouts, world_size, tmp_path, FOUR if world_size == 4 else EVERYWHERE, every)


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
