"""Overlap with forward and backward gives the same bits, whatever the loop does; what it cannot repeat is refused."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp_offload import offload_optimizer, remove_offload
from fsdp_offload.engine.engine import engine_of
from fsdp_offload.fsdp import fully_shard as fully_shard_compat
from tests.async_writers import Reading
from tests.overlapping import EVERY_POLICY, POLICIES, Loop, adamw, pair, policy_of, same
from tests.parity import attach


@EVERY_POLICY
def test_updates_and_loads_really_begin_in_the_backward(mesh: DeviceMesh, fields: dict[str, Any]) -> None:
    loop = Loop(mesh, adamw, policy_of(fields)).train(3)
    core = engine_of(loop.optimizer).core
    loop.backward(3)
    if fields.get("overlap") == "iteration":
        assert core.done.keys() == set(core.buckets)
    else:
        assert sum(bucket.state.block is not None for bucket in core.buckets) >= 3  # as many as there is room for
        assert not core.done


def test_the_second_of_two_optimizers_may_not_be_the_one_that_updates_in_the_backward(mesh: DeviceMesh) -> None:
    """The first would step with gradients that are gone, after everything had been updated."""
    plain, loop = pair(mesh, policy_of({}))
    second = torch.optim.SGD(list(loop.model.parameters())[3:5], lr=0.1)
    with pytest.raises(RuntimeError, match=r"2 of these parameters \(blocks\.0.*overlap='iteration'"):
        attach(second, model=loop.model, policy=policy_of(POLICIES["iteration"]))
    assert same(plain.train(2), loop.train(2))


@pytest.mark.parametrize("looks", [False, True], ids=["for-good", "as-a-guess"])
def test_a_plain_optimizer_may_not_step_where_the_backward_updates(mesh: DeviceMesh, looks: bool) -> None:
    """It is told which parameter has two optimizers; a guess is taken back, so that the other one may go on alone."""
    plain, loop = pair(mesh, policy_of(POLICIES["iteration"]))

    def clip(one: Loop) -> None:
        if looks:
            nn.utils.clip_grad_norm_(one.model.parameters(), 1e9)

    for step in range(4):
        for one in (plain, loop):
            one.backward(step)
            clip(one)
            one.optimizer.step()
            one.optimizer.zero_grad()
    for one in (plain, loop):
        one.second = torch.optim.SGD(list(one.model.parameters())[3:5], lr=0.1)
        one.backward(4)
    before = [param.detach().clone() for param in plain.model.parameters()]
    with pytest.raises(RuntimeError, match=r"SGD\.step\(\): blocks\.0.*of an AdamW.*in the backward") as refused:
        loop.second.step()
    assert str(refused.value).endswith("Nothing has been changed.") == looks
    if looks:
        assert all(map(torch.equal, loop.model.parameters(), before))
        remove_offload(loop.optimizer)
        for one in (plain, loop):
            one.second.step()
    else:
        for one in (plain, loop):
            one.optimizer.step()
    assert same(plain, loop)


@pytest.mark.filterwarnings("ignore:offload_optimizer")
def test_in_the_step_a_model_without_groups_to_hook_is_none() -> None:
    model = nn.Linear(3, 3)
    optimizer = offload_optimizer(torch.optim.AdamW(model.parameters()), model=model)
    assert not engine_of(optimizer).loads_in_backward  # type: ignore[union-attr]


def test_a_torch_with_other_hook_points(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loads begin in step() where the policy can do without them."""
    monkeypatch.setattr(fully_shard_compat, "_READ", (*fully_shard_compat._READ, "_gone"))
    plain, offloaded = pair(mesh, policy_of({}))
    assert not engine_of(offloaded.optimizer).loads_in_backward  # type: ignore[union-attr]
    assert same(plain.train(5), offloaded.train(5))
    with pytest.raises(NotImplementedError, match=r"no \['_gone'\].*use OffloadPolicy\(overlap='step'\)"):
        Loop(mesh, adamw, policy_of({"overlap": "forward"}))


def test_a_load_between_backward_and_step_while_homes_are_read(mesh: DeviceMesh) -> None:
    """The backward has stored into spare homes, and nothing of that counts: later steps store where the state lives."""
    plain, offloaded = pair(mesh, policy_of({"overlap": "iteration"}, snapshot_bytes=1 << 20))
    for loop in (plain, offloaded):
        loop.train(3)
        weights = {name: value.detach().clone() for name, value in loop.model.state_dict().items()}
        saved = copy.deepcopy(loop.optimizer.state_dict())
        engine = engine_of(loop.optimizer)
        if engine is not None:
            engine.wait_all_home()
            engine.lending.lend(Reading(), [shard.home for shard in engine.plan.shards.values()])
        loop.backward(3)
        loop.model.load_state_dict(weights)
        loop.optimizer.load_state_dict(saved)
        loop.optimizer.zero_grad()
    assert same(plain.train(4, first=4), offloaded.train(4, first=4))


@EVERY_POLICY
def test_the_hooks_of_one_optimizer_survive_another(mesh: DeviceMesh, fields: dict[str, Any]) -> None:
    loop = Loop(mesh, lambda params: torch.optim.AdamW(params[::2], lr=0.02), policy_of(fields))
    other = torch.optim.AdamW(list(loop.model.parameters())[1::2], lr=0.01)
    with pytest.warns(UserWarning, match="nothing to gain"):
        offload_optimizer(other, model=loop.model, policy=policy_of(fields))
    remove_offload(other)
    loop.train(3)
    loop.backward(3)
    hooks = vars(loop.optimizer)["_offload_engine"].hooks
    assert engine_of(loop.optimizer).core.reductions.have_begun
    assert hasattr(hooks._groups[0]._group, "_fsdp_offload_points")
