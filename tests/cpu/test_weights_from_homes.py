"""A loop over ``weights(model)`` has the weights of one step, in any thread; training goes on with the same bits."""

import threading
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fsdp_offload import offload_model, offload_states, release_states, reload_model
from fsdp_offload.engine.engine import engine_of
from fsdp_offload.listeners import weights
from tests.overlapping import EVERY_POLICY, Loop, Net, adamw, on_host
from tests.parity import attach, local

SPARE = {"spare": 1 << 20, "no spare": 0}
EVERY_SPARE = pytest.mark.parametrize("snapshot_bytes", SPARE.values(), ids=SPARE)
STREAMED: dict[str, Any] = {"bucket_bytes": 1024, "passing": 2048}
"""So little of the device that no parameters stay there."""


def small() -> Net:
    return Net(16, 2)


def weights_of(loop: Loop) -> dict[str, Tensor]:
    return {name: local(param.detach()).clone() for name, param in loop.model.named_parameters()}


def copied(loop: Loop) -> dict[str, Tensor]:
    return {name: local(tensor).clone() for name, tensor in weights(loop.model)}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], value) for name, value in other.items())


@EVERY_POLICY
@EVERY_SPARE
def test_each_set_is_that_of_one_step(mesh: DeviceMesh, fields: dict[str, Any], snapshot_bytes: int) -> None:
    plain = Loop(mesh, adamw, None, net=small)
    steps = [weights_of(plain)]
    for step in range(200):
        plain.train(1, first=step)
        steps.append(weights_of(plain))
    loop = Loop(mesh, adamw, on_host(fields, snapshot_bytes=snapshot_bytes, **STREAMED), net=small)
    sets: list[dict[str, Tensor]] = []
    errors: list[BaseException] = []
    ended = threading.Event()

    def read() -> None:
        try:
            while not ended.is_set():
                sets.append(copied(loop))
        except BaseException as error:  # noqa: BLE001
            errors.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    loop.train(200)
    ended.set()
    reader.join()
    assert errors == []
    assert plain.seen == loop.seen
    assert same(weights_of(loop), steps[-1])
    found = [[number for number, one in enumerate(steps) if same(one, got)] for got in sets]
    assert all(found), f"{found.count([])} of {len(found)} sets are those of no step"
    assert sum(0 < one[0] < 200 for one in found) > 1, "none was read while it trained"
    engine = engine_of(loop.optimizer)
    assert len(engine.lending.readers) < 5
    assert not any(item.kept for item in engine.weights.items.values())


def test_it_reads_neither_the_device_nor_a_gathered_parameter(mesh: DeviceMesh) -> None:
    loop = Loop(mesh, adamw, on_host({}), net=small).train(2)
    expected = weights_of(loop)
    offload_states(loop.optimizer)
    release_states(loop.optimizer)
    assert same(copied(loop), expected)
    homes = {part.home.weights.data_ptr() for part in engine_of(loop.optimizer).weights.parts.values()}
    assert {local(tensor).data_ptr() for _, tensor in weights(loop.model)} == homes
    with torch.no_grad():
        loop.model(loop.batch(0))  # leaves the root gathered
    assert same(copied(loop), expected)
    offload_model(loop.model)
    assert same(copied(loop), expected)
    reload_model(loop.model)
    loop.train(1, first=2)


def test_what_it_refuses(mesh: DeviceMesh) -> None:
    loop = Loop(mesh, adamw, on_host({}), net=small).train(1)
    with pytest.raises(RuntimeError, match=r"are still held as the loop ends"):
        dict(weights(loop.model))

    def write() -> None:
        for _ in weights(loop.model):
            with torch.no_grad():
                loop.params[0].mul_(2)

    with pytest.raises(RuntimeError, match="was written in place during the loop"):
        write()
    with pytest.raises(TypeError, match=r"Write weights\(model\)|expected a torch.nn.Module"):
        weights(loop.optimizer)  # type: ignore[arg-type]


