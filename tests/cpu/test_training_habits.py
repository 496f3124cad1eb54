"""Training as people do it: clipping, accumulation, groups, frozen and unused parameters; the same bits as without."""

from collections.abc import Iterable

import pytest
import torch
from torch import nn, optim

from tests.parity import Net, Run, make_pair, params_of


def adamw(params: Iterable[nn.Parameter]) -> optim.Optimizer:
    return optim.AdamW(params, lr=0.01)


def test_gradients_are_left_as_they_were() -> None:
    pair = make_pair(Net, adamw)
    for run in pair:
        run.optimizer.zero_grad()
        run.loss(0).backward()
    grads = [param.grad for param in params_of(pair.offloaded.optimizer)]
    pair.offloaded.optimizer.step()
    pair.plain.optimizer.step()
    pair.assert_same()
    for param, plain, grad in zip(
        params_of(pair.offloaded.optimizer), params_of(pair.plain.optimizer), grads, strict=True
    ):
        assert param.grad is grad
        assert (grad is None) == (plain.grad is None)
        assert grad is None or torch.equal(grad, plain.grad)


@pytest.mark.parametrize("kwargs", [{}, {"foreach": True}, {"fused": True}], ids=str)
def test_a_grad_scaler_skips_the_first_step(kwargs: dict[str, bool]) -> None:
    """With a fused optimizer state is created all the same, and its counter stays zero."""

    def scaled_step(run: Run, step: int) -> float:
        scaler = run.parts.setdefault("scaler", torch.amp.GradScaler("cpu", init_scale=2.0**10))
        run.optimizer.zero_grad()
        scaler.scale(run.loss(step)).backward()
        if step == 0:
            run.params["up.weight"].grad[0, 0] = float("inf")
        scaler.step(run.optimizer)
        scaler.update()
        return scaler.get_scale()

    pair = make_pair(Net, lambda params: optim.AdamW(params, lr=0.01, **kwargs))
    pair.train(1, scaled_step)
    counts = {float(state["step"]) for state in pair.offloaded.optimizer.state.values()}
    assert counts == ({0.0} if kwargs.get("fused") else set())
    pair.train(3, scaled_step)
    for run in pair:
        assert not hasattr(run.optimizer, "grad_scale")
        assert not hasattr(run.optimizer, "found_inf")
