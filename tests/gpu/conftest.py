"""Everything in this folder needs an accelerator."""

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tests.gpu.streams import SLEEP_CYCLES, Slow
from tests.overlapping import slow_down
from tests.process_groups import process_group

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    """One device, in a process group of one rank."""
    torch.cuda.set_device(0)
    with process_group("cpu:gloo,cuda:nccl"):
        yield init_device_mesh("cuda", (1,))


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[Slow]:
    """As ``slow_down``, for one test, in which something is slow."""
    found: list[list[str]] = []

    def slow(kind: str, cycles: int = SLEEP_CYCLES) -> None:
        if kind != "none":
            found.append(slow_down(kind, cycles, monkeypatch.setattr))

    yield slow
    torch.cuda.synchronize()
    assert all(found)


@pytest.fixture
def clean_device() -> Iterator[None]:
    """For tests that count bytes of the device."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    yield
    torch.cuda.synchronize()
