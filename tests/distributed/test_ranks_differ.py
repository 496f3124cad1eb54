"""Ranks of which one has more room, more rows, no gradients that fit, or does more: the same bits, and no hang."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn
from torch.optim import AdamW, Muon, Optimizer

from fsdp_offload import OffloadPolicy, offload_report
from fsdp_offload.engine.engine import Engine, engine_of
from tests.distributed import models
from tests.distributed.launch import mesh, run_cases, slow_updates, spawn
from tests.distributed.models import build
from tests.overlapping import SMALL, Loop, adamw, same
from tests.parity import attach
from tests.tiers import world_sizes

pytestmark = pytest.mark.distributed

SOME_STEPS = 6


def last_rank() -> bool:
    return dist.get_rank() == dist.get_world_size() - 1


def muon(params: Sequence[nn.Parameter]) -> Optimizer:
    """Its updates are collectives: all ranks have to come to them between the same two reductions."""
    return Muon([param for param in params if param.dim() == 2], lr=0.02, ns_steps=1)


def compare(make: Any, policy: OffloadPolicy) -> list[str]:
    device_mesh = mesh(dist.get_world_size())
    plain, ours = (Loop(device_mesh, make, one).train(SOME_STEPS) for one in (None, policy))
    return [] if same(plain, ours) else ["other bits"]


def other_room(make: Any, overlap: Any, *, parameters: bool) -> list[str]:
    """Of 51 rows one rank has 26, and 25 the other; what stays on the device differs more."""
    device_bytes = 1 << 20 if last_rank() else 6 * 1024
    return compare(
        make, OffloadPolicy(overlap=overlap, parameters=parameters, bucket_bytes=1024, device_bytes=device_bytes)
    )


def _hold_state(loop: Loop, at: int, held: list[Any]) -> None:
    if at == 3:
        held.append(loop.optimizer.state[loop.params[0]])


def _read_gradients(loop: Loop, at: int, held: list[Any]) -> None:
    if at < 2:
        held.append([param.grad.to_local().norm() for param in loop.params])


def _edit_a_group(loop: Loop, at: int, held: list[Any]) -> None:
    loop.optimizer.param_groups[0]["note"] = at


ALONE = {"holds state": _hold_state, "reads gradients": _read_gradients, "edits a group": _edit_a_group}


def collectives_in_order(act: Any, *, everywhere: bool) -> list[str]:
    """One rank alone does what may keep updates out of its backward; or all do, whose buckets differ."""
    policy = OffloadPolicy(overlap="iteration", bucket_bytes=1024, device_bytes=1 << 16)
    loops = [Loop(mesh(dist.get_world_size()), muon, one) for one in (None, policy)]
    for loop in loops:
        held: list[Any] = []
        for at in range(SOME_STEPS):
            loop.backward(at)
            if everywhere or last_rank():
                act(loop, at, held)
            loop.step()
    problems = [] if "in one order on all ranks" in str(offload_report(loops[1].optimizer)) else ["not in the report"]
    return problems if same(*loops) else [*problems, "other bits"]


def gradients_without_room(overlap: Any) -> list[str]:
    """Some update in their first backward, and free the gradients; the others do not."""
    policy = OffloadPolicy(overlap=overlap, parameters=True, **SMALL)
    device_mesh = mesh(dist.get_world_size())
    plain = Loop(device_mesh, adamw, None).train(SOME_STEPS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "_gradients_fit", lambda _: not last_rank())
        ours = Loop(device_mesh, adamw, policy).train(SOME_STEPS)
    frees = engine_of(ours.optimizer).core.frees_all
    problems = [] if frees == last_rank() else ["gradients are freed from the first backward on, or not"]
    return problems if same(plain, ours) else [*problems, "other bits"]


def updated_on_the_cpu() -> list[str]:
    """The same parameters on every rank, however uneven and empty their shards are."""
    net = build(models.shard_even)
    optimizer = attach(AdamW(net.parameters(), lr=0.02, fused=True), model=net, policy=OffloadPolicy(host_fraction=0.4))
    names = [shard.name for shard in engine_of(optimizer).plan.host_shards()]
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, names)
    return [] if names and all(one == names for one in everywhere) else [f"{everywhere}"]


def run_all(rank: int, world_size: int) -> None:
    slow_updates()
    cases: dict[str, Any] = {
        f"room, {make.__name__}, {overlap}": partial(other_room, make, overlap, parameters=parameters)
        for make, overlap, parameters in (
            (muon, "step", False),
            (muon, "forward", True),
            (muon, "iteration", False),
            (adamw, "iteration", True),
        )
    }
    cases |= {
        f"{name}, {everywhere=}": partial(collectives_in_order, act, everywhere=everywhere)
        for name, act in ALONE.items()
        for everywhere in (False, True)
    }
    cases["gradients without room"] = partial(gradients_without_room, "iteration")
    cases["updated on the CPU"] = updated_on_the_cpu
    run_cases(cases)


@world_sizes(2, 3)
def test_ranks_differ(world_size: int, tmp_path: Path) -> None:
    spawn(run_all, world_size, tmp_path)
