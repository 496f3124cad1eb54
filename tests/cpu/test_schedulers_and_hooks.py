"""LR schedulers and step hooks, made before and after attaching: both go through the offloaded step, once."""

from typing import Any

import pytest
from torch import optim
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    LambdaLR,
    LRScheduler,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
)
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from tests.parity import Net, Pair, Run, make_pair, train_step


def warmup_then_cosine(optimizer: optim.Optimizer) -> LRScheduler:
    warmup = LambdaLR(optimizer, lambda step: (step + 1) / 4)
    return SequentialLR(optimizer, [warmup, CosineAnnealingLR(optimizer, T_max=8)], milestones=[4])


def one_cycle(optimizer: optim.Optimizer) -> LRScheduler:
    """Changes momentum as well."""
    return OneCycleLR(optimizer, max_lr=0.1, total_steps=40)


def scheduled_step(run: Run, step: int) -> float:
    loss = train_step(run, step)
    run.parts["scheduler"].step()
    return loss


def give_schedulers(pair: Pair, make: Any = warmup_then_cosine) -> None:
    for run in pair:
        run.parts["scheduler"] = make(run.optimizer)


def moved_bytes(run: Run) -> int:
    return run.optimizer.offload_report().step.stored_bytes


@pytest.mark.parametrize("make", [warmup_then_cosine, one_cycle])
@pytest.mark.parametrize("when", ["before", "after", "before, and stepped"])
def test_schedulers_go_through_us(when: str, make: Any) -> None:
    pair = make_pair(Net, lambda params: optim.AdamW(params, lr=0.05), policy=None)
    if when != "after":
        give_schedulers(pair, make)
    if when == "before, and stepped":
        pair.train(3, scheduled_step)
    pair.attach()
    if when == "after":
        give_schedulers(pair, make)
    pair.train(10, scheduled_step)  # looks after each step whether all state is in the arena
    assert moved_bytes(pair.offloaded) > 0
    pair.assert_trained("unused.weight", "unused.bias")


def test_plateau() -> None:
    pair = make_pair(Net, lambda params: optim.AdamW(params, lr=0.05), policy=None)
    for run in pair:
        run.parts["scheduler"] = ReduceLROnPlateau(run.optimizer, patience=0, threshold=10.0)
    pair.attach()

    def step_and_measure(run: Run, step: int) -> float:
        loss = train_step(run, step)
        run.parts["scheduler"].step(loss)
        return loss

    pair.train(10, step_and_measure)
    assert pair.offloaded.optimizer.param_groups[0]["lr"] < 0.05


@pytest.mark.parametrize("when", ["before", "between"])
def test_schedulers_go_on_after_removal(when: str) -> None:
    pair = make_pair(Net, lambda params: optim.AdamW(params, lr=0.05), policy=None)
    if when == "before":
        give_schedulers(pair)
    pair.attach()
    if when == "between":
        give_schedulers(pair)
    pair.train(3, scheduled_step)
    pair.detach()
    pair.train(4, scheduled_step)
    assert type(pair.offloaded.optimizer) is optim.AdamW
    pair.attach()
    pair.train(4, scheduled_step)
    assert moved_bytes(pair.offloaded) > 0
    pair.detach()
    pair.train(2, scheduled_step)


def test_two_schedulers_at_once() -> None:
    """Each wraps optimizer.step, one around the other."""
    pair = make_pair(Net, lambda params: optim.SGD(params, lr=0.05, momentum=0.9), policy=None)
    give_schedulers(pair, lambda optimizer: LambdaLR(optimizer, lambda step: 0.9**step))
    first = [run.parts["scheduler"] for run in pair]
    pair.attach()
    give_schedulers(pair, lambda optimizer: LambdaLR(optimizer, lambda step: 0.8**step))
    for scheduler, run in zip(first, pair, strict=True):
        run.parts["first"] = scheduler

    def step_both(run: Run, step: int) -> float:
        loss = scheduled_step(run, step)
        run.parts["first"].step()
        return loss

    pair.train(5, step_both)
    pair.detach()
    pair.train(5, step_both)


# Hooks ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["before", "after"])
def test_hooks_fire_once_per_step(when: str) -> None:
    pair = make_pair(Net, optim.AdamW, policy=None)
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
        assert pair.offloaded.optimizer.offload_report().kept.buckets > 3
        assert seen == [(what, optimizer) for what in ("global pre", "pre", "post", "global post")] * 3
        seen.clear()
        pair.detach()
        train_step(pair.offloaded, 3)
        assert seen == [(what, optimizer) for what in ("global pre", "pre", "post", "global post")]
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
