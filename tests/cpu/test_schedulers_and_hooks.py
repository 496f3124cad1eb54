"""LR schedulers and step hooks, made before and after attaching: both go through the offloaded step, once.

A scheduler that is made before attaching, and is stepped before and after it, is in every case of ``conformance``. In
the end: state that a hook makes before the first step.
"""

import copy
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from fsdp_offload import OffloadPolicy
from tests.parity import (
    SMALL,
    Net,
    Pair,
    Run,
    Zoo,
    adamw,
    attach,
    local,
    make_pair,
    offloaded_names,
    take_step,
    train_step,
)
from tests.policies import with_share


def one_cycle(optimizer: optim.Optimizer) -> OneCycleLR:
    """Changes momentum as well."""
    return OneCycleLR(optimizer, max_lr=0.1, total_steps=40)


def decay(optimizer: optim.Optimizer) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: 0.9**step)


def scheduled_step(run: Run, step: int) -> float:
    loss = train_step(run, step)
    for scheduler in run.parts["schedulers"]:
        scheduler.step()
    return loss


def give_schedulers(pair: Pair, make: Any) -> None:
    for run in pair:
        run.parts.setdefault("schedulers", []).append(make(run.optimizer))


def moved_bytes(run: Run) -> int:
    return run.optimizer.offload_report().step.stored_bytes


@pytest.mark.parametrize(
    ("before", "between"),
    [([one_cycle], []), ([], [one_cycle]), ([decay], [one_cycle])],
    ids=["before", "between", "both"],
)
def test_schedulers_of_any_time_go_through_us_and_on_after_removal(before: Any, between: Any) -> None:
    """Each wraps ``optimizer.step``, one around the other."""
    pair = make_pair(Net, lambda params: optim.AdamW(params, lr=0.05), policy=None)
    for run in pair:
        run.parts["schedulers"] = []
    for make in before:
        give_schedulers(pair, make)
    pair.attach()
    for make in between:
        give_schedulers(pair, make)
    pair.train(4, scheduled_step)  # looks after each step whether all state is in the arena
    assert moved_bytes(pair.offloaded) > 0
    pair.detach()
    pair.train(3, scheduled_step)
    assert type(pair.offloaded.optimizer) is optim.AdamW
    pair.attach()
    pair.train(3, scheduled_step)
    assert moved_bytes(pair.offloaded) > 0
    pair.detach()
    pair.train(2, scheduled_step)


class MyAdamW(optim.AdamW):
    """What people write: something of their own around the step of their parent, which torch has hooked as well."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("cls", [optim.AdamW, MyAdamW])
def test_hooks_fire_once_per_step(cls: Any, when: str) -> None:
    optim.AdamW([torch.ones(1)])  # from now on AdamW.step is hooked
    pair = make_pair(Net, cls, policy=None)
    optimizer = pair.offloaded.optimizer
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
    pair.attach()
    handles = handles or register()
    try:
        for step in range(3):
            train_step(pair.offloaded, step)
        assert pair.offloaded.optimizer.offload_report().kept.moving_buckets > 3
        assert seen == [(what, optimizer) for what in ("global pre", "pre", "post", "global post")] * 3
        seen.clear()
        pair.detach()
        train_step(pair.offloaded, 3)
        assert len(seen) == (4 if cls is optim.AdamW else 8)  # as torch fires them: of the parent's step as well
    finally:
        for handle in handles:
            handle.remove()


def test_hooks_see_and_change_what_the_step_uses() -> None:
    """A pre-hook that scales gradients, and a post-hook that looks at new state."""
    pair = make_pair(Net, optim.AdamW, policy=None)
    counts: dict[int, list[float]] = {}

    def scale(optimizer: optim.Optimizer, args: Any, kwargs: Any) -> None:
        for param in optimizer.param_groups[0]["params"]:
            if param.grad is not None:
                param.grad.mul_(0.5)

    def look(optimizer: optim.Optimizer, args: Any, kwargs: Any) -> None:
        steps = {float(state["step"]) for state in optimizer.state.values()}
        counts.setdefault(id(optimizer), []).extend(steps)

    for run in pair:
        run.optimizer.register_step_pre_hook(scale)
        run.optimizer.register_step_post_hook(look)
    pair.attach()
    pair.train(5)
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
    pair = make_pair(Zoo, adamw)
    compiled = torch.compile(pair.offloaded.optimizer.step)

    def step(run: Run, number: int) -> None:
        run.loss(number).backward()
        compiled() if run is pair.offloaded else run.optimizer.step()

    pair.train(2, step)


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


def assert_in_bfloat16(pair: Pair) -> None:
    optimizer = pair.offloaded.optimizer
    assert offloaded_names(optimizer)
    homes = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    assert {value.dtype for value in homes if value.dim()} == {torch.bfloat16}


@pytest.mark.parametrize("policy", [SMALL, with_share(bucket_bytes=2048, passing=8192, staying=4000)])
def test_it_keeps_its_dtype(policy: OffloadPolicy) -> None:
    pair = make_pair(Net, sgd, policy=policy)
    bytes_at_attach = pair.offloaded.optimizer.offload_report().memory.host_bytes
    pair.train(6)
    assert_in_bfloat16(pair)
    assert pair.offloaded.optimizer.offload_report().memory.host_bytes < bytes_at_attach
    saved = copy.deepcopy(pair.plain.optimizer.state_dict())
    pair.train(2)
    for run in pair:
        run.optimizer.load_state_dict(copy.deepcopy(saved))
        for state in run.optimizer.state.values():  # torch widens it, and torchtitan narrows it again
            state.update({name: value.bfloat16() for name, value in state.items() if isinstance(value, Tensor)})
    pair.train(2)


def test_attached_after_a_step_and_a_parameter_that_thaws_later() -> None:
    pair = make_pair(Net, sgd, policy=None)
    pair.each(lambda run: run.model.down.requires_grad_(False))
    pair.train(2)
    pair.attach()
    pair.train(3)
    assert_in_bfloat16(pair)
    pair.each(lambda run: run.model.down.requires_grad_(True))
    pair.train(3)
    assert_in_bfloat16(pair)


def test_no_dtype_changes_once_there_is_state() -> None:
    pair = make_pair(Zoo, lambda params: optim.SGD(params, lr=0.05, momentum=0.9, foreach=False))
    pair.train(2)
    for state in pair.offloaded.optimizer.state.values():
        state["momentum_buffer"] = state["momentum_buffer"].bfloat16()
    with pytest.raises(ValueError, match="Put a tensor of that shape and dtype there"):
        train_step(pair.offloaded, 2)
