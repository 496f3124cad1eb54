"""Beside the conformance suite: steps that fail before they write, writes that are lost, and what is kept alive."""

import weakref
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import AdamW

from fsdp_offload import OffloadPolicy
from fsdp_offload.core.cache import Cache
from fsdp_offload.core.room import Reading
from fsdp_offload.device.lanes import DeviceLink
from fsdp_offload.engine.engine import Engine, engine_of
from fsdp_offload.engine.step import Step
from fsdp_offload.optimizers import divided_step
from tests.core.deferred import DeferredLanes
from tests.overlapping import Loop, adamw, linear_blocks, pair, same
from tests.parity import attach, host_copy, local


def no_room(*_: object) -> NoReturn:
    raise torch.OutOfMemoryError("full")


def test_a_step_that_fails_before_its_first_update_loses_nothing_that_is_kept(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state on the device is newer than at home, and there is no other."""
    make = partial(AdamW, lr=1e-2, weight_decay=0.0, foreach=True)
    plain, loop = pair(mesh, OffloadPolicy(bucket_bytes=2048, device_bytes=1 << 20), make)
    for one in (plain, loop):
        one.train(3).backward(3)
    assert any(bucket.state.dirty for bucket in engine_of(loop.optimizer).core.buckets), "nothing is kept"
    with monkeypatch.context() as patch:
        patch.setattr(Step, "job", no_room)
        with pytest.raises(torch.OutOfMemoryError):
            loop.optimizer.step()
    for one in (plain, loop):
        one.step()
        one.train(1, first=4)
    assert same(plain, loop)


def test_an_optimizer_that_sees_dtensors_updates_in_the_backward(mesh: DeviceMesh) -> None:
    model = linear_blocks(mesh, bias=False)
    optimizer = torch.optim.Muon(model.parameters(), lr=1e-2)
    policy = OffloadPolicy(parameters=True, overlap="iteration", bucket_bytes=1024, device_bytes=4096)
    attach(optimizer, model=model, policy=policy)
    for step in range(6):
        model(torch.full((2, 12), 1.0 + step)).square().sum().backward()
        assert engine_of(optimizer).core.done or step < 3
        optimizer.step()
        optimizer.zero_grad()


def test_updates_that_wait_for_step_do_not_run_in_the_backward(mesh: DeviceMesh) -> None:
    plain, loop = pair(mesh, OffloadPolicy(overlap="iteration", bucket_bytes=1024, device_bytes=4096))
    for one in (plain, loop):
        one.train(4)
    core = engine_of(loop.optimizer).core
    core.reductions.choose_later(core.buckets, Reading(0, 1, link_ms=1))
    later = {one.number for one in core.reductions.later}  # numbers: to print buckets takes minutes
    assert len(later) > 1
    for at in range(4, 9):
        for one in (plain, loop):
            if at == 7:  # the last range of a parameter, which would write its new entry, waits
                one.optimizer.state.clear()
            one.backward(at)
        done = {one.number for one in core.done}
        assert done
        assert later.isdisjoint(done)
        for one in (plain, loop):
            one.step()
    assert same(plain, loop)


# What an update on a stream of its own reads lives until compute has waited for it; a block that is given back dies.
# On the CPU nothing is late: these look at what is alive, and tests/gpu at bits and bytes.


def make(
    mesh: DeviceMesh, overlap: Any, lr: float | Tensor = 1e-2, *, parameters: bool = False
) -> tuple[nn.Module, AdamW]:
    model = linear_blocks(mesh, 8)
    optimizer = AdamW(model.parameters(), lr=lr, fused=True)
    policy = OffloadPolicy(overlap=overlap, parameters=parameters, bucket_bytes=1024, device_bytes=4096)
    attach(optimizer, model=model, policy=policy)
    return model, optimizer


def backward(model: nn.Module) -> None:
    model(torch.ones(2, 8)).square().sum().backward()


def alive(refs: list[Any]) -> int:
    return sum(one() is not None for one in refs)


def test_copies_of_hyperparameters_and_of_a_scale(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = make(mesh, "forward", torch.tensor(1e-2))
    refs: list[Any] = []
    made = Step.__init__

    def make_noted(opened: Step, *args: Any, **options: Any) -> None:
        made(opened, *args, **options)
        refs[:] = map(weakref.ref, opened.divided.copies)

    monkeypatch.setattr(Step, "__init__", make_noted)
    for _ in range(3):
        backward(model)
        assert alive(refs) == 0, "kept longer than needed"
        optimizer.found_inf = torch.tensor(0.0)  # a GradScaler sets it for the step
        optimizer.step()
        optimizer.zero_grad()
        assert refs
        assert alive(refs) == len(refs), "their memory is free while an update may still read it"
        del optimizer.found_inf


def test_updates_in_the_backward_wait_for_copies_of_hyperparameters(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    lanes, own = DeferredLanes(0), divided_step._own

    def made(value: Any) -> Any:
        copy = own(value)
        lanes.made([copy] if isinstance(copy, Tensor) else [])  # on the compute stream
        return copy

    monkeypatch.setattr(DeviceLink, "lanes", lambda link, *, serial: lanes)
    monkeypatch.setattr(divided_step, "_own", made)
    model, optimizer = make(mesh, "iteration", torch.tensor(1e-2))
    for _ in range(4):
        backward(model)  # the lanes would see the race
        optimizer.step()
        optimizer.zero_grad()


def test_a_step_under_inference_mode_makes_state_that_a_backward_may_write(mesh: DeviceMesh) -> None:
    model, optimizer = make(mesh, "iteration")
    for _ in range(4):
        backward(model)
        with torch.inference_mode():
            optimizer.step()
        optimizer.zero_grad()
    assert not any(one.is_inference() for one in optimizer.state[next(model.parameters())].values())


class Zeroing(AdamW):
    def zero_grad(self, set_to_none: bool = False) -> None:
        super().zero_grad(set_to_none)


def test_a_class_that_zeroes_where_others_clear_waits_for_updates(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DeviceLink, "lanes", lambda link, *, serial: DeferredLanes(0))
    models = [linear_blocks(mesh, 8) for _ in range(2)]
    optimizers = [Zeroing(model.parameters(), lr=0.1) for model in models]
    attach(optimizers[1], model=models[1], policy=OffloadPolicy(overlap="forward"), trust_separable=True)
    for _ in range(4):
        for model, optimizer in zip(models, optimizers, strict=True):
            backward(model)
            optimizer.step()
            optimizer.zero_grad()
    optimizers[1].synchronize()
    for param, other in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(local(param), local(other))


def test_gradients_of_which_some_came_late(mesh: DeviceMesh) -> None:
    model, optimizer = make(mesh, "iteration")
    for _ in range(4):
        backward(model)
        optimizer.step()
        optimizer.zero_grad()
    late = model[0].bias
    late.requires_grad_(False)
    backward(model)
    late.requires_grad_(True)
    late.grad = torch.zeros_like(late)
    assert engine_of(optimizer).core.done, "the backward has updated nothing"
    refs = [weakref.ref(param.grad) for param in model.parameters()]
    optimizer.step()
    optimizer.zero_grad()
    assert alive(refs) == len(refs)
    assert host_copy(late).isfinite().all()


@pytest.mark.parametrize("parameters", [False, True])
@pytest.mark.parametrize("overlap", ["step", "forward", "iteration"])
def test_blocks_that_are_released_are_gone(mesh: DeviceMesh, overlap: str, parameters: bool) -> None:
    """Also from what updates were bound to."""
    model, optimizer = make(mesh, overlap, parameters=parameters)
    engine = engine_of(optimizer)
    assert isinstance(engine, Engine)
    for _ in range(4):
        backward(model)
        optimizer.step()
        optimizer.zero_grad()
        cache = engine.core.cache
        blocks = [item.block for item in cache.held] + [block for pool in cache.pools for block in pool.free]
        memory = [StorageWeakRef(block.memory.untyped_storage()) for block in blocks]
        assert memory
        del blocks
        optimizer.offload_states()
        optimizer.release_states()
        assert all(one.expired() for one in memory)
        optimizer.reload_states()


def test_a_group_without_gradients_costs_no_block(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """An update that created its state would need the memory of a block."""
    loop = Loop(mesh, adamw, OffloadPolicy(overlap="iteration", bucket_bytes=8192, device_bytes=6 * 8192))
    for step in range(8):
        if step == 5:
            monkeypatch.setattr(Cache, "_take", no_room)
        loop.backward(step, extra=False)
        loop.step()


@pytest.mark.parametrize("fields", [{}, {"host_fraction": 0.5}, {"host_fraction": 1.0}])
def test_state_that_was_exchanged_between_steps_is_updated_in_the_backward(
    mesh: DeviceMesh, fields: dict[str, Any]
) -> None:
    usual = OffloadPolicy(bucket_bytes=4096, **fields)  # with the same arithmetic on the CPU
    plain, loop = (Loop(mesh, adamw, policy) for policy in (usual, replace(usual, overlap="iteration")))
    for step in range(4, 8):
        for one in (plain, loop):
            one.train(4 if step == 4 else 1, first=step)
            for param in one.params:
                one.optimizer.state[param]["exp_avg"] = one.optimizer.state[param]["exp_avg"].clone()
            one.backward(step + 10)
        assert engine_of(loop.optimizer).core.done
        for one in (plain, loop):
            one.step()
    assert same(plain, loop)


def test_a_load_that_divides_state_anew_leaves_out_what_the_backward_has_used(mesh: DeviceMesh) -> None:
    amsgrad = Loop(mesh, partial(AdamW, lr=0.02, amsgrad=True), None).train(3).optimizer.state_dict()
    loop = Loop(mesh, adamw, OffloadPolicy(overlap="iteration", bucket_bytes=8192)).train(3)
    loop.backward(3)
    assert engine_of(loop.optimizer).core.done
    loop.optimizer.load_state_dict(amsgrad)
    before = [param.detach().to_local().clone() for param in loop.params]
    with pytest.warns(UserWarning, match=r"load_state_dict\(\) came between the backward and step\(\)"):
        loop.optimizer.step()
    assert all(map(torch.equal, before, (param.detach().to_local() for param in loop.params)))


def test_a_learning_rate_that_is_written_past_its_version_is_seen(mesh: DeviceMesh) -> None:
    loop = Loop(mesh, partial(AdamW, lr=torch.tensor(0.02), foreach=False), OffloadPolicy(overlap="iteration")).train(3)
    loop.backward(3)
    loop.optimizer.param_groups[0]["lr"].data.mul_(0.5)
    with pytest.raises(RuntimeError, match="hyperparameters have changed since then"):
        loop.optimizer.step()