def test_a_load_is_waited_for_in_another_thread_and_refused_in_its_own(mesh: DeviceMesh) -> None:
    """In the middle of it, half of the weights are old."""
    loop = Loop(mesh, adamw, on_host({}), net=small).train(1)
    loaded = {name: tensor.detach() * 2 for name, tensor in loop.model.state_dict().items()}
    found: list[dict[str, Tensor]] = []
    reader = threading.Thread(target=lambda: found.append(copied(loop)))

    def begin_to_read(*_: object) -> None:
        with pytest.raises(RuntimeError, match=r"load_state_dict\(\) is under way in this thread"):
            copied(loop)
        reader.start()

    undo = loop.model.blocks[0].register_load_state_dict_post_hook(begin_to_read)
    loop.model.load_state_dict(loaded)
    reader.join()
    undo.remove()
    assert same(found[0], {name: local(tensor) for name, tensor in loaded.items()})
    loop.train(1, first=1)
    assert same(copied(loop), weights_of(loop))


@pytest.mark.parametrize("again", [lambda loop: loop.model.load_state_dict(loop.model.state_dict()), Loop.backward])
def test_a_load_that_fails_holds_up_nothing(mesh: DeviceMesh, again: Callable[..., object]) -> None:
    loop = Loop(mesh, adamw, on_host({}), net=small).train(1)
    undo = loop.model.blocks[0].register_load_state_dict_post_hook(Mock(side_effect=LookupError("no such table")))
    with pytest.raises(LookupError):
        loop.model.load_state_dict(loop.model.state_dict())
    undo.remove()
    again(loop, *[1] * (again is Loop.backward))
    assert engine_of(loop.optimizer).core.loading == {}


@EVERY_POLICY
def test_a_step_in_the_loop_without_spare_homes_changes_nothing(mesh: DeviceMesh, fields: dict[str, Any]) -> None:
    plain, loop = (Loop(mesh, adamw, one, net=small).train(3) for one in (None, on_host(fields, **STREAMED)))

    def train() -> None:
        for _ in weights(loop.model):
            loop.train(1, first=3)

    with pytest.raises(RuntimeError, match="it would wait for itself"):
        train()
    assert same(copied(loop), weights_of(plain))
    loop.optimizer.zero_grad()
    for each in (plain, loop):
        each.train(2, first=3)
    assert same(weights_of(loop), weights_of(plain))


def test_few_are_copies_that_may_be_kept(mesh: DeviceMesh) -> None:
    """More are refused. (A dict of one or two cannot be told from a loop, whose variables hold as many.)"""
    loop = Loop(mesh, adamw, on_host({}, **STREAMED), net=small).train(1)
    up = loop.model.blocks[0].up
    kept, expected = dict(weights(up)), copied(loop)
    loop.train(2, first=1)
    assert {f"blocks.0.up.{name}" for name in kept} <= expected.keys()
    assert all(torch.equal(local(tensor), expected[f"blocks.0.up.{name}"]) for name, tensor in kept.items())
    assert not torch.equal(local(kept["weight"]), local(up.weight.detach()))


def test_a_step_in_the_loop_goes_to_spare_homes(mesh: DeviceMesh) -> None:
    """In the thread that trains, too: what the loop hands out is older than the step."""
    loop = Loop(mesh, adamw, on_host({}, snapshot_bytes=1 << 20), net=small).train(2)
    expected, got = weights_of(loop), {}
    for number, (name, tensor) in enumerate(weights(loop.model)):
        if number == 3:
            loop.train(1, first=2)
        got[name] = local(tensor).clone()
    assert same(got, expected)
    assert not same(weights_of(loop), expected)


def test_two_optimizers_are_read_in_the_thread_that_trains(mesh: DeviceMesh) -> None:
    loop = Loop(mesh, lambda params: adamw(params[::2]), on_host({}), net=small)
    with pytest.raises(ValueError, match="has no home on the host"):
        weights(loop.model)
    other = attach(adamw(loop.params[1::2]), model=loop.model, policy=on_host({}))
    for step in range(2):
        loop.backward(step)
        loop.step()
        other.step()
        other.zero_grad()
        assert same(copied(loop), weights_of(loop))
    loop.backward(2)
    before = copied(loop)
    loop.optimizer.step()
    with pytest.raises(RuntimeError, match="weights of two steps would be mixed"):
        copied(loop)
    other.step()
    assert not any(torch.equal(value, before[name]) for name, value in copied(loop).items())
    errors: list[RuntimeError] = []

    def read() -> None:
        try:
            copied(loop)
        except RuntimeError as error:
            errors.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    reader.join()
    assert "2 optimizers train this model" in str(errors)
