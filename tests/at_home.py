"""Looks at parameters that live on the host: where they are, and that nobody reads what has been dropped."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from torch import nn
from torch.optim import Optimizer

from fsdp_offload.core.cache import Cache
from fsdp_offload.core.items import Item
from fsdp_offload.device.lanes import SerialLane
from fsdp_offload.engine.engine import engine_of
from fsdp_offload.fsdp.dtensor import local_shard


@contextmanager
def dropped_is_spoilt() -> Iterator[None]:
    """Memory of the core that is free holds NaN, so that whoever still reads it is found out.

    Where copies run at once: elsewhere loads, stores and gathers that have been issued may not have read it yet.
    """
    drop = Cache.drop

    def spoil_block(self: Cache, item: Item, **how: bool) -> None:
        block = item.block
        drop(self, item, **how)
        if block is not None and block.memory.device.type == "cpu" and isinstance(self.lanes.store, SerialLane):
            block.memory.fill_(0xFF)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Cache, "drop", spoil_block)
        yield


def not_at_home(model: nn.Module, optimizer: Optimizer) -> list[str]:
    """Parameters that ``fully_shard`` gathers and that are to live on the host and whose shard is not in the arena."""
    engine = engine_of(optimizer)
    assert engine is not None
    regions = [(region.bytes.data_ptr(), region.nbytes) for region in engine.plan.regions]
    streamed = engine.weights.parts
    found = []
    for name, param in model.named_parameters():
        local = local_shard(param)
        if param not in streamed or not local.numel():
            continue
        if not any(begin <= local.data_ptr() < begin + nbytes for begin, nbytes in regions):
            found.append(f"{name} is not in the arena")
    return found
