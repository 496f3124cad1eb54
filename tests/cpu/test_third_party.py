"""Optimizers that torch does not know: from PyPI as their own users use them, and written by hand."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fsdp_offload import OffloadPolicy, offload_report
from fsdp_offload.engine.engine import engine_of
from tests.conformance.oracle import usual
from tests.overlapping import Loop, Net, assert_same_each_step, assert_trained, pair, same
from tests.parity import SMALL, One, Zoo, attach, offloaded_names
from tests.zoo.local import Assorted, Momentum

torchao = pytest.importorskip("torchao.optim")
schedulefree = pytest.importorskip("schedulefree")


@pytest.mark.usefixtures("eager")
def test_torchao_stochastic_rounding_draws_the_same_numbers() -> None:
    """One parameter, one bucket: several would share one sequence of random numbers, in the order of buckets."""

    def make(params: Any) -> torch.optim.Optimizer:
        return torchao.AdamW8bit(params, lr=1e-2, bf16_stochastic_round=True)

    both = pair(None, SMALL, make, net=lambda: One(64, 80).to(torch.bfloat16))
    assert_same_each_step(*both, 10)
    assert_trained(both[0])


@pytest.mark.usefixtures("eager")
def test_quantized_shards_that_are_written_after_they_were_loaded_are_loaded_again(mesh: DeviceMesh) -> None:
    """Through the local tensor, of which the DTensor around it and the codes within it know nothing."""

    def make(params: Any) -> torch.optim.Optimizer:
        return torchao.AdamW8bit(params, lr=1e-2)

    loops = pair(mesh, OffloadPolicy(), make, net=lambda: Net(width=128, layers=1))
    for loop in loops:
        loop.train(3)
        loop.backward(3)
        moments = [state["exp_avg"].to_local() for state in loop.optimizer.state.values()]
        quantized = [moment for moment in moments if type(moment) is not Tensor]
        assert quantized
        for moment in quantized:
            moment.copy_(torch.full(moment.shape, 0.5))
        loop.step()
    assert same(*loops)


def schedulefree_step(run: Loop, step: int) -> None:
    """Trains, and now and then evaluates with the averaged parameters, as its README says."""
    run.optimizer.train()
    usual(run, step)
    if step % 3 == 2:
        run.optimizer.eval()
        run.look()


@pytest.mark.parametrize(
    "kwargs", [{"foreach": True}, {"foreach": False}, {"warmup_steps": 4, "weight_decay": 0.1, "r": 1.0}], ids=str
)
@pytest.mark.parametrize("trusted", [False, True])
def test_schedulefree(kwargs: dict[str, Any], trusted: bool) -> None:
    """As a whole, which the report has advice for, or in pieces, as its row says."""
    both = pair(None, None, partial(schedulefree.AdamWScheduleFree, lr=0.01, **kwargs), net=Zoo)
    optimizer = attach(both[1].optimizer, trust_separable=trusted)
    advice = "AdamWScheduleFree was tried in pieces.*trust_separable=True"
    assert any(re.search(advice, note) for note in offload_report(optimizer).notes) != trusted
    capabilities = engine_of(optimizer).layouts.capabilities
    assert (capabilities.elementwise, capabilities.moves_whole) == (False, not trusted)
    assert_same_each_step(*both, 11, schedulefree_step)
    assert_trained(both[0])
    assert offloaded_names(optimizer) == {"z", "exp_avg_sq"}
    assert optimizer.param_groups[0]["k"] == 11
    for run in both:
        run.optimizer.eval()
    assert same(*both)


class Tallying(Momentum):
    """Separable, until the count of its group depends on how many parameters there are."""

    tallies = False

    def direction(self, grad: Tensor) -> Tensor:
        self.param_groups[0]["k"] += self.tallies
        return grad


def trusting(make: Callable[[Any], torch.optim.Optimizer]) -> tuple[Loop, Loop]:
    both = pair(None, None, make, net=Zoo)
    attach(both[1].optimizer, trust_separable=True)
    return both


def test_a_trusted_class_moves_in_pieces() -> None:
    both = trusting(Tallying)
    plan = engine_of(both[1].optimizer).plan
    assert any(len(shard.buckets) > 1 for shard in plan.shards.values()), "nothing is cut"
    assert any(shard.layout.values for shard in plan.shards.values()), "state is learnt when attaching"
    assert_same_each_step(*both, 6)
    assert_trained(both[0])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (Assorted, r"its state \['table'\] has not one number for each element"),
        (torch.optim.LBFGS, "depends on others"),  # as the table says
    ],
)
def test_trust_in_what_is_known_to_be_otherwise_is_an_error(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        trusting(make)


def test_what_shows_later_stops_before_the_next_bucket() -> None:
    """Trust that was misplaced; loading both model and optimizer makes it whole again."""
    plain, loop = pair(None, None, Tallying, net=Zoo)
    assert_same_each_step(plain, loop, 2)
    attach(loop.optimizer, trust_separable=True)
    assert_same_each_step(plain, loop, 3)
    saved = plain.copy()
    loop.optimizer.tallies = True
    loop.backward(5)
    with pytest.raises(RuntimeError, match=r"param_groups\[0\]\['k'\]"):
        loop.update()
    changed = [name for name, param in loop.named.items() if not torch.equal(param, saved["model"][name])]
    assert 0 < len(changed) < len(loop.named) - 2
    for refused in (loop.update, loop.optimizer.state_dict):
        with pytest.raises(RuntimeError, match="half updated"):
            refused()
    loop.optimizer.tallies = False
    for run in (plain, loop):
        run.restore(saved)
    loop.clear()
    loop.seen.pop()
    assert_same_each_step(plain, loop, 3)
