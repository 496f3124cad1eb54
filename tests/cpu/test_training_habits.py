"""Training as people do it: clipping, accumulation, groups, frozen and unused parameters; the same bits as without."""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from fsdp_offload import OffloadPolicy
from fsdp_offload.planning.device_share import device_share
from tests.parity import SMALL, Net, Run, Zoo, batch, make_pair, params_of, train_step
from tests.policies import with_share


def adamw(params: Iterable[nn.Parameter]) -> optim.Optimizer:
    return optim.AdamW(params, lr=0.01)


def two_groups(params: Iterable[nn.Parameter]) -> optim.Optimizer:
    """The usual split: matrices decay, all else does not."""
    params = list(params)
    decay = [param for param in params if param.dim() >= 2]
    others = [param for param in params if param.dim() < 2]
    return optim.AdamW(
        [{"params": decay, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0, "lr": 0.03}], lr=0.01
    )


UNUSED = ("unused.weight", "unused.bias")


@pytest.mark.parametrize("with_model", [True, False])
def test_groups_with_their_own_hyperparameters(with_model: bool) -> None:
    """Buckets follow the model when it is given, and then mix groups."""
    pair = make_pair(Net, two_groups, policy=None)
    pair.attach(with_model=with_model)
    pair.train(10)
    pair.assert_trained(*UNUSED)


def clip_by_norm(run: Run, step: int) -> float:
    run.optimizer.zero_grad()
    run.loss(step).backward()
    norm = nn.utils.clip_grad_norm_(run.model.parameters(), 0.1)
    run.optimizer.step()
    return norm.item()


def clip_by_value(run: Run, step: int) -> float:
    run.optimizer.zero_grad()
    loss = run.loss(step)
    loss.backward()
    nn.utils.clip_grad_value_(run.model.parameters(), 0.01)
    run.optimizer.step()
    return loss.item()


def accumulate(run: Run, step: int) -> float:
    total = 0.0
    for part in range(3):
        loss = run.loss(3 * step + part) / 3
        loss.backward()
        total += loss.item()
    run.optimizer.step()
    run.optimizer.zero_grad()
    return total


def keep_gradients(run: Run, step: int) -> float:
    """zero_grad(set_to_none=False): the same gradient tensors in every step."""
    run.optimizer.zero_grad(set_to_none=False)
    loss = run.loss(step)
    loss.backward()
    run.optimizer.step()
    return loss.item()


def two_steps_with_one_gradient(run: Run, step: int) -> float:
    loss = train_step(run, step)
    run.optimizer.step()
    return loss


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    "action", [clip_by_norm, clip_by_value, accumulate, keep_gradients, two_steps_with_one_gradient]
)
def test_loops(action: Callable[[Run, int], float], fused: bool) -> None:
    pair = make_pair(Net, lambda params: optim.AdamW(params, lr=0.01, fused=fused))
    pair.train(10, action)
    pair.assert_trained(*UNUSED)


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


def in_some_steps(run: Run, step: int) -> float:
    """A part of the network is used in every third step, another never."""
    run.optimizer.zero_grad()
    x = batch(step, run.device, run.dtype)
    loss = run.model(x) if step % 3 == 1 else (run.model.head(run.model.table(x)) - x).pow(2).mean()
    loss.backward()
    run.optimizer.step()
    return loss.item()


@pytest.mark.parametrize("make", [adamw, two_groups, lambda params: optim.SGD(params, lr=0.1, momentum=0.9)])
def test_parameters_without_a_gradient_in_some_steps(make: Callable[[Any], optim.Optimizer]) -> None:
    pair = make_pair(Net, make)
    pair.train(12, in_some_steps)
    pair.assert_trained(*UNUSED)
    state = pair.offloaded.optimizer.state
    assert pair.offloaded.params["unused.weight"] not in state  # reserved is not existing
    if "step" in state[pair.offloaded.params["up.weight"]]:
        assert state[pair.offloaded.params["up.weight"]]["step"] == 4
        assert state[pair.offloaded.params["table.weight"]]["step"] == 12


