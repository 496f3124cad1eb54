"""A process group of this process."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextmanager
def process_group(backend: str = "gloo", rank: int = 0, world_size: int = 1) -> Iterator[None]:
    """``"fake"``: as one rank of many, with collectives that do nothing."""
    store = FakeStore() if backend == "fake" else dist.HashStore()
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
