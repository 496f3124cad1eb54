"""With updates in the backward: what loops do between forward, backward and ``step()`` has the bits of plain training,
or an error."""

import operator
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.optim import Optimizer

from fsdp_offload import clip_grad_norm_, offload_optimizer, remove_offload
from fsdp_offload.core.cache import Cache, Timeline
from fsdp_offload.core.loop import Core
from fsdp_offload.engine import step as steps
from fsdp_offload.engine.engine import Engine
from fsdp_offload.engine.groups import ParamGroups
from fsdp_offload.engine.homes import Plan, Turning
from fsdp_offload.fsdp.homed import ShardedParameter
from tests.conformance.oracle import ALWAYS, NEVER
from tests.overlapping import (
    Loop,
    Net,
    adamw,
    assert_same_each_step,
    attach,
    clipping,
    pair,
    policy_of,
    same,
    speculation_of,
    together,
)
from tests.parity import local

small_net = partial(Net, width=16, layers=2)
EVERYWHERE = pytest.mark.parametrize("parameters", [False, True])


WRITES: list[Callable[[list[Any]], object]] = [
    lambda params: [param.mul_(0.9) for param in params[::3]],
    lambda params: [param.data.mul_(0.9) for param in params],
    lambda params: [param.to_local().mul_(0.9) for param in params],
    lambda params: [param.data.to_local().mul_(0.9) for param in params],
    lambda params: torch._foreach_mul_(params, 0.9),
]


@EVERYWHERE
@pytest.mark.parametrize("write", WRITES)
@torch.no_grad()
def test_weights_written_after_the_forward(
    mesh: DeviceMesh, parameters: bool, write: Callable[[list[Tensor]], object]
) -> None:
    """The step is taken back, to parameters that the forward has not seen."""
    loops = pair(mesh, clipping(parameters=parameters, bucket_bytes=8192), net=small_net)
    for at, loop in together(loops, 8):
        with torch.enable_grad():
            loss = loop.model(loop.batch(at))
        if at == 6:
            write(loop.params)
        loss.backward()
        (clip_grad_norm_ if loop is loops[1] else _clip_plain)(loop.optimizer, ALWAYS if at == 6 else NEVER)
        loop.step()
    assert speculation_of(loops[1]).rolled_back == 1


def _clip_plain(optimizer: Optimizer, max_norm: float) -> None:
    nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], max_norm)


@EVERYWHERE
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("always", [False, True])
@torch.no_grad()
def test_weights_written_before_the_step(
    mesh: DeviceMesh, parameters: bool, write: Callable[[list[Tensor]], object], always: bool
) -> None:
    """A loop that does so from the first step on is learnt; one that begins late is told."""
    loops = pair(mesh, clipping(parameters=parameters, bucket_bytes=8192), net=small_net)
    for at, loop in together(loops, 7):
        with torch.enable_grad():
            loop.backward(at)
        if always or at == 5:
            write(loop.params)
        if loop is loops[1] and at == 5 and not always:
            with pytest.raises(RuntimeError, match="has been written since then"):
                loop.step()
            return
        loop.step()


def test_a_removal_before_the_step_lets_go_of_gradients(mesh: DeviceMesh) -> None:
    """They persist, and the next attachment has to see that torch clips them."""
    policy = clipping(bucket_bytes=8192)
    loops = pair(mesh, policy, net=small_net)
    for at, loop in together(loops, 6):
        loop.backward(at)
        if loop is loops[1] and at == 0:
            remove_offload(loop.optimizer)
        nn.utils.clip_grad_norm_(loop.params, 1e-2)
        loop.optimizer.step()
        loop.optimizer.zero_grad(set_to_none=False)
        if loop is loops[1] and at == 0:
            offload_optimizer(loop.optimizer, model=loop.model, policy=policy)


def test_a_removal_leaves_no_stand_ins(mesh: DeviceMesh) -> None:
    loops = pair(mesh, clipping(parameters=True, bucket_bytes=8192), net=small_net)
    for at, loop in together(loops, 6):
        loop.backward(at)
        loop.optimizer.step()
        if loop is loops[1] and at == 3:
            remove_offload(loop.optimizer)
        loop.optimizer.zero_grad(set_to_none=at <= 2)


@pytest.mark.parametrize("overlap", ["step", "forward", "iteration"])
def test_a_removal_that_has_no_room(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch, overlap: str) -> None:
    loops = pair(mesh, clipping(parameters=True, overlap=overlap, bucket_bytes=8192), net=small_net)
    real, calls = ShardedParameter.live_on, []

    def live_on(one: ShardedParameter, device: torch.device) -> None:
        calls.append(one)
        if len(calls) > 8:
            raise torch.OutOfMemoryError
        real(one, device)

    for at in range(6):
        if at == 3:
            monkeypatch.setattr(ShardedParameter, "live_on", live_on)
            with pytest.raises(torch.OutOfMemoryError):
                remove_offload(loops[1].optimizer)
            monkeypatch.undo()
        for loop in loops:
            loop.backward(at)
            loop.step()
        assert same(*loops), at


