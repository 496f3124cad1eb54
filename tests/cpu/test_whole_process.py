"""What attaching changes for the whole process is undone with the last optimizer that is removed, or said before."""

import mmap
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from weakref import WeakSet

import pytest
import torch
from torch.optim import Optimizer
from torch.utils import _foreach_utils

from fsdp_offload import OffloadPolicy, clip_grad_norm_, offload_optimizer, remove_offload
from fsdp_offload.api import attach
from tests.remedies import Script, Unlisted

pytestmark = [
    pytest.mark.usefixtures("mesh"),
    pytest.mark.filterwarnings("ignore:offload_optimizer. The parameters are on the CPU"),
    pytest.mark.filterwarnings("ignore:offload_optimizer. NOTHING IS OFFLOADED. all of"),
]


def iterating() -> Script:
    script = Script()
    script.attach(overlap="iteration")
    for _ in range(4):
        script.backward()
        clip_grad_norm_(script.optimizer, 10.0)
        script.optimizer.step()
        script.optimizer.zero_grad()
    return script


def test_torchs_list_of_types_is_as_it_was_when_nothing_is_offloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attach, "offloaded", WeakSet())  # without those of earlier tests
    listed: list[Any] = _foreach_utils._foreach_supported_types
    before = [one for one in listed if not one.__module__.startswith("fsdp_offload")]
    one, other = iterating(), iterating()
    assert len(_foreach_utils._foreach_supported_types) > len(before)
    remove_offload(one.optimizer)
    assert len(_foreach_utils._foreach_supported_types) > len(before)
    remove_offload(other.optimizer)
    assert _foreach_utils._foreach_supported_types == before
    again = iterating()
    assert len(_foreach_utils._foreach_supported_types) > len(before)
    assert all(map(torch.equal, again.weights(), iterating().weights()))
    remove_offload(again.optimizer)


def test_torchtitan_clips_as_before_when_no_container_is_offloaded() -> None:
    integration: Any = pytest.importorskip("fsdp_offload.integrations.torchtitan")
    theirs, base = integration.titan.clip_grad_norm_, integration.OptimizersContainer

    class Container(base):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            parts = [Script(), Script()]
            self.optimizers, self.model_parts = [one.optimizer for one in parts], [one.model for one in parts]

    one, other = (integration.offload_container(integration.offload_container(Container())) for _ in range(2))
    assert integration.titan.clip_grad_norm_ is not theirs
    for optimizer in (*one.optimizers, *other.optimizers):
        assert integration.titan.clip_grad_norm_ is not theirs
        remove_offload(optimizer)
    assert integration.titan.clip_grad_norm_ is theirs


class OptimizerWrapper(Optimizer):
    """As torchft's: a step is left out where the replicas do not agree to commit."""

    def __init__(self, commits: list[bool], optim: Optimizer) -> None:
        self.optim, self.commits = optim, commits

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self.optim.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.optim.state

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optim.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> None:
        if self.commits.pop():
            self.optim.step()


def test_torchft_and_updates_in_the_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("torchft.optim")
    module.OptimizerWrapper = OptimizerWrapper  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torchft.optim", module)
    script = Script()
    wrapper = OptimizerWrapper([True, False, True, True], script.optimizer)
    message = r"torchft's OptimizerWrapper leaves out step\(\).*Use overlap='forward'"
    for given in (script.optimizer, wrapper):
        with pytest.raises(ValueError, match=message if given is not wrapper else "Attach to the inner optimizer"):
            offload_optimizer(given, model=script.model, policy=OffloadPolicy(overlap="iteration"))
    script.attach(overlap="forward")
    plain = Script()
    for one, optimizer in ((script, wrapper), (plain, OptimizerWrapper([True, False, True, True], plain.optimizer))):
        for _ in range(4):
            optimizer.zero_grad()
            one.backward()
            optimizer.step()
    script.optimizer.synchronize()
    assert all(map(torch.equal, script.weights(), plain.weights()))
    other = Script()  # which is in no wrapper
    other.attach(overlap="iteration")
    other.train()


@pytest.mark.parametrize("make", [torch.optim.Adamax, Unlisted])  # the second takes no host memory when it is attached
@pytest.mark.parametrize("system", ["darwin", "win32"])
def test_another_system_is_told_linux_in_one_sentence(system: str, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.delattr(mmap, "MADV_DONTFORK")
    monkeypatch.delattr(os, "sched_getaffinity")
    script = Script(make)
    cls, before = type(script.optimizer), script.weights()
    with pytest.raises(RuntimeError, match=rf"^fsdp_offload runs on Linux.*{system}[^.]*\.$"):
        script.attach()
    assert type(script.optimizer) is cls
    assert all(map(torch.equal, before, script.weights()))
    script.train()
    metadata = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    assert '"Operating System :: POSIX :: Linux"' in metadata
