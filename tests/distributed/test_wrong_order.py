"""Attached before the model is sharded, or to an optimizer that the framework builds anew: told, with what to do."""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel

from fsdp_offload import offload_optimizer
from tests.distributed.launch import DEVICE_TYPE, run_cases, spawn, this_device
from tests.distributed.models import Net, batch, build, shard_even

pytestmark = pytest.mark.distributed


def adamw(model: nn.Module) -> optim.Optimizer:
    return optim.AdamW(model.parameters(), lr=0.01)


def attach(optimizer: optim.Optimizer, **options: Any) -> list[str]:
    """The advice that attaching gives, without what it says of the CPU."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        offload_optimizer(optimizer, **options)
    return [str(one.message) for one in seen if "nothing to gain" not in str(one.message)]


@contextmanager
def said(kind: type[Exception] | type[Warning], *parts: str) -> Iterator[None]:
    match = ".*".join(parts)
    with pytest.raises(kind, match=match) if not issubclass(kind, Warning) else pytest.warns(kind, match=match):
        yield


UNSHARDED = ("None of the optimizer's parameters is a DTensor, and there are 2 ranks", "call fully_shard")


def plain_net() -> Net:
    torch.manual_seed(0)
    return Net().to(this_device())


def before_fully_shard(*, with_model: bool) -> list[str]:
    """Attaching only warns: DDP is so on purpose. The first forward knows, or else the first step."""
    net = plain_net()
    optimizer = adamw(net)
    advice = attach(optimizer, model=net if with_model else None)
    shard_even(net)
    if with_model:
        with said(RuntimeError, "no longer the model's", "call fully_shard"):
            net(batch(0))
    else:
        net(batch(0)).backward()
        with said(UserWarning, "never found one", "call fully_shard"):
            optimizer.step()
    return [] if len(advice) == 1 and all(part in advice[0] for part in UNSHARDED) else [f"advice {advice}"]


def afterwards() -> list[str]:
    net = build(shard_even)
    optimizer = adamw(net)
    advice = attach(optimizer, model=net)
    net(batch(0)).backward()
    optimizer.step()
    return advice


def in_ddp() -> list[str]:
    net = DistributedDataParallel(
        plain_net(),
    )
    optimizer = adamw(net)
    advice = attach(optimizer, model=net)
    net(batch(0)).backward()
    optimizer.step()
    return [] if len(advice) == 1 and UNSHARDED[0] in advice[0] else [f"advice {advice}"]


def built_anew() -> list[str]:
    """Whoever steps is not the one that was attached."""
    net = build(shard_even)
    attached = adamw(net)
    attach(attached, model=net)
    other = optim.SGD([net.head.weight], lr=0.1)
    net(batch(0)).backward()
    with said(UserWarning, r"SGD.step\(\) updated the parameters of the AdamW", "NOTHING IS OFFLOADED", "Attach to"):
        other.step()
    other.step()  # once is enough
    return []


def other_parameters() -> list[str]:
    """Two optimizers, as GANs have them; and one that follows another that has stepped."""
    net = build(shard_even)
    attached = optim.AdamW(net.blocks.parameters())
    attach(attached, model=net)
    other = optim.SGD(net.head.parameters(), lr=0.1)
    net(batch(0)).backward()
    other.step()
    attached.step()
    optim.SGD(net.parameters(), lr=0.1).step()
    return []


def run_orders(rank: int, world_size: int) -> None:
    del rank, world_size
    run_cases(
        {
            "before fully_shard": partial(before_fully_shard, with_model=False),
            "before fully_shard, with a model": partial(before_fully_shard, with_model=True),
            "after it": afterwards,
            "DDP": in_ddp,
            "built anew": built_anew,
            "other parameters": other_parameters,
        }
    )


def test_orders(tmp_path: Path) -> None:
    spawn(run_orders, 2, tmp_path)


def prepare(accelerator: Any, *, with_model: bool) -> list[str]:
    net = plain_net()
    optimizer = adamw(net)
    attach(optimizer, model=net if with_model else None)
    with said(
        RuntimeError, r"exchanged after offload_optimizer\(\)", r"Attach afterwards: .*fsdp_offload\.integrations"
    ):
        accelerator.prepare(net, optimizer)
    return []


def run_accelerate(rank: int, world_size: int) -> None:
    pytest.importorskip("accelerate")
    from accelerate import Accelerator, FullyShardedDataParallelPlugin, PartialState
    from accelerate.utils import DistributedType

    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0", "LOCAL_WORLD_SIZE": str(world_size)}
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="no_wrap", reshard_after_forward=True)
    accelerator = Accelerator(cpu=DEVICE_TYPE == "cpu", fsdp_plugin=plugin)
    # It would leave FSDP to accelerators; what it does after this line is the same on a CPU.
    PartialState().distributed_type = accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin
    run_cases({f"with_model={given}": partial(prepare, accelerator, with_model=given) for given in (False, True)})


def test_accelerate(tmp_path: Path) -> None:
    spawn(run_accelerate, 2, tmp_path)
