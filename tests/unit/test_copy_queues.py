"""The driver is asked for enough copy queues before anybody uses CUDA, and only then.

What that is good for shows on a GPU: ``tests/gpu/test_streams.py``.
"""

import subprocess
import sys

import pytest
import torch

from fsdp_offload.device import copy_queues
from fsdp_offload.device.copy_queues import ENOUGH, VARIABLE, ask_for_copy_queues


@pytest.fixture(autouse=True)
def with_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")


def driver_is(initialized: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_queues, "_driver_is_initialized", lambda: initialized)


def test_it_is_set_where_nobody_has(monkeypatch: pytest.MonkeyPatch) -> None:
    driver_is(False, monkeypatch)
    environment: dict[str, str] = {}
    assert ask_for_copy_queues(environment)
    assert environment == {VARIABLE: str(ENOUGH)}


def test_what_the_user_has_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    driver_is(True, monkeypatch)
    environment = {VARIABLE: "8"}
    assert ask_for_copy_queues(environment)
    assert environment == {VARIABLE: "8"}


def test_it_says_when_it_came_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    driver_is(True, monkeypatch)
    environment: dict[str, str] = {}
    assert not ask_for_copy_queues(environment)
    assert environment == {VARIABLE: str(ENOUGH)}  # for the processes that this one starts


def test_a_torch_without_cuda_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    environment: dict[str, str] = {}
    assert ask_for_copy_queues(environment)
    assert environment == {}


def test_a_machine_without_a_driver_has_none_that_is_initialized(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr("ctypes.CDLL", missing)
    assert not copy_queues._driver_is_initialized()


def test_importing_the_package_asks() -> None:
    script = (
        "import os, torch; torch.version.cuda = '13.0'; import fsdp_offload; "
        f"print(os.environ.get({VARIABLE!r}), torch.cuda.is_initialized())"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(ENOUGH), "False"]
