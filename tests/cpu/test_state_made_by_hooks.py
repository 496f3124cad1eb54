"""State that a step hook makes before the first step, in another dtype than the optimizer's own: torchtitan's bf16."""

import copy
from collections.abc import Iterable

import pytest
import torch
from torch import Tensor, nn, optim

from fsdp_offload import OffloadPolicy
from tests.parity import SMALL, Net, Pair, Zoo, local, make_pair, offloaded_names, train_step
from tests.policies import with_share


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
    with pytest.raises(ValueError, match="State is neither cast nor resized"):
        train_step(pair.offloaded, 2)
