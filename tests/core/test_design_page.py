"""What one iteration calls: the table of docs/design.md, and few calls from a lower room into a higher one."""

import re
import sys
import threading
from pathlib import Path
from types import FrameType

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import fsdp_offload
from fsdp_offload import OffloadPolicy, clip_grad_norm_, offload_optimizer

ROOT = Path(fsdp_offload.__file__).parent
ROOMS = ("device", "state", "fsdp", "optimizers", "core", "engine", "model", "checkpoint", "api")
"""The lowest one first."""

UPWARD = 6
"""Kinds of calls through function-valued fields and protocols from a lower room into a higher one: today's figure."""


class Calls:
    """Notes what is called, by phase.

    Attributes:
        upward: rooms of the caller and of what it calls, which is higher, and its name.
    """

    def __init__(self) -> None:
        self.phases: dict[str, list[str]] = {}
        self.phase = ""
        self.upward: set[tuple[str, str, str]] = set()

    def _note(self, frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(str(ROOT)):
            self.phases.setdefault(self.phase, []).append(frame.f_code.co_qualname)
            callee, caller = self._room(frame), self._room(frame.f_back)
            if caller is not None and callee is not None and ROOMS.index(callee) > ROOMS.index(caller):
                self.upward.add((caller, callee, frame.f_code.co_qualname))

    @staticmethod
    def _room(frame: FrameType | None) -> str | None:
        if frame is None or not frame.f_code.co_filename.startswith(str(ROOT)):
            return None
        room = Path(frame.f_code.co_filename).relative_to(ROOT).parts[0]
        return room if room in ROOMS else None

    def __enter__(self) -> "Calls":
        threading.setprofile(self._note)
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)


def table() -> dict[str, list[str]]:
    """Read the calls of the page, by phase."""
    text = (ROOT.parent / "docs/design.md").read_text(encoding="utf-8").partition("## One gradient, one bucket")[2]
    phases: dict[str, list[str]] = {}
    for phase, call in re.findall(r"^\| ([a-z ]*)\| `([\w.]+)` \|", text.partition("\n## ")[0], re.MULTILINE):
        current = phase.strip() or current  # noqa: F821
        phases.setdefault(current, []).append(call)
    return phases


@pytest.fixture
def calls(mesh: DeviceMesh) -> Calls:
    """Of a clipped iteration, and of the forward behind it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)).to(mesh.device_type)
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    offload_optimizer(optimizer, model=model, policy=OffloadPolicy(overlap="iteration"))
    calls = Calls()

    def iterate() -> None:
        calls.phase = "forward"
        loss = model(torch.randn(8, 64, device=mesh.device_type)).square().mean()
        calls.phase = "backward"
        loss.backward()
        calls.phase = "clip"
        clip_grad_norm_(optimizer, 1e6)
        calls.phase = "step"
        optimizer.step()
        calls.phase = "behind"
        optimizer.zero_grad()

    for _ in range(7):
        iterate()
    with calls:
        iterate()
        calls.phase = "next forward"
        model(torch.randn(8, 64, device=mesh.device_type))
    return calls


def test_the_table_is_what_is_called(calls: Calls) -> None:
    for phase, listed in table().items():
        assert [one for one in dict.fromkeys(calls.phases[phase]) if one in listed] == listed, phase
    assert list(table()) == ["forward", "backward", "clip", "step", "next forward"]


def test_few_calls_go_upward(calls: Calls) -> None:
    assert len(calls.upward) <= UPWARD, sorted(calls.upward)
