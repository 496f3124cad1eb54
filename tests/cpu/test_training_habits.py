"""Training as people do it: clipping, accumulation, groups, frozen and unused parameters; the same bits as without."""

import dataclasses
from collections.abc import Iterable

import pytest
import torch
from torch import Tensor, nn, optim

from fsdp_offload import OffloadPolicy
from tests.parity import SMALL, Net, Run, Zoo, make_pair, params_of


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


def test_closure_runs_once_with_gradients_enabled_and_its_loss_is_returned() -> None:
    pair = make_pair(Net, adamw)
    calls = []

    def step_with_closure(run: Run, step: int) -> float:
        def closure() -> Tensor:
            assert torch.is_grad_enabled()
            calls.append(run)
            run.optimizer.zero_grad()
            loss = run.loss(step)
            loss.backward()
            return loss

        loss = run.optimizer.step(closure)
        assert isinstance(loss, Tensor)
        assert loss.requires_grad
        return loss.item()

    pair.train(10, step_with_closure)
    assert [run is pair.offloaded for run in calls] == [False, True] * 10


STATE_BYTES = 8 * sum(param.numel() for param in Zoo().parameters())


@pytest.mark.parametrize(
    "policy",
    [
        dataclasses.replace(SMALL, serial=True),
        dataclasses.replace(SMALL, device_bytes=12_000),
        OffloadPolicy(bucket_bytes=1024, device_bytes=2048),
        OffloadPolicy(bucket_bytes=3000, device_bytes=7001),
        OffloadPolicy(),
    ],
    ids=["serial", "some kept", "smallest", "odd sizes", "default"],
)
def test_policies(policy: OffloadPolicy) -> None:
    pair = make_pair(Zoo, adamw, policy=policy)
    pair.train(10)
    pair.assert_trained()
    report = pair.offloaded.optimizer.offload_report()
    assert report.memory.host_state_bytes == STATE_BYTES
    for moved in (report.step.loaded_bytes, report.step.stored_bytes):
        assert moved + report.memory.kept_state_bytes >= STATE_BYTES
    pair.detach()
    pair.train(2)
