"""Megatron-FSDP's ``fully_shard_optimizer``: offloaded before it, as in the example, and after it.

Its models are for GPUs alone. What its optimizers ask of them is answered here by FSDP2's parameters and a model that
has nothing to do: gradients are reduced and parameters are where they belong when the step begins.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from fsdp_offload import OffloadPolicy, is_offloaded, offload_optimizer, offload_report
from tests.distributed.frameworks import MICRO_BATCHES, POLICY, batch, record
from tests.distributed.launch import spawn_cases
from tests.distributed.models import Net, build, shard_even

pytest.importorskip("megatron_fsdp")
pytestmark = pytest.mark.distributed

SAVED_AT, STEPS = 2, 4


class Model:
    """What Megatron-FSDP's optimizers call of a model; how often they did."""

    model_auto_sync = False

    def __init__(self) -> None:
        self.calls: list[str] = []

    def finish_grad_sync(self) -> None:
        self.calls.append("finish_grad_sync")

    def install_optimized_model_weights(self) -> None:
        self.calls.append("install_optimized_model_weights")

    def zero_grad_buffer(self) -> None:
        self.calls.append("zero_grad_buffer")


def plain(optimizer: Any) -> Any:
    from megatron_fsdp import fully_shard_optimizer

    return fully_shard_optimizer(optimizer)


def before(optimizer: Any) -> Any:
    from examples.with_megatron_fsdp import sharded_and_offloaded

    return sharded_and_offloaded(optimizer, OffloadPolicy(**POLICY))


def after(optimizer: Any) -> Any:
    return offload_optimizer(plain(optimizer), policy=OffloadPolicy(**POLICY))


WAYS: dict[str, Callable[[Any], Any]] = {"plain": plain, "before": before, "after": after}


def made(way: str) -> tuple[Net, Any, Model]:
    net, model = build(shard_even), Model()
    for param in net.parameters():
        param._megatron_fsdp_model = model  # type: ignore[attr-defined]
    optimizer = WAYS[way](torch.optim.AdamW(net.parameters(), lr=0.01))
    assert is_offloaded(optimizer) == (way != "plain")
    return net, optimizer, model


def script(rank: int, world_size: int, folder: Path, name: str, *, way: str, load: str = "") -> None:
    """A seed's test runs it: tests/seeds/test_megatron_4623.py."""
    net, optimizer, model = made(way)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, 1.0, 20)
    if load:
        state = {"model": net.state_dict(), "optimizer": optimizer.state_dict()}
        dcp.load(state, checkpoint_id=folder / load)
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(torch.load(folder / f"{load}-scheduler.pt"))
    seen = []
    for step in range(SAVED_AT if load else 0, STEPS):
        for micro in range(MICRO_BATCHES):
            loss = net(batch(10 * step + micro, rank))
            seen.append(loss.item())
            loss.backward()
        seen.append(torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5).full_tensor().item())
        optimizer.step(sync_grad_before_optimizer_step=step % 2 == 0)
        scheduler.step()
        optimizer.zero_grad(set_to_none=step % 3 > 0, zero_grad_buffer=True)
        if not load and step == SAVED_AT - 1:
            torch.save(scheduler.state_dict(), folder / f"{name}-scheduler.pt")
            dcp.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=folder / name)
    record(folder, name, rank, [*seen, len(model.calls)], net, [optimizer])


def first_step(way: str) -> list[str]:
    """How much of the state is on the device, beside counters, when the optimizer is made."""
    _, optimizer, _ = made(way)
    report = offload_report(optimizer)
    offloaded = report.memory.host_state_bytes > 0 and report.memory.other_state_bytes == 4 * len(optimizer.state)
    # Before, the first step itself was ours.
    stored = way == "after" or (report.step is not None and report.step.stored_bytes > 0)
    return [] if offloaded and stored else [str(report)]


def test_its_first_step_goes_through_us(tmp_path: Path) -> None:
    spawn_cases({way: partial(first_step, way) for way in ("before", "after")}, 2, tmp_path)
