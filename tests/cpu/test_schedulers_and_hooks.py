"""LR schedulers and step hooks, made before and after attaching: both go through the offloaded step, once.

A scheduler that is made before attaching, and is stepped before and after it, is in every case of ``conformance``. In
the end: state that a hook makes before the first step.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from fsdp_offload import OffloadPolicy, remove_offload
from tests.conformance.axes import Case
from tests.conformance.oracle import Loop, compare
from tests.conformance.programs import HABITS
from tests.overlapping import assert_same_each_step, pair, same
from tests.parity import SMALL, Net, Zoo, adamw, attach, local, offloaded_names, take_step
from tests.policies import with_share


def one_cycle(optimizer: optim.Optimizer) -> OneCycleLR:
    """Changes momentum as well."""
    return OneCycleLR(optimizer, max_lr=0.1, total_steps=40)


def decay(optimizer: optim.Optimizer) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: 0.9**step)


def add(make: Callable[[optim.Optimizer], Any], run: Loop, at: int) -> None:
    run.schedulers.append(make(run.optimizer))
    HABITS["usual"](run, at)


@pytest.mark.usefixtures("mesh")
@pytest.mark.parametrize("make", [one_cycle, decay])
def test_schedulers_that_come_later_go_through_us_and_on_after_removal(make: Callable[[optim.Optimizer], Any]) -> None:
    """Each wraps ``optimizer.step``, one around the other."""
    case = Case(program=("usual", "add", "usual", "usual", "reattach", "usual", "reattach", "usual"))
    assert not compare(case, torch.device("cpu"), {**HABITS, "add": partial(add, make)})


class MyAdamW(optim.AdamW):
    """What people write: something of their own around the step of their parent, which torch has hooked as well."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("cls", [optim.AdamW, MyAdamW])
def test_hooks_fire_once_per_step(cls: Any, when: str) -> None:
    optim.AdamW([torch.ones(1)])  # from now on AdamW.step is hooked
    optimizer = cls(Net().parameters())
    seen: list[tuple[str, object]] = []

    def noting(what: str) -> Any:
        return lambda optimizer, args, kwargs: seen.append((what, optimizer))

    def register() -> list[Any]:
        return [
            register_optimizer_step_pre_hook(noting("global pre")),
            register_optimizer_step_post_hook(noting("global post")),
            optimizer.register_step_pre_hook(noting("pre")),
            optimizer.register_step_post_hook(noting("post")),
        ]

    handles = register() if when == "before" else []
    attach(optimizer)
    handles = handles or register()
    try:
        take_step(optimizer, 3)
        assert optimizer.offload_report().kept.moving_buckets > 3
        assert seen == [(what, optimizer) for what in ("global pre", "pre", "post", "global post")] * 3
        seen.clear()
        remove_offload(optimizer)
        take_step(optimizer)
        assert len(seen) == (4 if cls is optim.AdamW else 8)  # as torch fires them: of the parent's step as well
    finally:
        for handle in handles:
            handle.remove()


def test_hooks_see_and_change_what_the_step_uses() -> None:
    """A pre-hook that scales gradients, and a post-hook that looks at new state."""
    both = pair(None, None, adamw, net=Net)
    counts: dict[int, list[float]] = {}

    def scale(optimizer: optim.Optimizer, args: Any, kwargs: Any) -> None:
        for param in optimizer.param_groups[0]["params"]:
            if param.grad is not None:
                param.grad.mul_(0.5)

    def look(optimizer: optim.Optimizer, args: Any, kwargs: Any) -> None:
        steps = {float(state["step"]) for state in optimizer.state.values()}
        counts.setdefault(id(optimizer), []).extend(steps)

    for run in both:
        run.optimizer.register_step_pre_hook(scale)
        run.optimizer.register_step_post_hook(look)
    attach(both[1].optimizer)
    assert_same_each_step(*both, 5)
    assert list(counts.values()) == [[1.0, 2.0, 3.0, 4.0, 5.0]] * 2


def test_a_pre_hook_may_replace_the_arguments_of_a_step() -> None:
    optimizer = attach(adamw(Net().parameters()))
    take_step(optimizer)
    optimizer.register_step_pre_hook(lambda optimizer, args, kwargs: ((optimizer, lambda: 7.0), kwargs))
    assert optimizer.step() == 7.0
    optimizer.register_step_pre_hook(lambda *_: 1)
    with pytest.raises(RuntimeError, match="must return None or a tuple"):
        optimizer.step()


def test_a_compiled_step_runs_as_it_is() -> None:
    plain, loop = pair(None, SMALL, adamw, net=Zoo)
    compiled = torch.compile(loop.optimizer.step)
    plain.train(2)
    for at in range(2):
        loop.backward(at)
        compiled()
        loop.schedulers[0].step()
        loop.clear()
    assert same(plain, loop)


# State that a step hook makes before the first step, in another dtype than the optimizer's own: torchtitan's bf16 -----


def make_in_bfloat16(optimizer: optim.Optimizer, args: object, kwargs: object) -> None:
    """A hook that makes the state of every parameter that has a gradient and no state yet."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.grad is not None and not optimizer.state[param]:
                optimizer.state[param]["momentum_buffer"] = torch.zeros_like(local(param), dtype=torch.bfloat16)


def sgd(params: Iterable[nn.Parameter]) -> optim.Optimizer:
    optimizer = optim.SGD(params, lr=0.05, momentum=0.9, foreach=False)
    optimizer.register_step_pre_hook(make_in_bfloat16)
    return optimizer


def assert_in_bfloat16(optimizer: optim.Optimizer) -> None:
    assert offloaded_names(optimizer)
    homes = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    assert {value.dtype for value in homes if value.dim()} == {torch.bfloat16}


@pytest.mark.parametrize("policy", [SMALL, with_share(bucket_bytes=2048, passing=8192, staying=4000)])
def test_it_keeps_its_dtype(policy: OffloadPolicy) -> None:
    plain, loop = pair(None, policy, sgd, net=Net)
    bytes_at_attach = loop.optimizer.offload_report().memory.host_bytes
    assert_same_each_step(plain, loop, 6)
    assert_in_bfloat16(loop.optimizer)
    assert loop.optimizer.offload_report().memory.host_bytes < bytes_at_attach
    saved = plain.copy()
    assert_same_each_step(plain, loop, 2)
    for run in (plain, loop):
        run.restore(saved)
        for state in run.optimizer.state.values():  # torch widens it, and torchtitan narrows it again
            state.update({name: value.bfloat16() for name, value in state.items() if isinstance(value, Tensor)})
    assert_same_each_step(plain, loop, 2)


def test_attached_after_a_step_and_a_parameter_that_thaws_later() -> None:
    plain, loop = pair(None, None, sgd, net=Net, prepare=lambda model: model.down.requires_grad_(False))
    assert_same_each_step(plain, loop, 2)
    attach(loop.optimizer)
    assert_same_each_step(plain, loop, 3)
    assert_in_bfloat16(loop.optimizer)
    for run in (plain, loop):
        run.model.down.requires_grad_(True)
    assert_same_each_step(plain, loop, 3)
    assert_in_bfloat16(loop.optimizer)


def test_no_dtype_changes_once_there_is_state() -> None:
    optimizer = attach(optim.SGD(Zoo().parameters(), lr=0.05, momentum=0.9, foreach=False))
    take_step(optimizer, 2)
    for state in optimizer.state.values():
        state["momentum_buffer"] = state["momentum_buffer"].bfloat16()
    with pytest.raises(ValueError, match="Put a tensor of that shape and dtype there"):
        take_step(optimizer)
