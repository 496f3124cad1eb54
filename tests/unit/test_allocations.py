"""Which allocators are counted on; and their history is on for no longer than somebody wants it."""

from typing import Any

import pytest
import torch

from fsdp_offload.device.lanes import DeviceLink
from fsdp_offload.fsdp.allocations import History


@pytest.fixture
def enabled(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """What torch was told, the last of which holds."""
    found: list[str | None] = [None]

    def record(how: str | None = "all", **_: Any) -> None:
        found.append(how)

    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", record)
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: {"device_traces": [[{"action": "alloc", "size": 3}]]})
    monkeypatch.setattr(torch._C, "_cuda_isHistoryEnabled", lambda: found[-1] is not None, raising=False)
    return found


@pytest.mark.parametrize("ends", [True, False], ids=["with the iteration", "with the optimizer alone"])
def test_it_ends_once(enabled: list[str | None], ends: bool) -> None:
    history = History(torch.device("cuda", 0))
    assert history.begin()
    assert not ends or history.end() == [3]
    del history
    assert enabled == [None, "all", None]


def test_a_history_of_others_goes_on(enabled: list[str | None]) -> None:
    enabled.append("all")
    history = History(torch.device("cuda", 0))
    assert not history.begin()
    del history
    assert enabled == [None, "all"]


@pytest.mark.parametrize("backend", ["native", "cudaMallocAsync", "pluggable"])
def test_other_allocators_do_not_count(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    """One has no statistics, and one does not say what it ever allocated: each point would seem to take nothing."""
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: backend)
    assert DeviceLink(torch.device("cuda", 0)).counts == (backend == "native")
