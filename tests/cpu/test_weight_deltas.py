"""What ``weight_deltas`` hands out, and what it refuses, case by case; random programs are in ``tests/conformance``."""

import copy
import gc
import pickle
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp_offload import clip_grad_norm_, offload_model, offload_report, reload_model, remove_offload
from fsdp_offload.engine.engine import engine_of
from fsdp_offload.listeners import WeightDelta, WeightDeltas, weight_deltas
from fsdp_offload.listeners import deltas as deltas_module
from fsdp_offload.listeners import rows as rows_module
from tests.overlapping import EVERY_POLICY, Loop, Net, adamw, policy_of
from tests.parity import attach, fail_in_bucket, local
from tests.remedies import Unlisted


def half() -> Net:
    return Net().bfloat16()


def slow(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-5, weight_decay=0.0)


def by_name(deltas: Any) -> dict[str, list[WeightDelta]]:
    found: dict[str, list[WeightDelta]] = {}
    for one in deltas:
        found.setdefault(one.name, []).append(one)
    return found


def bits_of(loop: Loop) -> dict[str, Tensor]:
    params = loop.model.named_parameters()
    return {name: local(param.detach()).clone().view(-1).view(torch.int16) for name, param in params}


def assert_brought_up(copied: dict[str, Tensor], deltas: Any, loop: Loop) -> None:
    """Apply deltas to a copy of the weights' bits, which then equal the current ones."""
    for name, indices, values, _ in deltas:
        copied[name][indices] = values.view(torch.int16)
    after = bits_of(loop)
    assert all(torch.equal(copied[name], after[name]) for name in copied)


@EVERY_POLICY
def test_few_are_handed_out_one_by_one_and_many_whole(mesh: DeviceMesh, fields: dict[str, Any]) -> None:
    loop = Loop(mesh, slow, policy_of(fields), net=half).train(1)
    deltas, before = weight_deltas(loop.optimizer), bits_of(loop)
    loop.train(1, first=1)
    found, after = by_name(deltas), bits_of(loop)
    kinds = set()
    for name, old in before.items():
        changed = (old != after[name]).nonzero().squeeze(1)
        kinds.add(is_dense := len(changed) > old.numel() / 4)
        if is_dense:
            changed = torch.arange(old.numel())
        of_one = found.get(name, [])
        assert {one.dense for one in of_one} <= {is_dense}
        assert torch.equal(torch.cat([*(one.indices for one in of_one), changed[:0]]), changed)
        assert all(torch.equal(one.values.view(torch.int16), after[name][one.indices]) for one in of_one)
    assert kinds == {True, False}
    assert list(deltas) == []
    with pytest.raises(TypeError, match="listens to an optimizer of this process"):
        pickle.dumps(deltas)


def test_a_step_that_is_rolled_back_leaves_none(mesh: DeviceMesh) -> None:
    loop = Loop(mesh, adamw, policy_of({"overlap": "iteration"}), net=half)
    for step in range(4):
        loop.backward(step)
        clip_grad_norm_(loop.optimizer, 1e9)
        loop.step()
    deltas = weight_deltas(loop.optimizer)
    loop.backward(4)
    speculation = engine_of(loop.optimizer).speculation
    assert speculation.made
    loop.optimizer.zero_grad()
    assert speculation.rolled_back == 1
    assert list(deltas) == []
    loop.backward(5)
    assert speculation.made
    assert list(deltas) == []  # to look takes it back, too
    assert speculation.rolled_back == 2


