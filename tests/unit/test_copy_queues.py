"""The driver is asked for enough copy queues before anybody uses CUDA, and only then.

What that is good for shows on a GPU: ``tests/gpu/test_streams.py``.
"""

import subprocess
import sys

import pytest
import torch

from fsdp_offload.device import copy_queues
from fsdp_offload.device.copy_queues import ENOUGH, VARIABLE, ask_for_copy_queues


@pytest.mark.parametrize(
    ("cuda", "initialized", "before", "in_time", "after"),
    [
        ("13.0", False, {}, True, {VARIABLE: str(ENOUGH)}),
        ("13.0", True, {VARIABLE: "8"}, True, {VARIABLE: "8"}),  # what the user has set stays
        ("13.0", True, {}, False, {VARIABLE: str(ENOUGH)}),  # too late here, and for the processes that are started
        (None, True, {}, True, {}),
    ],
    ids=["nobody has set it", "the user has", "too late", "a torch without CUDA"],
)
def test_what_is_asked_for(
    cuda: str | None,
    initialized: bool,
    before: dict[str, str],
    in_time: bool,
    after: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(copy_queues, "_driver_is_initialized", lambda: initialized)
    assert ask_for_copy_queues(before) == in_time
    assert before == after


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
