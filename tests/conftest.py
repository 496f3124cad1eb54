"""For all tests."""

from collections.abc import Iterator

import pytest
import torch.distributed as dist
from hypothesis import settings
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

# How long an example takes says nothing on a busy machine.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    """One CPU, in a process group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()