@pytest.mark.parametrize("way", ["counted", "not counted", "a load"])
def test_what_others_write_is_handed_out_whole(mesh: DeviceMesh, way: str) -> None:
    loop = Loop(mesh, slow, policy_of({}), net=half).train(1)
    deltas = weight_deltas(loop.optimizer)
    loop.train(1, first=1)
    list(deltas)
    name, param = "blocks.1.up.weight", loop.model.blocks[1].up.weight
    if way == "a load":
        loop.model.load_state_dict({key: value.clone() for key, value in loop.model.state_dict().items()})
        assert list(deltas) == []  # of the same values
    with torch.no_grad():
        (local(param) if way != "not counted" else local(param).data)[3, 3::4].neg_()  # the highest bits of words
        if way == "a load":
            changed = {key: value.clone() for key, value in loop.model.state_dict().items()}
            local(param).neg_()
            loop.model.load_state_dict(changed)
    found = by_name(deltas)
    assert [*found] == [name]
    assert all(one.dense for one in found[name])
    assert torch.equal(torch.cat([one.values for one in found[name]]), local(param.detach()).view(-1))
    with torch.no_grad():
        local(param)[0].neg_()
    loop.train(1, first=2)
    assert all(one.dense for one in by_name(deltas)[name])
    assert not list(deltas)


def test_behind_a_failed_step_all_is_handed_out_that_it_may_have_changed(mesh: DeviceMesh) -> None:
    loop = Loop(mesh, slow, policy_of({}), net=half).train(2)
    deltas, saved = weight_deltas(loop.optimizer), copy.deepcopy(loop.optimizer.state_dict())
    before = bits_of(loop)
    fail_in_bucket(3, lambda: loop.train(1, first=2))
    with pytest.raises(RuntimeError, match="weight_deltas refused: an earlier step"):
        list(deltas)
    loop.optimizer.load_state_dict(saved)
    after = bits_of(loop)
    assert any(not torch.equal(before[name], after[name]) for name in before)
    assert_brought_up(before, deltas, loop)


def test_it_ends_with_its_object_or_its_offload(mesh: DeviceMesh) -> None:
    loop = Loop(mesh, slow, policy_of({}), net=half).train(1)
    deltas, other = weight_deltas(loop.optimizer), weight_deltas(loop.optimizer)
    loop.train(1, first=1)
    assert {one.name for one in deltas} == {one.name for one in other}
    engine = engine_of(loop.optimizer)
    assert len(engine.contents.listeners) == 2
    other.forget()
    assert sum(len(one.indices) for one in other) == sum(param.numel() for param in loop.params)
    other.close()
    with pytest.raises(RuntimeError, match=r"or close\(\) was called"):
        list(other)
    remove_offload(loop.optimizer)
    with pytest.raises(RuntimeError, match="is not offloaded any more"):
        list(deltas)
    del deltas
    gc.collect()
    assert engine.contents.listeners == []


def test_forget_while_a_step_is_merged(mesh: DeviceMesh) -> None:
    loop = Loop(mesh, slow, policy_of({}), net=half).train(1)
    deltas = weight_deltas(loop.optimizer)
    once = iter([deltas.forget])

    class Compared(dict[int, Any]):
        def get(self, *args: Any) -> Any:
            next(once, lambda: None)()
            return super().get(*args)

    for shard in deltas._recorder.shards.values():
        shard.sums = Compared(shard.sums)
    loop.train(1, first=1)
    assert sum(len(one.indices) for one in deltas) == sum(param.numel() for param in loop.params)