def test_a_step_fails_behind_a_backward_that_guessed_nothing(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hyperparameters changed, so all updates waited for ``step()``: nothing can take them back."""
    # Not room for all, which one update might join.
    loop = Loop(mesh, adamw, clipping(bucket_bytes=2048, device_bytes=8192), net=small_net)
    for at in range(4):
        loop.clipped_step(at, NEVER)
    loop.optimizer.param_groups[0]["weight_decay"] = 0.0
    loop.backward(4)
    clip_grad_norm_(loop.optimizer, NEVER)
    calls = iter([steps.update_bucket, Mock(side_effect=torch.OutOfMemoryError)])

    def update_bucket(*args: Any) -> None:
        next(calls)(*args)

    monkeypatch.setattr(steps, "update_bucket", update_bucket)
    with pytest.raises(torch.OutOfMemoryError):
        loop.optimizer.step()
    monkeypatch.undo()
    with pytest.raises(RuntimeError, match=r"an earlier step\(\) stopped with OutOfMemoryError.* [1-9]\d* of 27 bu"):
        loop.optimizer.step()


@pytest.mark.parametrize(
    ("where", "overlap", "bucket_bytes", "interrupted"),
    [
        *(((Engine, "_measure"), overlap, 8192, range(4, 8)) for overlap in ("step", "iteration")),
        *(((Timeline, "end"), overlap, 2048, (4, 6)) for overlap in ("forward", "iteration")),
    ],
)
def test_an_interrupt_behind_the_last_update(
    mesh: DeviceMesh,
    monkeypatch: pytest.MonkeyPatch,
    where: tuple[type, str],
    overlap: str,
    bucket_bytes: int,
    interrupted: Sequence[int],
) -> None:
    """The step has been made, and training goes on from it."""
    loops = pair(mesh, clipping(overlap=overlap, bucket_bytes=bucket_bytes), net=small_net)
    for at, loop in together(loops, 9):
        loop.backward(at)
        if loop is loops[1] and at in interrupted:
            monkeypatch.setattr(*where, Mock(side_effect=KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                loop.optimizer.step()
            monkeypatch.undo()
        else:
            loop.optimizer.step()
        loop.optimizer.zero_grad()


@pytest.mark.parametrize("where", [(Core, "_hold"), (Cache, "changed")], ids=lambda where: where[1])
@pytest.mark.parametrize("overlap", ["step", "forward"])
def test_an_interrupt_right_behind_an_update(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch, overlap: str, where: tuple[type, str]
) -> None:
    """Its buckets count as updated, or as half updated."""
    loop = Loop(mesh, adamw, clipping(overlap=overlap, bucket_bytes=2048), net=small_net).train(3)
    real, left = getattr(*where), [None] * 3

    def interrupted(*args: Any) -> None:
        if not left:
            raise KeyboardInterrupt
        left.pop()
        real(*args)

    loop.backward(3)
    monkeypatch.setattr(*where, interrupted)
    with pytest.raises(KeyboardInterrupt):
        loop.optimizer.step()
    monkeypatch.undo()
    with pytest.raises(RuntimeError, match=r"KeyboardInterrupt: .*\); (?!none).+ may be half updated"):
        loop.optimizer.step()


@pytest.mark.parametrize(
    "interrupted", [(Plan, "clear"), (Plan, "add"), (Engine, "_take_plan")], ids=lambda where: where[1]
)
def test_an_interrupt_while_state_is_divided_anew(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch, interrupted: tuple[type, str]
) -> None:
    """The next ``step()`` divides it, and makes the step."""
    loops = pair(mesh, policy_of({}, bucket_bytes=2048), net=small_net)
    for loop in loops:
        loop.train(3)
        loop.optimizer.param_groups[0]["foreach"] = False
        loop.backward(3)
    real = getattr(*interrupted)

    def stop(*args: Any) -> None:
        real(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(*interrupted, stop)
    monkeypatch.setattr(ParamGroups, "_still_fits", lambda *_: False)  # as where pieces round differently now
    with pytest.raises(KeyboardInterrupt):
        loops[1].optimizer.step()
    monkeypatch.undo()
    for loop in loops:
        loop.optimizer.step()
    assert same(*loops)


def test_an_interrupt_while_guesses_are_committed(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of them are, which nothing takes back."""
    loop = Loop(mesh, adamw, clipping(bucket_bytes=8192), net=small_net)
    for at in range(4):
        loop.clipped_step(at, NEVER)
    loop.backward(4)
    clip_grad_norm_(loop.optimizer, NEVER)
    monkeypatch.setattr(Turning, "move_parameters", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        loop.optimizer.step()
    monkeypatch.undo()
    with pytest.raises(RuntimeError, match=r"an earlier step\(\) stopped with KeyboardInterrupt"):
        loop.optimizer.step()


def _write_counters(counters: Sequence[Tensor]) -> None:
    for counter in counters:
        counter.fill_(0.0)


EDITS: dict[str, Callable[[Any, Tensor, list[Tensor]], object]] = {
    "clear": lambda optimizer, _, __: optimizer.state.clear(),
    "del": lambda optimizer, param, _: operator.delitem(optimizer.state, param),
    "pop": lambda optimizer, param, _: optimizer.state.pop(param),
    "an empty entry": lambda optimizer, param, _: operator.setitem(optimizer.state, param, {}),
    "update": lambda optimizer, param, _: optimizer.state.update({param: {}}),
    "|=": lambda optimizer, param, _: operator.ior(optimizer.state, {param: {}}),
    "another": lambda optimizer, _, __: setattr(optimizer, "state", defaultdict(dict)),
    "a counter": lambda optimizer, param, _: optimizer.state[param]["step"].zero_(),
    "a counter, unseen": lambda optimizer, param, _: optimizer.state[param]["step"].data.zero_(),
    "another counter": lambda optimizer, param, counters: optimizer.state[param].update(
        step=torch.full_like(counters[0], 5.0)
    ),
    "counters from before": lambda _, __, counters: _write_counters(counters),
}


@pytest.mark.parametrize(("clips", "host_fraction"), [(False, 0.0), (True, 0.0), (False, 1.0)])
@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_state_edited_before_the_step(
    mesh: DeviceMesh, edit: Callable[[Any, Tensor, list[Tensor]], object], clips: bool, host_fraction: float
) -> None:
    """The backward has used it: it is refused, or, in a loop that clips, taken back."""
    plain, loop = pair(mesh, clipping(bucket_bytes=8192, host_fraction=host_fraction), net=small_net)
    for one in (plain, loop):
        one.train_clipped([NEVER] * 5) if clips else one.train(5)
        counters = [entry["step"] for entry in one.optimizer.state.values()]
        one.backward(5)
        if one is loop:
            loop.optimizer.synchronize()  # the CPU may still be updating
        edit(one.optimizer, one.params[0], counters)
    if edit is EDITS["a counter, unseen"] and not clips and not counters[0].is_cpu:
        pytest.skip("versions miss writes through .data, and reading numbers of the device would wait for it")
    if not clips:
        with pytest.raises(RuntimeError, match=r"optimizer\.state has changed since then"):
            loop.optimizer.step()
        return
    for one in (plain, loop):
        one.clip(NEVER)
        one.step()
    assert_same_each_step(plain, loop)


@pytest.mark.parametrize("parameters", [False, True])
def test_gradients_that_change_places_before_the_step(mesh: DeviceMesh, parameters: bool) -> None:
    loop = Loop(mesh, adamw, clipping(parameters=parameters), net=small_net).train(5)
    loop.backward(5)
    one, other = loop.named["blocks.0.up.weight"], loop.named["blocks.1.up.weight"]
    one.grad, other.grad = other.grad, one.grad
    with pytest.raises(RuntimeError, match=r"the gradient of blocks\.\d\.up\.weight has been changed since then"):
        loop.optimizer.step()


@pytest.mark.parametrize("limit", [NEVER, ALWAYS])
@pytest.mark.parametrize("shows", [False, True], ids=["no version", "only a version"])
def test_writes_between_forward_and_backward_that_are_not_seen(mesh: DeviceMesh, limit: float, shows: bool) -> None:
    """A roll-back restores parameters as they were behind these writes."""
    plain, loop = pair(mesh, clipping(), net=small_net)
    for one in (plain, loop):
        one.train_clipped([NEVER] * 5)
        held = [local(param) for param in one.params]  # while they are not watched
        loss = one.model(one.batch(5))
        for param, memory in zip(one.params, held, strict=True):
            if shows:
                with torch.no_grad():
                    memory.mul_(0.9)
            else:
                param.detach().to_local().untyped_storage().copy_((memory.detach() * 0.9).untyped_storage())
        loss.backward()
        one.clip(limit)
        one.step()
    assert_same_each_step(plain, loop)


class ActorAndCritic(nn.Module):
    """The actor's loss goes through the critic, whose weights are frozen in this pass."""

    def __init__(self) -> None:
        super().__init__()
        self.actor, self.critic = (nn.Sequential(*(nn.Linear(8, 8) for _ in range(2))) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        self.critic.requires_grad_(requires_grad=False)
        of_actor = self.critic(self.actor(x)).mean()
        self.critic.requires_grad_(requires_grad=True)
        return of_actor + self.critic(x).square().mean()


@EVERYWHERE
def test_a_pass_with_frozen_weights(mesh: DeviceMesh, parameters: bool) -> None:
    """Its backward needs the old weights, which the other pass has updated."""
    torch.manual_seed(0)
    model = ActorAndCritic().to(mesh.device_type)
    for layer in (*model.actor, *model.critic):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = adamw(list(model.parameters()))
    attach(optimizer, model=model, policy=clipping(parameters=parameters, bucket_bytes=1024))

    def train() -> None:
        for _ in range(4):
            model(torch.ones(2, 8, device=mesh.device_type)).backward()
            optimizer.step()
            optimizer.zero_grad()

    with pytest.raises(RuntimeError, match="or a second pass in it"):
        train()
