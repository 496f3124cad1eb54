"""Gradients that do not fit on the device together: each backward, also the first, updates and lets them go."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.multiprocessing.reductions import StorageWeakRef

from fsdp_offload import OffloadPolicy, clip_grad_norm_
from fsdp_offload.core.loop import REDUCTIONS_BEHIND
from fsdp_offload.engine.engine import Engine, engine_of
from fsdp_offload.engine.groups import ParamGroups
from fsdp_offload.engine.hooks import ModelHooks
from tests.overlapping import Loop, adamw, same
from tests.parity import local


class Chain(nn.Module):
    """Many small groups, and one that only some steps use."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(7, 7) for _ in range(11))
        self.extra = nn.Linear(7, 7)

    def forward(self, tokens: Tensor, *, extra: bool = True) -> Tensor:
        x = tokens / 50
        for block in (*self.blocks, *([self.extra] if extra else [])):
            x = torch.tanh(block(x)) + x
        return x.square().sum()


def made(mesh: DeviceMesh, *, offloaded: bool) -> Loop:
    policy = OffloadPolicy(parameters=True, overlap="iteration", bucket_bytes=1024, device_bytes=4096)
    return Loop(mesh, adamw, policy if offloaded else None, net=Chain)  # type: ignore[arg-type]


def backward(loop: Loop, step: int) -> None:
    loop.backward(step, extra=step % 3 < 2)


def evaluate(loop: Loop, step: int) -> None:
    loop.look()


def freeze(loop: Loop, step: int) -> None:
    loop.model.blocks[4].bias.requires_grad_(step < 4)
    loop.model.blocks[7].requires_grad_(step % 2 == 0)


def leave(loop: Loop, step: int) -> None:
    """A parameter leaves the param groups, and comes back with all gradients since then."""
    group, one = loop.optimizer.param_groups[0], loop.model.blocks[5].bias
    if step == 3:
        group["params"] = [param for param in group["params"] if param is not one]
    if step == 6:
        group["params"] = [*group["params"], one]


def more_state(loop: Loop, step: int) -> None:
    if step == 3:
        loop.optimizer.param_groups[0]["amsgrad"] = True
        for state in loop.optimizer.state.values():
            state["max_exp_avg_sq"] = torch.zeros_like(state["exp_avg_sq"])


@pytest.fixture
def loops(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> tuple[Loop, Loop]:
    monkeypatch.setattr(Engine, "_gradients_fit", lambda _: False)
    return made(mesh, offloaded=False), made(mesh, offloaded=True)


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
            backward(loop, step)
            if loop is ours:
                updated = bool(engine_of(loop.optimizer).core.done)
                assert updated or step < since, f"the backward of step {step} has updated nothing"
            loop.step()
        assert same(plain, ours), f"after step {step}"
        assert step < since or max(held) <= 2 * (REDUCTIONS_BEHIND + 2), f"in step {step}: {held}"
        made.clear()
        held.clear()


def test_what_needs_all_of_them_is_refused(loops: tuple[Loop, Loop]) -> None:
    _, loop = loops
    backward(loop, 0)
    with pytest.raises(
        RuntimeError, match=r"fsdp_offload\.clip_grad_norm_\(optimizer, max_norm\) from the first step on"
    ):
        nn.utils.clip_grad_norm_(loop.model.parameters(), 1.0)
    with pytest.raises(RuntimeError, match="needs room for all gradients"):
        clip_grad_norm_(loop.optimizer, 1.0)
    with pytest.raises(RuntimeError, match=r"second backward.* one is expected where not all gradients fit"):
        backward(loop, 1)


def test_a_loop_goes_on_from_a_checkpoint(mesh: DeviceMesh, loops: tuple[Loop, Loop]) -> None:
    plain, _ = loops
    for step in range(3):
        backward(plain, step)
        plain.step()
    ours = made(mesh, offloaded=True)
    ours.model.load_state_dict(plain.model.state_dict())
    ours.optimizer.load_state_dict(plain.optimizer.state_dict())
    ours.schedulers[0].load_state_dict(plain.schedulers[0].state_dict())
    ours.seen = [*plain.seen]
    for step in range(3, 6):
        for loop in (plain, ours):
            backward(loop, step)
        assert engine_of(ours.optimizer).core.done
        for loop in (plain, ours):
            loop.step()
        assert same(plain, ours), f"after step {step}"


def test_a_load_forgets_which_updates_have_used_gradients(loops: tuple[Loop, Loop]) -> None:
    """Else the next backward would wait for these instead of its own."""
    _, loop = loops
    saved = loop.optimizer.state_dict()
    for step in range(2):
        backward(loop, step)
        assert engine_of(loop.optimizer).core.updates.used_by
        loop.optimizer.load_state_dict(saved)
        assert engine_of(loop.optimizer).core.updates is None
        loop.optimizer.zero_grad()


@pytest.mark.parametrize("overlap", ["step", "forward", "iteration"])
def test_a_backward_looks_at_param_groups_only_to_begin(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch, overlap: str
) -> None:
    """With hundreds of groups, a look takes as long as the updates."""
    loop, looks, real = Loop(mesh, adamw, OffloadPolicy(overlap=overlap)).train(4), [], ParamGroups.are_as_before
    monkeypatch.setattr(ParamGroups, "are_as_before", lambda *args: looks.append(args) or real(*args))
    loop.backward(4)
    assert len(looks) == (overlap == "iteration")