@pytest.mark.parametrize("cls", [optim.Adam, optim.ASGD, optim.NAdam])
def test_steps_without_any_gradient(cls: type[optim.Optimizer]) -> None:
    """Legal, also before the first real step; no counter moves where the plain one does not move it."""
    pair = make_pair(Net, cls)

    def without(run: Run, step: int) -> None:
        run.optimizer.zero_grad()
        run.optimizer.step()

    with pytest.warns(UserWarning, match="has never found one"):
        pair.train(2, without)
    assert not pair.offloaded.optimizer.state
    pair.train(2)
    pair.train(3, without)
    pair.train(2)
    pair.assert_trained(*UNUSED)


def frozen_net() -> nn.Module:
    model = Net()
    model.up.requires_grad_(False)
    return model


def test_frozen_parameters_take_no_host_memory_until_they_are_trained() -> None:
    everything = make_pair(Net, adamw).offloaded.optimizer.offload_report().host_bytes
    pair = make_pair(frozen_net, adamw)
    before = pair.offloaded.optimizer.offload_report().host_bytes
    frozen_bytes = 8 * sum(param.numel() for param in pair.offloaded.model.up.parameters())
    assert before <= everything - frozen_bytes
    pair.train(5)
    pair.assert_trained(*UNUSED, "up.weight", "up.bias")
    assert pair.offloaded.optimizer.offload_report().host_bytes == before
    for run in pair:
        run.model.up.requires_grad_(True)
    pair.train(5)
    pair.assert_trained(*UNUSED)
    assert pair.offloaded.optimizer.offload_report().host_bytes >= before + frozen_bytes
    for run in pair:
        run.model.up.requires_grad_(False)
    pair.train(3)


def tied_net() -> nn.Module:
    model = Net()
    model.head.weight = model.table.weight = nn.Parameter(torch.randn(24, 16) * 0.1)
    model.head.forward = lambda x: x @ model.table.weight  # type: ignore[method-assign]
    return model


def test_tied_weights_are_updated_once() -> None:
    pair = make_pair(tied_net, adamw, policy=None)
    pair.attach(with_model=True)
    pair.train(10)
    pair.assert_trained(*UNUSED)
    assert pair.offloaded.model.head.weight is pair.offloaded.model.table.weight


STATE_BYTES = 8 * sum(param.numel() for param in Zoo().parameters())


@pytest.mark.parametrize("make", [adamw, lambda params: optim.AdamW(params, lr=0.01, fused=True)])
@pytest.mark.parametrize(
    "policy",
    [
        dataclasses.replace(SMALL, serial=True),
        with_share(SMALL, staying=12_000),
        with_share(SMALL, staying=1 << 20),
        with_share(bucket_bytes=1024, passing=2048),
        with_share(bucket_bytes=3000, passing=7001),
        OffloadPolicy(),
    ],
    ids=["serial", "some resident", "all resident", "smallest", "odd sizes", "default"],
)
def test_policies(policy: OffloadPolicy, make: Callable[[Any], optim.Optimizer]) -> None:
    pair = make_pair(Zoo, make, policy=policy)
    pair.train(10)
    pair.assert_trained()
    report = pair.offloaded.optimizer.offload_report()
    assert report.host_state_bytes + report.resident_state_bytes == STATE_BYTES
    staying_bytes = device_share(policy, elementwise=True).staying_bytes
    assert report.resident_state_bytes <= staying_bytes
    assert (report.resident_state_bytes > 0) == (staying_bytes > 0)
    assert report.loaded_bytes >= report.host_state_bytes
    assert report.stored_bytes >= report.host_state_bytes
    pair.detach()
    pair.train(2)


def test_what_is_moved_is_what_the_optimizer_used() -> None:
    """What a user writes into the home between two steps is what the next step starts from."""
    pair = make_pair(Zoo, adamw)
    pair.train(3)
    for run in pair:
        for state in run.optimizer.state.values():
            state["exp_avg"].mul_(-2.0)
    pair.assert_same()
    pair.train(3)
