"""Optimizers that torch does not know: from PyPI as their own users use them, and written by hand."""

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fsdp_offload import OffloadPolicy, offload_report
from fsdp_offload.engine.engine import engine_of
from tests.overlapping import Net, same
from tests.overlapping import pair as pair_of_loops
from tests.parity import One, Pair, Run, Zoo, attach, make_pair, offloaded_names, params_of, train_step
from tests.zoo.local import Momentum

torchao = pytest.importorskip("torchao.optim")
schedulefree = pytest.importorskip("schedulefree")


@pytest.mark.usefixtures("eager")
def test_torchao_stochastic_rounding_draws_the_same_numbers() -> None:
    """One parameter, one bucket: several would share one sequence of random numbers, in the order of buckets."""

    def make(params: Any) -> torch.optim.Optimizer:
        return torchao.AdamW8bit(params, lr=1e-2, bf16_stochastic_round=True)

    pair = make_pair(lambda: One(64, 80), make, dtype=torch.bfloat16)
    pair.train(10)
    pair.assert_trained()


@pytest.mark.usefixtures("eager")
def test_quantized_shards_that_are_written_after_they_were_loaded_are_loaded_again(mesh: DeviceMesh) -> None:
    """Through the local tensor, of which the DTensor around it and the codes within it know nothing."""

    def make(params: Any) -> torch.optim.Optimizer:
        return torchao.AdamW8bit(params, lr=1e-2)

    loops = pair_of_loops(mesh, OffloadPolicy(), make, net=lambda: Net(width=128, layers=1))
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


def schedulefree_step(run: Run, step: int) -> tuple[float, float]:
    """Trains, and now and then evaluates with the averaged parameters, as its README says."""
    run.optimizer.train()
    loss = train_step(run, step)
    if step % 3 != 2:
        return loss, 0.0
    run.optimizer.eval()
    with torch.no_grad():
        return loss, run.loss(step).item()


@pytest.mark.parametrize(
    "kwargs", [{"foreach": True}, {"foreach": False}, {"warmup_steps": 4, "weight_decay": 0.1, "r": 1.0}], ids=str
)
@pytest.mark.parametrize("trusted", [False, True])
def test_schedulefree(kwargs: dict[str, Any], trusted: bool) -> None:
    """As a whole, which the report has advice for, or in pieces, as its row says."""
    pair = make_pair(Zoo, lambda params: schedulefree.AdamWScheduleFree(params, lr=0.01, **kwargs), policy=None)
    optimizer = attach(pair.offloaded.optimizer, trust_separable=trusted)
    advice = "AdamWScheduleFree was tried in pieces.*trust_separable=True"
    assert any(re.search(advice, note) for note in offload_report(optimizer).notes) != trusted
    capabilities = engine_of(optimizer).layouts.capabilities
    assert (capabilities.elementwise, capabilities.moves_whole) == (False, not trusted)
    pair.train(11, schedulefree_step)
    pair.assert_trained()
    assert offloaded_names(pair.offloaded.optimizer) == {"z", "exp_avg_sq"}
    assert pair.offloaded.optimizer.param_groups[0]["k"] == 11
    for run in pair:
        run.optimizer.eval()
    pair.assert_same()


class Tallying(Momentum):
    """Separable, until the count of its group depends on how many parameters there are."""

    tallies = False

    def direction(self, grad: Tensor) -> Tensor:
        self.param_groups[0]["k"] += self.tallies
        return grad


class OneScale(torch.optim.SGD):
    """Its state has not one number for each element."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        for param in params_of(self):
            if param.grad is not None:
                self.state[param].setdefault("scale", torch.zeros(2))
        return super().step(closure)


def trusting(make: Callable[[Any], torch.optim.Optimizer]) -> Pair:
    pair = make_pair(Zoo, make, policy=None)
    attach(pair.offloaded.optimizer, trust_separable=True)
    return pair


def test_a_trusted_class_moves_in_pieces() -> None:
    pair = trusting(Tallying)
    plan = engine_of(pair.offloaded.optimizer).plan
    assert any(len(shard.buckets) > 1 for shard in plan.shards.values()), "nothing is cut"
    assert any(shard.layout.values for shard in plan.shards.values()), "state is learnt when attaching"
    pair.train(6)
    pair.assert_trained()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda params: OneScale(params, lr=0.1), r"its state \['scale'\] has not one number for each element"),
        (torch.optim.LBFGS, "depends on others"),  # as the table says
    ],
)
def test_trust_in_what_is_known_to_be_otherwise_is_an_error(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        trusting(make)


def test_what_shows_later_stops_before_the_next_bucket() -> None:
    """Trust that was misplaced; loading both model and optimizer makes it whole again."""
    pair = make_pair(Zoo, Tallying, policy=None)
    pair.train(2)
    attach(pair.offloaded.optimizer, trust_separable=True)
    pair.train(3)
    run = pair.offloaded
    saved = copy.deepcopy(pair.plain.optimizer.state_dict())
    before = copy.deepcopy(run.model.state_dict())
    run.optimizer.tallies = True
    run.optimizer.zero_grad()
    run.loss(5).backward()
    with pytest.raises(RuntimeError, match=r"param_groups\[0\]\['k'\]"):
        run.optimizer.step()
    changed = [name for name, param in run.params.items() if not torch.equal(param, before[name])]
    assert 0 < len(changed) < len(before) - 2
    for refused in (run.optimizer.step, run.optimizer.state_dict):
        with pytest.raises(RuntimeError, match="half updated"):
            refused()
    run.model.load_state_dict(before)
    run.optimizer.tallies = False
    pair.each(lambda side: side.optimizer.load_state_dict(copy.deepcopy(saved)))
    pair.assert_same()
    pair.train(3)
