"""With ``debug="guard"`` it is an error to touch what an update may still be writing or reading."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp_offload import offload_model, reload_model, remove_offload
from tests.cpu.test_overlap import policy_of
from tests.overlapping import HABITS, NOT_IN_BACKWARD, SIZES, Loop, adamw, look, same
from tests.tiers import spread

MESSAGE = "call optimizer.synchronize\\(\\)"
FORWARD: dict[str, dict[str, Any]] = {
    "forward": {},
    "iteration": {"overlap": "iteration"},
    "resident": {"staying": 20_000},
}


def loop_with(mesh: DeviceMesh, **fields: Any) -> Loop:
    return Loop(mesh, adamw, policy_of({"overlap": "forward", "debug": "guard", **fields}))


def stepped(mesh: DeviceMesh) -> Loop:
    """Between ``step()`` and whatever comes then; gradients are still there."""
    loop = loop_with(mesh).train(2)
    loop.backward(2)
    loop.optimizer.step()
    return loop


TOUCHES: dict[str, Callable[[Loop], object]] = {
    "norm": lambda loop: loop.model.head.weight.norm(),
    "data": lambda loop: loop.model.head.weight.data,
    "detach": lambda loop: loop.model.blocks[1].up.weight.detach(),
    "write": lambda loop: torch.no_grad()(loop.model.blocks[1].up.bias.zero_)(),
    "to-local": lambda loop: loop.model.head.weight.to_local(),
    "whole": lambda loop: loop.model.head.weight.full_tensor(),
    "foreach": lambda loop: torch._foreach_norm(list(loop.model.parameters())),
    "average": lambda loop: torch.lerp(torch.zeros(()), loop.model.head.bias, 0.5),
    "copy": lambda loop: loop.model.head.weight.clone(),
    "norm-of-gradients": lambda loop: nn.utils.clip_grad_norm_(loop.model.parameters(), 1.0),
    "gradient": lambda loop: loop.model.head.weight.grad.norm(),
    "write-gradient": lambda loop: loop.model.blocks[0].up.weight.grad.zero_(),
}


@pytest.mark.parametrize("touch", TOUCHES.values(), ids=TOUCHES)
def test_refused_until_synchronize(mesh: DeviceMesh, touch: Callable[[Loop], object]) -> None:
    loop = stepped(mesh)
    with pytest.raises(RuntimeError, match=MESSAGE):
        touch(loop)
    loop.optimizer.synchronize()  # type: ignore[attr-defined]
    touch(loop)


WAITS = ["forward", "state-dict", "part-of-state-dict", "zero-in-place", "step", "remove"]


@spread(touch=TOUCHES, waits={name: name for name in WAITS})
def test_allowed_after_what_waits(mesh: DeviceMesh, touch: Callable[[Loop], object], waits: str) -> None:
    loop = stepped(mesh)
    if waits == "forward":
        look(loop)
        loop.model.reshard()  # type: ignore[operator]
    elif waits == "state-dict":
        loop.model.state_dict()
    elif waits == "part-of-state-dict":
        loop.model.blocks[0].state_dict()
    elif waits == "zero-in-place":
        loop.optimizer.zero_grad(set_to_none=False)
    elif waits == "step":
        loop.optimizer.step()
        loop.optimizer.synchronize()  # type: ignore[attr-defined]
    else:
        remove_offload(loop.optimizer)
    touch(loop)


def test_what_needs_no_values_is_allowed(mesh: DeviceMesh) -> None:
    loop = stepped(mesh)
    weight = loop.model.head.weight
    assert weight.shape == (51, 32)
    assert (weight.requires_grad, weight.is_leaf, weight.numel()) == (True, True, 51 * 32)
    assert isinstance(weight, nn.Parameter)
    assert "updating" in repr(weight)
    assert weight.grad is not None
    loop.optimizer.zero_grad()
    assert weight.grad is None
    assert loop.optimizer.state[weight]["exp_avg"].shape == weight.shape
    loop.optimizer.state_dict()
    assert {id(param) for param in loop.model.parameters()} == {
        id(param) for param in loop.optimizer.param_groups[0]["params"]
    }


@spread(habit={"none": None, **{name: name for name in HABITS}}, fields=FORWARD)
def test_same_bits(mesh: DeviceMesh, fields: dict[str, Any], habit: str | None) -> None:
    if fields.get("overlap") == "iteration" and habit in NOT_IN_BACKWARD | {"evaluate-before-step"}:
        habit = "evaluate"
    plain, debugged = Loop(mesh, adamw, None), loop_with(mesh, **fields)
    for loop in (plain, debugged):
        loop.train(9, HABITS[habit] if habit else None)
    assert same(plain, debugged)
    assert SIZES["bucket_bytes"] < 10_000  # so that there are many


def test_freezing_is_allowed(mesh: DeviceMesh) -> None:
    loop = stepped(mesh)
    loop.model.head.weight.requires_grad = False
    loop.model.head.weight.requires_grad_(True)
    loop.train(1, first=3)


def test_a_part_that_is_not_sharded_by_itself_has_a_state_dict(mesh: DeviceMesh) -> None:
    loop = stepped(mesh)
    loop.model.head.state_dict()
    loop.model.head.weight.norm()


def test_a_block_that_the_forward_left_out_is_new_after_the_backward(mesh: DeviceMesh) -> None:
    loop = stepped(mesh)
    loop.optimizer.zero_grad()
    loop.backward(3, extra=False)
    assert all(param.detach().norm().isfinite() for param in loop.model.parameters())


def test_the_error_leaves_everything_usable(mesh: DeviceMesh) -> None:
    plain, debugged = Loop(mesh, adamw, None).train(3), loop_with(mesh).train(3)
    with pytest.raises(RuntimeError, match=MESSAGE):
        debugged.model.head.weight.norm()
    assert same(plain.train(3, first=3), debugged.train(3, first=3))


def test_a_sleep_that_outlasts_the_wait_for_updates(mesh: DeviceMesh) -> None:
    """Two guards on one tensor: the one that ends first leaves the other, and neither comes back."""
    loop = stepped(mesh)
    weight = loop.model.head.weight
    offload_model(loop.model)
    with pytest.raises(RuntimeError, match="Call reload_model"):
        weight.norm()
    loop.optimizer.synchronize()  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="Call reload_model"):
        weight.norm()
    reload_model(loop.model)
    assert weight.norm().isfinite()
    loop.optimizer.zero_grad()
    loop.backward(3)
    loop.optimizer.step()
    with pytest.raises(RuntimeError, match=MESSAGE):
        weight.norm()


def test_a_sleep_that_ends_before_the_wait_for_updates(mesh: DeviceMesh) -> None:
    loop = stepped(mesh)
    weight = loop.model.head.weight
    offload_model(loop.model)
    reload_model(loop.model)
    with pytest.raises(RuntimeError, match=MESSAGE):
        weight.norm()
    loop.optimizer.synchronize()  # type: ignore[attr-defined]
    assert weight.norm().isfinite()


def test_an_average_that_synchronizes(mesh: DeviceMesh) -> None:
    averages: list[list[Tensor]] = []
    for loop in (Loop(mesh, adamw, None), loop_with(mesh)):
        average = [param.detach().clone() for param in loop.model.parameters()]
        for step in range(4):
            loop.train(1, first=step)
            if hasattr(loop.optimizer, "synchronize"):
                loop.optimizer.synchronize()
            torch._foreach_lerp_(average, [param.detach() for param in loop.model.parameters()], 0.5)
        averages.append([value.to_local() for value in average])
    assert all(torch.equal(one, other) for one, other in zip(*averages, strict=True))


def test_nothing_is_kept_alive(mesh: DeviceMesh) -> None:
    loop = loop_with(mesh).train(2)
    optimizer, weight = weakref.ref(loop.optimizer), loop.model.head.weight
    del loop.scheduler, loop.optimizer
    gc.collect()
    assert optimizer() is None
    assert weight.norm().isfinite()  # and nothing is guarded any more