def test_steps_behind_the_end_of_the_main_thread(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(mesh, slow, policy_of({}), net=half).train(1)
    deltas, before = weight_deltas(loop.optimizer), bits_of(loop)
    monkeypatch.setattr("concurrent.futures.thread._shutdown", True)
    loop.train(2, first=1)
    assert_brought_up(before, deltas, loop)


def test_while_the_model_sleeps(mesh: DeviceMesh) -> None:
    loop = Loop(mesh, slow, policy_of({}), net=half).train(1)
    deltas = weight_deltas(loop.optimizer)
    offload_model(loop.model)
    with pytest.raises(RuntimeError, match=r"is asleep. Call reload_model\(model\) first"):
        list(deltas)
    reload_model(loop.model)
    assert list(deltas) == []


@EVERY_POLICY
@pytest.mark.parametrize("place", ["forward", "another thread"])
def test_it_may_begin_and_be_read_in_a_forward(mesh: DeviceMesh, fields: dict[str, Any], place: str) -> None:
    """In which the root's parameters are gathered; in another thread, too, which does not wait for the forward."""
    plain, loop = (Loop(mesh, slow, one, net=half).train(2) for one in (None, policy_of(fields)))
    followed: list[WeightDeltas] = []
    found: list[list[WeightDelta]] = []

    def look() -> None:
        followed.append(weight_deltas(loop.optimizer))
        found.append([*followed[0]])

    def hook(*_: object) -> None:
        reader = threading.Thread(target=look)
        reader.start() if place == "another thread" else look()
        if place == "another thread":
            reader.join()

    before, hooked = bits_of(loop), loop.model.blocks[1].register_forward_hook(hook)
    for each in (plain, loop):
        each.train(2, first=2)
    hooked.remove()
    assert len(found) == 2
    assert_brought_up(before, [*found[1], *followed[0]], loop)
    assert all(map(torch.equal, bits_of(plain).values(), bits_of(loop).values()))


def test_a_record_that_fails_is_raised_where_deltas_are_read(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step that it is of is complete; then all weights without a record are handed out, and the next step's few."""
    loop = Loop(mesh, slow, policy_of({}), net=half)
    deltas = weight_deltas(loop.optimizer)

    def fail(*args: object) -> None:
        monkeypatch.undo()
        raise MemoryError

    before = bits_of(loop)
    monkeypatch.setattr(deltas_module, "merge", fail)
    loop.train(2)
    with pytest.raises(RuntimeError, match="Iterate again"):
        list(deltas)
    assert_brought_up(before, deltas, loop)
    loop.train(1, first=2)
    assert not all(delta.dense for delta in deltas)


def test_what_it_refuses(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(mesh, slow, None, net=half)
    with pytest.raises(RuntimeError, match="is not offloaded; call offload_optimizer"):
        weight_deltas(loop.optimizer)
    attach(loop.optimizer)
    with pytest.raises(RuntimeError, match="holds 2 optimizers; give one at a time"):
        weight_deltas([loop.optimizer, attach(slow(loop.params))])  # type: ignore[arg-type]
    whole = Loop(mesh, lambda params: Unlisted(params, lr=0.01), policy_of({}))
    with pytest.raises(ValueError, match="Unlisted moves as a whole"):
        weight_deltas(whole.optimizer)
    usual = Loop(mesh, slow, policy_of({}), net=half)
    with monkeypatch.context() as patch:
        patch.setattr("fsdp_offload.listeners.deltas.has_inner_tensors", lambda param: True)
        with pytest.raises(ValueError, match="from which forwards compute weights"):
            weight_deltas(usual.optimizer)
    early = Loop(mesh, slow, policy_of({"overlap": "iteration"}), net=half).train(3)
    deltas = weight_deltas(early.optimizer)
    early.backward(3)
    with pytest.raises(RuntimeError, match=r"weight_deltas refused: the backward has updated a part"):
        list(deltas)
    early.step()
    assert list(deltas)
    assert offload_report(early.optimizer)


def test_parameters_that_come_later(mesh: DeviceMesh) -> None:
    """Of the model: they are followed from the beginning. Of no model: their names are not known."""
    loop = Loop(mesh, lambda params: slow(params[::2]), policy_of({}), net=half)
    deltas = weight_deltas(loop.optimizer)
    loop.optimizer.add_param_group({"params": loop.params[1::2]})
    list(deltas)
    before = bits_of(loop)
    after = bits_of(loop.train(1))
    changed = {name for name, old in before.items() if not torch.equal(old, after[name])}
    assert set(by_name(deltas)) == changed > {name for name, one in loop.named.items() if one.dim() == 2}
    late = nn.Parameter(torch.ones(4))
    loop.optimizer.add_param_group({"params": [late]})
    with pytest.raises(RuntimeError, match="which the model does not have"):
        list(deltas)
    loop.model.extra.norm.late = late
    with pytest.raises(RuntimeError, match="which its model did not have when weight_deltas was called"):
        list(deltas)


@EVERY_POLICY
def test_parameters_that_leave(mesh: DeviceMesh, fields: dict[str, Any]) -> None:
    """Hand out, once, what was changed before they left."""
    loop = Loop(mesh, slow, policy_of(fields), net=half).train(2)
    deltas, before = weight_deltas(loop.optimizer), bits_of(loop)
    loop.train(1, first=2)
    group, left = loop.optimizer.param_groups[0], loop.named["blocks.0.up.weight"]
    group["params"] = [one for one in group["params"] if one is not left]
    assert_brought_up(before, deltas, loop)
    assert list(deltas) == []
    loop.train(1, first=3)
    assert "blocks.0.up.weight" not in by_name(deltas)


@pytest.mark.parametrize("strict", [True, False], ids=["all", "one"])
def test_parameters_that_a_load_replaces(mesh: DeviceMesh, strict: bool) -> None:
    loop = Loop(mesh, slow, policy_of({}), net=half).train(1)
    deltas, state = weight_deltas(loop.optimizer), copy.deepcopy(loop.model.state_dict())
    state = state if strict else {"blocks.0.up.weight": state["blocks.0.up.weight"]}
    loop.model.load_state_dict(state, strict=strict, assign=True)
    for refused in (lambda: list(deltas), lambda: weight_deltas(loop.optimizer)):
        with pytest.raises(RuntimeError, match=r"which the model does not have .any more, after load_state_dict"):
            refused()


def test_forget_in_another_thread_is_for_the_next_iteration(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(mesh, slow, policy_of({}), net=half).train(1)
    deltas = weight_deltas(loop.optimizer)
    loop.train(1, first=1)
    with monkeypatch.context() as patch:
        patch.setattr(deltas_module, "_changed", lambda *_: (deltas.forget(), None)[1])
        list(deltas)
    assert all(one.dense for one in by_name(deltas)["blocks.0.up.weight"])
    assert list(deltas) == []


def test_steps_that_change_nothing_hand_out_nothing(mesh: DeviceMesh) -> None:
    loop = Loop(mesh, slow, policy_of({}), net=half).train(1)
    deltas = weight_deltas(loop.optimizer)
    loop.optimizer.param_groups[0]["lr"] = 0.0
    loop.train(1, first=1)
    assert list(deltas) == []


def test_a_default_device_is_not_theirs(mesh: DeviceMesh) -> None:
    """Indices and values are on the host, and so is what a step records."""
    loop = Loop(mesh, slow, policy_of({}), net=half).train(1)
    rows_module._multipliers.cache_clear()
    with torch.device("meta"):
        deltas = weight_deltas(loop.optimizer)
    before = bits_of(loop)
    loop.backward(1)
    with torch.device("meta"):
        loop.optimizer.step()
        found = list(deltas)
        deltas.forget()
        found += deltas
    assert {one.dense for one in found} == {True, False}
    assert all(one.indices.is_cpu and one.values.is_cpu for one in found)
    assert_brought_up(before, found, loop)


def test_two_optimizers_hand_out_their_own(mesh: DeviceMesh) -> None:
    """Matrices by Muon, which sees whole parameters, and the others by Adam."""
    loop = Loop(mesh, lambda params: slow([one for one in params if one.dim() != 2]), policy_of({}), net=half)
    matrices = torch.optim.Muon([one for one in loop.params if one.dim() == 2], lr=1e-4, ns_steps=1)
    attach(matrices, model=loop.model, policy=policy_of({}))
    both = [weight_deltas(loop.optimizer), weight_deltas(matrices)]
    names = [{name for name, one in loop.model.named_parameters() if (one.dim() == 2) == of} for of in (False, True)]
    for step in range(4):
        before = bits_of(loop)
        loop.backward(step)
        matrices.step()
        loop.step()
        matrices.zero_grad()
        if step == 2:
            continue  # two steps in between
        found: list[WeightDelta] = []
        for deltas, own in zip(both, names, strict=True):
            mine = list(deltas)
            assert {one.name for one in mine} <= own
            found += mine
        assert_brought_up(before, found, loop)
