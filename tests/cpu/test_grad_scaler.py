"""GradScaler with an offloaded optimizer: scaled and unscaled, clipped, fused or not, and steps that are skipped."""

import pytest
import torch
from torch import nn, optim

from tests.parity import Net, Run, make_pair
from tests.tiers import spread

KINDS = [{}, {"foreach": True}, {"fused": True}]


def scaled_step(run: Run, step: int, *, clip: bool = False) -> tuple[float, float]:
    scaler = run.parts["scaler"]
    run.optimizer.zero_grad()
    loss = run.loss(step)
    scaler.scale(loss).backward()
    if step in (3, 4, 8):
        run.params["up.weight"].grad[0, 0] = float("inf")
    if clip:
        scaler.unscale_(run.optimizer)
        nn.utils.clip_grad_norm_(run.model.parameters(), 0.1)
    scaler.step(run.optimizer)
    scaler.update()
    return loss.item(), scaler.get_scale()


@spread(
    pairs=True,
    kwargs={str(kwargs): kwargs for kwargs in KINDS},
    cls={"AdamW": optim.AdamW, "SGD": optim.SGD},
    clip={"": False, "clip": True},
)
def test_skipped_steps(kwargs: dict[str, bool], cls: type[optim.Optimizer], clip: bool) -> None:
    pair = make_pair(Net, lambda params: cls(params, lr=0.01, **kwargs))
    for run in pair:
        run.parts["scaler"] = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    pair.train(12, lambda run, step: scaled_step(run, step, clip=clip))
    pair.assert_trained("unused.weight", "unused.bias")
    if cls is optim.AdamW:
        state = pair.offloaded.optimizer.state[pair.offloaded.params["up.weight"]]
        assert state["step"] == 12 - 3
    for run in pair:
        assert not hasattr(run.optimizer, "grad_scale")
        assert not hasattr(run.optimizer, "found_inf")


@pytest.mark.parametrize("kwargs", KINDS, ids=str)
def test_the_first_step_is_skipped(kwargs: dict[str, bool]) -> None:
    """With a fused optimizer state is created all the same, and its counter stays zero."""
    pair = make_pair(Net, lambda params: optim.AdamW(params, lr=0.01, **kwargs))
    for run in pair:
        run.parts["scaler"] = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    pair.steps = 3
    pair.train(1, scaled_step)
    counts = {float(state["step"]) for state in pair.offloaded.optimizer.state.values()}
    assert counts == ({0.0} if kwargs.get("fused") else set())
    pair.steps = 5
    pair.train(3, scaled_step)
