"""Gradients that do not fit on the device together: each backward, also the first, updates and lets them go."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.multiprocessing.reductions import StorageWeakRef

from fsdp_offload import OffloadPolicy, clip_grad_norm_
from fsdp_offload.core.engine import Engine, engine_of
from fsdp_offload.core.hooks import ModelHooks
from fsdp_offload.core.loop import REDUCTIONS_BEHIND
from tests.overlapping import linear_blocks
from tests.parity import attach, host_copy, local

LAYERS = 12


class Loop:
    """A model of many small groups, and a part that only some steps use."""

    def __init__(self, mesh: DeviceMesh, *, offloaded: bool) -> None:
        self.model = linear_blocks(mesh, 8, LAYERS)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        if offloaded:
            policy = OffloadPolicy(parameters=True, overlap="iteration", bucket_bytes=1024, device_bytes=4096)
            attach(self.optimizer, model=self.model, policy=policy)

    def backward(self, step: int) -> None:
        x = torch.full((2, 8), 0.1 * step)
        for block in self.model[: LAYERS - 2] if step % 3 == 2 else self.model:
            x = torch.tanh(block(x)) + x
        x.square().sum().backward()

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def values(self) -> list[Tensor]:
        params = [host_copy(value) for value in self.model.state_dict().values()]
        states = [self.optimizer.state[param] for param in self.model.parameters()]
        return [*params, *(host_copy(state[name]) for state in states for name in sorted(state))]


def freeze(loop: Loop, step: int) -> None:
    loop.model[4].bias.requires_grad_(step < 4)
    loop.model[7].requires_grad_(step % 2 == 0)


def leave(loop: Loop, step: int) -> None:
    """A parameter leaves the param groups, and comes back with all gradients since then."""
    group, one = loop.optimizer.param_groups[0], loop.model[5].bias
    if step == 3:
        group["params"] = [param for param in group["params"] if param is not one]
    if step == 6:
        group["params"] = [*group["params"], one]


def more_state(loop: Loop, step: int) -> None:
    if step == 3:
        loop.optimizer.param_groups[0]["amsgrad"] = True
        for state in loop.optimizer.state.values():
            state["max_exp_avg_sq"] = torch.zeros_like(state["exp_avg_sq"])


def evaluate(loop: Loop, step: int) -> None:
    with torch.no_grad():
        loop.model(torch.full((2, 8), 0.3))


@pytest.fixture
def loops(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> tuple[Loop, Loop]:
    monkeypatch.setattr(Engine, "_gradients_fit", lambda _: False)
    return Loop(mesh, offloaded=False), Loop(mesh, offloaded=True)


@pytest.mark.parametrize(
    ("habit", "since"),
    [*((habit, 0) for habit in (None, freeze, leave, more_state, evaluate)), (None, 4), (evaluate, 4)],
)
def test_they_never_are_there_together(
    loops: tuple[Loop, Loop], monkeypatch: pytest.MonkeyPatch, habit: Callable[[Loop, int], None] | None, since: int
) -> None:
    """From step ``since`` on, when the device has become full."""
    plain, ours = loops
    plain_reduced, made, held, step = ModelHooks._reduced, [], [], 0
    monkeypatch.setattr(Engine, "_gradients_fit", lambda _: step < since)

    def reduced(hooks: ModelHooks, number: int, event: object) -> None:
        made.extend(
            StorageWeakRef(local(grad).untyped_storage())
            for param in hooks._groups[number].params
            if (grad := param.grad) is not None
        )
        held.append(sum(not one.expired() for one in made))
        plain_reduced(hooks, number, event)

    monkeypatch.setattr(ModelHooks, "_reduced", reduced)
    for step in range(8):
        for loop in loops:
            if habit is not None:
                habit(loop, step)
            loop.backward(step)
            if loop is ours:
                updated = bool(engine_of(loop.optimizer).core.done)
                assert updated or step < since, f"the backward of step {step} has updated nothing"
            loop.step()
        assert all(map(torch.equal, plain.values(), ours.values())), f"after step {step}"
        assert step < since or max(held) <= 2 * (REDUCTIONS_BEHIND + 2), f"in step {step}: {held}"
        made.clear()
        held.clear()


def test_what_needs_all_of_them_is_refused(loops: tuple[Loop, Loop]) -> None:
    _, loop = loops
    loop.backward(0)
    with pytest.raises(
        RuntimeError, match=r"fsdp_offload\.clip_grad_norm_\(optimizer, max_norm\) from the first step on"
    ):
        nn.utils.clip_grad_norm_(loop.model.parameters(), 1.0)
    with pytest.raises(RuntimeError, match="needs room for all gradients"):
        clip_grad_norm_(loop.optimizer, 1.0)
    with pytest.raises(RuntimeError, match=r"second backward.* one is expected where not all gradients fit"):
        loop.backward(1)


def test_a_loop_goes_on_from_a_checkpoint(mesh: DeviceMesh, loops: tuple[Loop, Loop]) -> None:
    plain, _ = loops
    for step in range(3):
        plain.backward(step)
        plain.step()
    ours = Loop(mesh, offloaded=True)
    ours.model.load_state_dict(plain.model.state_dict())
    ours.optimizer.load_state_dict(plain.optimizer.state_dict())
    for step in range(3, 6):
        for loop in (plain, ours):
            loop.backward(step)
        assert engine_of(ours.optimizer).core.done
        for loop in (plain, ours):
            loop.step()
        assert all(map(torch.equal, plain.values(), ours.values())), f"after step {step}"
