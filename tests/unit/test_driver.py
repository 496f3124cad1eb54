"""The driver's calls for copies, with a driver that notes them."""

from enum import IntEnum
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fsdp_offload.device.driver import CopyCalls, copy_calls


class Result(IntEnum):
    DONE = 0
    NOT_MAPPED = 211


class Driver:
    """Succeeds but for the functions in ``fails``."""

    CUevent_flags = SimpleNamespace(CU_EVENT_DISABLE_TIMING=SimpleNamespace(value=2))

    def __init__(self, *fails: str) -> None:
        self.fails, self.called = fails, list[str]()

    def __getattr__(self, name: str) -> Any:
        if name == "cuGetErrorString":
            return lambda code: (Result.DONE, b"not mapped")

        def call(*args: object) -> tuple[object, ...]:
            self.called.append(name)
            return (Result.NOT_MAPPED if name in self.fails else Result.DONE, name)

        return call


def test_a_copy_is_issued_in_the_context_of_its_device() -> None:
    driver = Driver()
    calls = CopyCalls(driver, torch.device("cuda", 1))
    with calls.current():
        calls.copy(1, 2, 3, "stream")
        calls.hand_over("event", "one", "other")
    made = ["cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuCtxPushCurrent", "cuMemcpyAsync", "cuEventRecord"]
    assert driver.called == [*made, "cuStreamWaitEvent", "cuCtxPopCurrent"]


@pytest.mark.parametrize("fails", ["cuMemcpyAsync", "cuEventRecord", "cuStreamWaitEvent"])
def test_what_the_driver_refuses_raises_and_leaves_the_context(fails: str) -> None:
    driver = Driver(fails)
    calls = CopyCalls(driver, torch.device("cuda", 0))

    def issue() -> None:
        with calls.current():
            calls.copy(1, 2, 3, "stream")
            calls.hand_over("event", "one", "other")

    with pytest.raises(RuntimeError, match=r"CUDA: not mapped .*NOT_MAPPED"):
        issue()
    assert driver.called[-2:] == [fails, "cuCtxPopCurrent"]


@pytest.mark.parametrize(("device", "built_for"), [("cpu", "13.0"), ("cuda", None), ("xpu", "13.0")])
def test_elsewhere_torch_copies(device: str, built_for: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", built_for)
    assert copy_calls(torch.device(device, 0)) is None
