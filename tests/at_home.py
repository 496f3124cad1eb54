"""Looks at parameters that live on the host: where they are, and that nobody reads what has been dropped."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fsdp_offload.core.cache import Cache
from fsdp_offload.core.items import Item
from fsdp_offload.engine.engine import engine_of
from fsdp_offload.engine.window import Window
from fsdp_offload.torch_compat.dtensor import local_shard


@contextmanager
def dropped_is_spoilt() -> Iterator[None]:
    """Memory of a window, or of the core, that is free holds NaN, so that whoever still reads it is found out.

    On the CPU: elsewhere loads and gathers that have been issued may not have read it yet.
    """
    free = Window._free

    def spoil(self: Window, entry: Any) -> None:
        free(self, entry)
        for first, memory in self._memory.items() if self._device.type == "cpu" else ():
            if first <= entry.begin < entry.end <= first + memory.numel():
                memory[entry.begin - first : entry.end - first] = 0xFF

    drop = Cache.drop

    def spoil_block(self: Cache, item: Item) -> None:
        block = item.block
        drop(self, item)
        if block is not None and block.memory.device.type == "cpu":
            block.memory.fill_(0xFF)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Window, "_free", spoil)
        patch.setattr(Cache, "drop", spoil_block)
        yield


def not_at_home(model: nn.Module, optimizer: Optimizer) -> list[str]:
    """Parameters that ``fully_shard`` gathers and whose shard is not in the arena, although their state is."""
    engine = engine_of(optimizer)
    assert engine is not None
    regions = [(region.bytes.data_ptr(), region.nbytes) for region in engine.plan.regions]
    found = []
    for name, param in model.named_parameters():
        shard = engine.plan.shards.get(param)
        stays = (
            param.requires_grad
            if shard is None
            else shard.resident or (shard.sharded is None and getattr(engine, "weights", None) is None)
        )
        if not isinstance(param, DTensor) or stays:
            continue
        local = local_shard(param)
        if local.numel() and not any(begin <= local.data_ptr() < begin + nbytes for begin, nbytes in regions):
            found.append(f"{name} is not in the arena")
    return found
