"""Stories that no axis has: what a loop does once, what is refused, and what goes on after an error."""

import copy
import gc
import math
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import set_model_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from fsdp_offload import OffloadPolicy, is_offloaded, offload_optimizer, remove_offload, synchronize
from fsdp_offload.engine.engine import engine_of
from fsdp_offload.fsdp import fully_shard as fully_shard_compat
from fsdp_offload.fsdp.dtensor import local_shard
from tests import overlapping, parity
from tests.async_writers import Reading, read_checkpoint
from tests.conformance.axes import Case
from tests.conformance.oracle import ALWAYS, NEVER, compare
from tests.conformance.oracle import Loop as Run
from tests.conformance.programs import two_forwards, usual
from tests.overlapping import (
    EVERY_POLICY,
    POLICIES,
    Loop,
    Net,
    adamw,
    assert_same_each_step,
    assert_trained,
    clipping,
    on_host,
    pair,
    policy_of,
    same,
    speculation_of,
    together,
)
from tests.parity import attach, same_value


class Checkpointed(Net):
    """All blocks are computed again in the backward, and those named ``behind``, by reentrant checkpoints."""

    def __init__(self, behind: tuple[str, ...]) -> None:
        super().__init__()
        self._behind = behind

    def forward(self, tokens: Tensor, *, extra: bool = True) -> Tensor:
        x = self.embed(tokens)
        for block in (*self.blocks, *(getattr(self, name) for name in self._behind)):
            x = checkpoint(block, x, use_reentrant=True)
        return self.head(x).float().logsumexp(-1).mean()


@pytest.mark.parametrize("behind", [("extra",), ("extra", "extra")], ids=["two forwards", "one that uses it twice"])
def test_reentrant_checkpoints_that_run_twice_before_one_backward(mesh: DeviceMesh, behind: tuple[str, ...]) -> None:
    """Recomputation sees the parameters of the forward, or is refused. Others are an axis."""

    def train(loop: Loop) -> Loop:
        return loop.train(6).train(1, two_forwards, 6).train(3, first=7)

    net = partial(Checkpointed, behind)
    loop = Loop(mesh, adamw, policy_of(POLICIES["iteration"]), net=net)
    with pytest.raises(RuntimeError, match="runs twice before one backward"):
        train(loop)
    with pytest.raises(RuntimeError, match="computed again"):
        loop.optimizer.step()
    assert same(*map(train, pair(mesh, policy_of(POLICIES["forward"]), net=net)))


# Steps that loops take once -------------------------------------------------------------------------------------------


def send(run: Run, at: int) -> None:
    """Send the model to where it is: torch exchanges what parameters hold, and refuses those with weak references."""
    run.model.to("cpu").float()
    usual(run, at)
    run.look()
    run.model.to("cpu").float()
    assert all(param is run.named[name] for name, param in run.model.named_parameters())


def give_up(run: Run, at: int) -> None:
    """Give up a step, as after an exception, and load what was there before it."""
    saved = run.copy()
    run.backward(at)
    for param in run.params:
        param.grad = None
    run.restore(saved)


def fewer_micro_batches(run: Run, at: int) -> None:
    for micro in range(run.case.micro - 1):
        run.model(run.batch(10 * at + micro)).backward()
    run.step()


def fewer_reductions(run: Run, at: int) -> None:
    """Leave a block unused in the last of the micro-batches."""
    for micro in range(run.case.micro):
        run.model(run.batch(10 * at + micro), extra=micro < run.case.micro - 1).backward()
    run.step()


def exchange_and_freeze(run: Run, at: int) -> None:
    """Exchange state, also of a weight that gets no gradient, and shares buckets with others."""
    for name in run.named:
        state = run.live_state(name)
        state["exp_avg_sq"] = state["exp_avg_sq"] * 2
    run.named["blocks.1.up.weight"].requires_grad_(False)
    usual(run, at)
    run.named["blocks.1.up.weight"].requires_grad_(True)


ONCE = {one.__name__: one for one in (send, give_up, fewer_micro_batches, fewer_reductions, exchange_and_freeze)}


@pytest.mark.parametrize("overlap", POLICIES)
@pytest.mark.parametrize("once", ONCE)
def test_a_step_of_its_own(mesh: DeviceMesh, overlap: str, once: str) -> None:
    """In the middle, and first of all; where that exchanges state, there is some."""
    del mesh  # its process group is what is wanted
    first = [once] if once in ("send", "exchange_and_freeze") else []
    attached = "late" if once == "exchange_and_freeze" else "first"
    program = (*first, "usual", "usual", "usual", once, once, "usual")
    case = Case(overlap=overlap, attached=attached, micro=3 if "fewer" in once else 1, program=program)
    assert not compare(case, torch.device("cpu"), {"usual": usual, **ONCE})


@EVERY_POLICY
def test_gradients_go_group_by_group(mesh: DeviceMesh, fields: dict[str, Any]) -> None:
    """With the update that has read them, when the forward waits for it: its activations need the memory."""
    loop = Loop(mesh, adamw, policy_of(fields)).train(4)
    loop.backward(4)
    loop.optimizer.step()
    grads = [weakref.ref(local_shard(param.grad)) for param in loop.model.parameters() if param.grad is not None]
    loop.optimizer.zero_grad()
    left = []
    for block in loop.model.blocks:
        block.register_forward_pre_hook(lambda *_: left.append(sum(grad() is not None for grad in grads)))
    loop.model(loop.batch(5))
    # Six of each block, and those of the one that comes last.
    assert left == ([24, 18, 12, 6] if policy_of(fields).runs_on_into_forward else [0] * 4)


def _fail(*_: object) -> None:
    raise ZeroDivisionError


@pytest.mark.parametrize("make_policy", [policy_of, on_host])
def test_a_backward_that_fails(mesh: DeviceMesh, make_policy: Callable[..., OffloadPolicy]) -> None:
    """Some parameters have been updated with gradients of a backward that never ended: they are not saved."""
    loop = Loop(mesh, adamw, make_policy(POLICIES["iteration"])).train(4)
    loop.model.blocks[0].register_full_backward_pre_hook(_fail)
    with pytest.raises(ZeroDivisionError):
        loop.backward(4)
    assert engine_of(loop.optimizer).core.done
    with pytest.raises(RuntimeError, match="refused"):
        loop.optimizer.state_dict()


@pytest.mark.parametrize("fields", POLICIES.values(), ids=POLICIES)
def test_another_optimizer_of_parameters_that_the_backward_updates(mesh: DeviceMesh, fields: dict[str, Any]) -> None:
    """Where both would update them, it is refused before anything changes; others may take turns by step()."""
    plain, loop = pair(mesh, policy_of(fields))
    assert same(plain.train(2), loop.train(2))
    loop.optimizer.synchronize()
    for one in (plain, loop):
        one.second = torch.optim.SGD(list(one.model.parameters())[3:5], lr=0.1)
    if fields.get("overlap") == "iteration":
        with pytest.raises(
            RuntimeError, match=r"2 of the parameters \(blocks.0.* are also of another offloaded .* remove_offload"
        ):
            attach(loop.second, model=loop.model, policy=policy_of({}))
        assert same(plain.train(2, first=2), loop.train(2, first=2))
        remove_offload(loop.optimizer)
    attach(loop.second, model=loop.model, policy=policy_of({}))
    for one in (plain, loop):
        one.backward(4)
        one.second.step()
        one.second.zero_grad()
    assert same(plain, loop)


@pytest.mark.usefixtures("no_garbage_collection")
@pytest.mark.parametrize("in_a_cycle", [False, True])
def test_another_optimizer_where_the_first_is_gone(mesh: DeviceMesh, in_a_cycle: bool) -> None:
    """Whether it has been collected, or waits for that when the other one comes."""
    plain, loop = pair(mesh, policy_of(POLICIES["iteration"]))
    plain.train(2)
    loop.train(2)
    loop.optimizer.synchronize()
    gc.collect()
    for one in (plain, loop):
        if in_a_cycle:
            one.optimizer.itself = one.optimizer
        one.optimizer = torch.optim.SGD(one.model.parameters(), lr=0.1)
        one.schedulers[0] = torch.optim.lr_scheduler.ConstantLR(one.optimizer)
    attach(loop.optimizer, model=loop.model, policy=policy_of(POLICIES["iteration"]))
    assert same(plain.train(3, first=2), loop.train(3, first=2))


@pytest.mark.usefixtures("no_garbage_collection")
@pytest.mark.parametrize("removed", [False, True])
@pytest.mark.parametrize("parameters", [False, True])
@EVERY_POLICY
def test_hooks_keep_nothing_alive(mesh: DeviceMesh, fields: dict[str, Any], parameters: bool, removed: bool) -> None:
    """An optimizer that is let go is gone at once, as its memory is too much to wait for the collector."""
    loop = Loop(mesh, adamw, policy_of(fields, parameters=parameters)).train_clipped([NEVER] * 4)
    engine: Any = engine_of(loop.optimizer)
    parts = (engine, engine.plan, engine.core, engine.speculation, engine.speculation.ahead)
    gone = [weakref.ref(one) for one in parts if one is not None]
    del engine, parts
    gc.collect()
    if removed:
        remove_offload(loop.optimizer)
    else:
        del loop.optimizer, loop.schedulers[0]
    assert not any(one() for one in gone)
    loop.backward(4)
    loop.look()


@EVERY_POLICY
def test_parameters_that_are_unfrozen_later(mesh: DeviceMesh, fields: dict[str, Any]) -> None:
    """They get room in the middle of training, in a step of which the backward may have done a part."""

    def train(policy: OffloadPolicy | None) -> Loop:
        loop = Loop(mesh, adamw, None)
        late = [param for name, param in loop.model.named_parameters() if "blocks.1" in name or "embed" in name]
        for param in late:
            param.requires_grad_(False)
        if policy is not None:
            with pytest.warns(UserWarning, match="nothing to gain"):
                offload_optimizer(loop.optimizer, model=loop.model, policy=policy)
        loop.train(4)
        for param in late:
            param.requires_grad_(True)
        return loop.train(4, first=4)

    assert same(train(None), train(policy_of(fields)))


LATE = "blocks.1.norm.bias"  # which shares a bucket with others


def without_late(run: Run, at: int) -> None:
    run.named[LATE].requires_grad_(False)
    usual(run, at)


def give_state(where: str, run: Run, at: int) -> None:
    """By the user, at any point of the first step with its gradient."""
    param = run.named[LATE].requires_grad_(True)
    values = {name: torch.full_like(param, 0.25).detach() for name in ("exp_avg", "exp_avg_sq")}
    state = {"step": torch.tensor(7.0), **values}
    if where == "before the forward":
        run.optimizer.state[param] = state
    loss = run.model(run.batch(at))
    if where == "before the backward":
        run.optimizer.state[param] = state
    loss.backward()
    if where == "before the step":
        run.optimizer.state[param] = state
    run.step()


@pytest.mark.parametrize("where", ["before the forward", "before the backward", "before the step"])
@pytest.mark.parametrize("overlap", POLICIES)
def test_state_that_is_given_to_a_weight_that_had_none(mesh: DeviceMesh, overlap: str, where: str) -> None:
    del mesh
    habits = {"usual": usual, "without": without_late, "give": partial(give_state, where)}
    case = Case(overlap=overlap, program=(*("without",) * 5, "give", "usual", "usual"))
    if (overlap, where) == ("iteration", "before the step"):
        with pytest.raises(RuntimeError, match=r"optimizer\.state has changed since then"):
            compare(case, torch.device("cpu"), habits)
    else:
        assert not compare(case, torch.device("cpu"), habits)


def test_saves_and_more_parameters_between_backward_and_step_are_refused(mesh: DeviceMesh) -> None:
    """Some state and parameters are new by then; the step may go on."""
    plain, loop = pair(mesh, policy_of({"overlap": "iteration"}))
    for one in (plain, loop):
        one.train(3)
        one.backward(3)
    more = {"params": [nn.Parameter(torch.ones(3))]}
    for action in (loop.optimizer.state_dict, loop.model.state_dict, partial(loop.optimizer.add_param_group, more)):
        with pytest.raises(RuntimeError, match=r"the backward has updated a part of it.*Call step\(\) first"):
            action()
    for one in (plain, loop):
        one.step()
        one.train(2, first=4)
        one.optimizer.state_dict()
    assert same(plain, loop)


@pytest.mark.parametrize("parameters", [False, True])
def test_gradients_cleared_too_late_to_skip_a_step(mesh: DeviceMesh, parameters: bool) -> None:
    """zero_grad() instead of step(), as GANs call it, and a checkpoint that goes on from there."""
    plain, loop = pair(mesh, policy_of({"overlap": "iteration", "parameters": parameters}))
    for one in (plain, loop):
        one.train(3)
    saved = [one.copy() for one in (plain, loop)]
    loop.backward(3)
    match = r"zero_grad\(\) before step\(\).* cannot be skipped any more(.|\n)*GANs.*overlap='forward'"
    with pytest.raises(RuntimeError, match=match):
        loop.optimizer.zero_grad()
    with pytest.raises(RuntimeError, match=r"refused: zero_grad\(\) before step"):
        loop.step()
    for one, its in zip((plain, loop), saved, strict=True):
        one.restore(its)
    loop.optimizer.zero_grad()
    loop.seen.pop()
    assert same(plain.train(3, first=3), loop.train(3, first=3))


@EVERY_POLICY
@pytest.mark.parametrize("resident_bytes", [0, 60_000])
def test_state_that_is_made_again_is_in_the_order_of_the_parameters(
    mesh: DeviceMesh, fields: dict[str, Any], resident_bytes: int
) -> None:
    """Also what a backward makes, whose neighbours in a bucket kept theirs."""
    loops = pair(mesh, policy_of(fields, staying=resident_bytes))
    orders = []
    for loop in loops:
        loop.train(3)
        loop.optimizer.state.pop(loop.model.blocks[0].norm.weight)
        loop.optimizer.state.pop(loop.model.blocks[3].norm.weight)
        loop.optimizer.state.pop(loop.model.embed.weight)
        loop.train(2, first=3)
        names = {param: name for name, param in loop.model.named_parameters()}
        orders.append([names[param] for param in loop.optimizer.state])
    assert orders[0] == orders[1]
    assert same(*loops)


class Towers(Net):
    """One half of the blocks, or the other."""

    def forward(self, tokens: torch.Tensor, *, extra: bool = True, tower: int = 0) -> torch.Tensor:
        del extra
        x = self.embed(tokens).detach()
        for block in self.blocks[2 * tower : 2 * tower + 2]:
            x = block(x)
        return x.square().mean()


class TwoLosses(Loop):
    """Each with a backward of its own, which ends for the other's groups as well."""

    def backward(self, step: int, **options: Any) -> None:
        for tower in range(2):
            loss = self.model(self.batch(step), tower=tower, **options)
            loss.backward()
            self.seen.append(loss.item())


@EVERY_POLICY
def test_two_losses_with_blocks_of_their_own(mesh: DeviceMesh, fields: dict[str, Any]) -> None:
    """Two backwards for one step, each through other groups."""
    plain, offloaded = (TwoLosses(mesh, adamw, policy, net=Towers) for policy in (None, policy_of(fields)))
    assert same(plain.train(6), offloaded.train(6))


class Outside(Net):
    """``shift`` is in no group of fully_shard."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.ones(32))

    def forward(self, tokens: Tensor, *, extra: bool = True) -> Tensor:
        x = self.embed(tokens) + self.shift
        for block in self.blocks:
            x = block(x)
        return self.head(x).float().logsumexp(-1).mean()


def shard_without_shift(module: nn.Module, **options: Any) -> nn.Module:
    ignored = {module.shift} if isinstance(module, Outside) else None
    return fully_shard(module, ignored_params=ignored, **options)


@EVERY_POLICY
def test_parameters_outside_every_group(
    mesh: DeviceMesh, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A parameter that fully_shard ignores stays on the device."""
    monkeypatch.setattr(overlapping, "fully_shard", shard_without_shift)
    plain, loop = pair(mesh, on_host(fields), net=Outside)
    for step in range(6):
        losses = [one.train(1, first=step).seen for one in (plain, loop)]
        loop.optimizer.synchronize()  # type: ignore[attr-defined]
        assert losses[0] == losses[1]
        assert all(map(torch.equal, *(map(local_shard, one.params) for one in (plain, loop)))), step


def test_a_gradient_that_is_gone_says_so(mesh: DeviceMesh) -> None:
    """Whatever touches a gradient that was freed behind its update."""
    loop = Loop(mesh, adamw, on_host({"overlap": "iteration"})).train(4)
    loop.backward(4)
    with pytest.raises(AttributeError, match=r"to_local.*used in the backward already"):
        loop.model.blocks[3].up.weight.grad.to_local()
    loop.optimizer.step()
    weight = loop.model.blocks[0].up.weight
    with pytest.raises(RuntimeError, match="used in the backward and freed"):
        weight.grad.norm()
    for touch in (torch._foreach_norm, torch._foreach_zero_, lambda grads: torch.zeros(3).add_(*grads)):
        with pytest.raises(RuntimeError, match="used in the backward and freed"):
            touch([weight.grad])
    with pytest.raises(AttributeError, match=r"to_local.*used in the backward and freed"):
        weight.grad.to_local()
    with pytest.raises(RuntimeError, match=r"cannot be updated: its gradient was used in the backward.*zero_grad"):
        loop.optimizer.step()
    with pytest.raises(RuntimeError, match="used in the backward and freed"):
        loop.backward(5)
    loop.optimizer.zero_grad(set_to_none=False)
    with pytest.raises(RuntimeError, match="used in the backward"):
        weight.grad.norm()
    for again in (loop.optimizer, loop.model):
        again.zero_grad(set_to_none=False)
        assert weight.grad is not None
    loop.model.zero_grad()
    assert weight.grad is None


def test_a_gradient_that_was_not_cleared_stops_no_step_half_way(mesh: DeviceMesh) -> None:
    """Of some groups only, and the error comes after others were reduced; clearing it is enough to go on."""
    plain, loop = pair(mesh, on_host({"overlap": "iteration"}))
    assert_same_each_step(plain, loop, 5)
    loop.backward(5)
    loop.optimizer.step()
    for name, param in loop.model.named_parameters():
        if "blocks.0" not in name:
            param.grad = None
    loop.schedulers[0].step()
    plain.train(1, first=5)
    assert same(plain, loop)
    with pytest.raises(RuntimeError, match="used in the backward and freed"):
        loop.backward(6)
    loop.optimizer.zero_grad()
    assert_same_each_step(plain, loop, 4)


@pytest.mark.parametrize("parameters", [False, True])
def test_a_gradient_that_step_refuses_may_be_put_right(mesh: DeviceMesh, parameters: bool) -> None:
    """The backward has updated all others by then."""

    def without_extra(one: Loop, step: int) -> None:
        one.backward(step, extra=False)
        weight = one.model.extra.up.weight
        if hasattr(one.optimizer, "synchronize") and step in (2, 3, 8, 9):
            weight.grad = torch.ones(weight.shape)  # no DTensor
            with pytest.raises(RuntimeError, match=r"extra.up.weight cannot be updated.*call step\(\) again"):
                one.optimizer.step()
        weight.grad = None
        one.step()

    plain, loop = pair(mesh, on_host({"overlap": "iteration"}, parameters=parameters))
    assert_same_each_step(plain, loop, 1)
    assert_same_each_step(plain, loop, 9, without_extra)


def test_after_a_refused_backward_a_checkpoint_trains_on(mesh: DeviceMesh) -> None:
    """What the error says to do is enough: nothing of that backward is added to the next one's gradients."""
    plain, loop = pair(mesh, on_host({"overlap": "iteration"}))
    assert_same_each_step(plain, loop, 6)
    states = copy.deepcopy(loop.states())
    loop.backward(6)
    with pytest.raises(RuntimeError, match=r"a second backward before step\(\)"):
        loop.backward(7)
    for action in (loop.optimizer.step, loop.optimizer.state_dict):
        with pytest.raises(RuntimeError, match="refused: a second backward"):
            action()
    loop.optimizer.zero_grad()
    set_model_state_dict(loop.model, states["model"])
    set_optimizer_state_dict(loop.model, loop.optimizer, states["optimizer"])
    loop.seen = loop.seen[:6]
    assert_same_each_step(plain, loop, 5)


def looks_of(model: nn.Module) -> list[tuple[type, set[str]]]:
    return [(type(one), set(vars(one))) for one in (*model.modules(), *model.parameters())]


@EVERY_POLICY
@pytest.mark.parametrize("parameters", [False, True])
def test_removed_in_between(mesh: DeviceMesh, fields: dict[str, Any], parameters: bool) -> None:
    """Parameters, classes and attributes are those of plain training again."""
    policy = policy_of(fields, parameters=parameters)
    plain, loop = pair(mesh, policy, prepare=lambda model: model.extra.down.weight.requires_grad_(False))
    assert (looks_of(loop.model) != looks_of(plain.model)) >= parameters
    assert_same_each_step(plain, loop, 3)
    params = list(loop.model.parameters())
    remove_offload(loop.optimizer)
    assert all(map(lambda one, other: one is other, params, loop.model.parameters()))
    assert looks_of(loop.model) == looks_of(plain.model)
    assert_same_each_step(plain, loop, 3)
    attach(loop.optimizer, model=loop.model, policy=policy)
    assert_same_each_step(plain, loop, 3)


class PartOfRoot(Net):
    """``tail`` is in one group with what every forward uses."""

    def __init__(self) -> None:
        super().__init__()
        self.tail = nn.Linear(32, 32)

    def forward(self, tokens: Tensor, *, extra: bool = True) -> Tensor:
        x = self.embed(tokens)
        for block in (*self.blocks, self.extra):
            x = block(x)
        return self.head(self.tail(x) if extra else x).float().logsumexp(-1).mean()


@pytest.mark.parametrize("cleared", ["", "one by one", "by the model"])
@pytest.mark.parametrize("by_model", [False, True])
def test_zeros_of_gradients_that_were_gone(mesh: DeviceMesh, by_model: bool, cleared: str) -> None:
    """They reach a part of a group that the backward has updated: Adam moves it by its momentum, unless cleared."""

    def zero_and_leave_out(loop: Loop, step: int) -> None:
        loop.backward(step, extra=step % 2 == 0)
        loop.optimizer.step()
        (loop.model if by_model else loop.optimizer).zero_grad(set_to_none=False)
        if cleared and step % 3 == 0:
            for param in loop.model.parameters() if cleared == "one by one" else ():
                param.grad = None
            loop.model.zero_grad()

    plain, loop = pair(mesh, on_host({"overlap": "iteration"}), net=PartOfRoot)
    assert_same_each_step(plain, loop, 4)
    for step in range(4, 11):
        before = local_shard(plain.model.tail.weight).detach().clone()
        assert same(plain.train(1, zero_and_leave_out, step), loop.train(1, zero_and_leave_out, step)), step
        is_left_out = bool(cleared) and step % 2 == 1 and (step - 1) % 3 == 0
        assert torch.equal(local_shard(plain.model.tail.weight), before) == is_left_out


def set_by_hand(clips: bool, loop: Loop, step: int) -> None:
    """A part of a group gets its gradient when the rest of the group has been updated."""
    loop.backward(step, extra=step % 3 == 0)
    tail = loop.model.tail
    for param in (tail.weight, tail.bias) if step % 3 else ():
        param.grad = torch.full_like(param, 0.1 * step)
    if clips:
        loop.clip(NEVER)
    loop.step()


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("more", [{}, {"parameters": True}, {"host_fraction": 1.0}], ids=str)
def test_a_gradient_that_is_set_by_hand_after_the_backward(mesh: DeviceMesh, more: dict[str, Any], clips: bool) -> None:
    """``step()`` updates what the backward could not, once; also where that has state in the same buckets."""
    plain, loop = pair(mesh, clipping(**more), partial(torch.optim.AdamW, lr=0.02, fused=True), net=PartOfRoot)
    assert_same_each_step(plain, loop, 11, partial(set_by_hand, clips))


def test_zeros_of_gradients_that_were_gone_are_there_when_it_is_removed(mesh: DeviceMesh) -> None:
    """Gradients that were zeroed in place after they had been freed."""
    plain, loop = pair(mesh, on_host({"overlap": "iteration"}))
    for one in (plain, loop):
        for step in range(4):
            one.backward(step)
            one.optimizer.step()
            one.optimizer.zero_grad(set_to_none=False)
    remove_offload(loop.optimizer)
    for one in (plain, loop):
        one.backward(4, extra=False)
        one.optimizer.step()
    assert same(plain, loop)


def test_the_checkpoint_of_cpu_offload(mesh: DeviceMesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``CPUOffloadPolicy`` and parameters on the host write the same names, shapes, chunks and bytes."""
    loop = Loop(mesh, adamw, on_host({})).train(3)
    policy = CPUOffloadPolicy(pin_memory=False)
    monkeypatch.setattr(overlapping, "fully_shard", partial(fully_shard, offload_policy=policy))
    held = Loop(mesh, adamw, None).train(3)
    for name, one in (("loop", loop), ("held", held)):
        dcp.save(one.states(), checkpoint_id=tmp_path / name)
    metadata, other = (dcp.FileSystemReader(tmp_path / name).read_metadata() for name in ("loop", "held"))
    assert metadata.state_dict_metadata == other.state_dict_metadata
    assert len(metadata.state_dict_metadata) > 50
    values, others = (read_checkpoint(tmp_path / name) for name in ("loop", "held"))
    assert all(same_value(values[key], others[key]) for key in values)


UNUSED = "unused.weight", "unused.bias"


@pytest.mark.parametrize("phases", [False, True])
@pytest.mark.parametrize("cls", [torch.optim.Adam, torch.optim.ASGD, torch.optim.NAdam])
def test_steps_without_any_gradient(cls: type[torch.optim.Optimizer], phases: bool) -> None:
    """Legal, also before the first real step, and while state is away; no counter moves that plainly does not."""
    plain, loop = pair(None, parity.SMALL, cls, net=parity.Net)

    def without(run: Loop, step: int) -> None:
        if phases and is_offloaded(run.optimizer):
            run.phase("offload", "release")
        run.step()

    with pytest.warns(UserWarning, match="has never found one"):
        assert_same_each_step(plain, loop, 2, without)
    assert not loop.optimizer.state
    for steps, habit in ((2, usual), (3, without), (2, usual)):
        assert_same_each_step(plain, loop, steps, habit)
    assert_trained(plain, *UNUSED)


def test_frozen_parameters_take_no_host_memory_until_they_are_trained() -> None:
    """State that may never be."""

    def host_bytes() -> int:
        return loop.optimizer.offload_report().memory.host_bytes

    def freeze(model: Any, *, frozen: bool = True) -> None:
        model.up.requires_grad_(not frozen)

    everything = attach(torch.optim.AdamW(parity.Net().parameters())).offload_report().memory.host_bytes
    plain, loop = pair(None, parity.SMALL, torch.optim.AdamW, net=parity.Net, prepare=freeze)
    before, frozen_bytes = host_bytes(), 8 * sum(param.numel() for param in loop.model.up.parameters())
    assert before <= everything - frozen_bytes
    assert_same_each_step(plain, loop, 5)
    assert_trained(plain, *UNUSED, "up.weight", "up.bias")
    assert host_bytes() == before
    for frozen in (False, True):
        for run in (plain, loop):
            freeze(run.model, frozen=frozen)
        assert_same_each_step(plain, loop, 5)
        assert_trained(plain, *UNUSED)
        assert host_bytes() >= before + frozen_bytes


class TwoOptimizers(Loop):
    """Of every other parameter each, clipped together."""

    def __init__(self, mesh: DeviceMesh, policy: OffloadPolicy | None) -> None:
        super().__init__(
            mesh, lambda params: torch.optim.AdamW(params[::2], lr=0.02), None, net=partial(Net, width=16, layers=2)
        )
        self.second = torch.optim.SGD(list(self.model.parameters())[1::2], lr=0.01, momentum=0.9)
        if policy is not None:
            attach(self.optimizer, model=self.model, policy=policy)
            attach(self.second, model=self.model, policy=policy)

    def step(self) -> None:
        self.second.step()
        super().step()
        self.second.zero_grad()

    def everything(self) -> dict[str, Any]:
        momenta = {f"{name} momentum": self.second.state.get(param) for name, param in self.named.items()}
        return super().everything() | momenta


def test_two_optimizers_that_are_clipped_together(mesh: DeviceMesh) -> None:
    """By one norm over the parameters of both."""
    plain, loop = TwoOptimizers(mesh, None), TwoOptimizers(mesh, clipping())
    for at, each in together((plain, loop), 12):
        each.clipped_step(at, ALWAYS if at == 7 else NEVER)
    engines = [vars(optimizer)["_offload_engine"].engine for optimizer in (loop.optimizer, loop.second)]
    assert [engine.speculation.rolled_back for engine in engines] == [1, 1]


@pytest.mark.parametrize("foreach", [False, True])
def test_gradients_that_are_not_finite(mesh: DeviceMesh, foreach: bool) -> None:
    """Without ``error_if_nonfinite``: what plain training makes of them."""
    loops = pair(mesh, clipping(), net=partial(Net, width=16, layers=2))
    for at, loop in together(loops, 9):
        loss = loop.model(loop.batch(at))
        (loss * (math.nan if at == 6 else 1.0)).backward()
        loop.clip(NEVER, foreach=foreach)
        loop.step()
    assert speculation_of(loops[1]).rolled_back


def write_weight(loop: Loop) -> None:
    loop.model.head.weight.mul_(0.5)


def write_moment(loop: Loop) -> None:
    next(iter(loop.optimizer.state.values()))["exp_avg"].mul_(0.5)


def write_betas(loop: Loop) -> None:
    loop.optimizer.param_groups[0]["betas"][0].fill_(0.5)


def exchange_gradient(name: str, loop: Loop) -> None:
    param = loop.model.get_parameter(name)
    param.grad = torch.ones_like(param)


WRITES: dict[str, tuple[Any, str]] = {
    "a weight": (write_weight, r"head\.weight has been written since then"),
    "a moment": (write_moment, r"optimizer\.state has changed(.|\n)*[Uu]se\s+overlap='forward'"),
    "betas": (write_betas, "hyperparameters have changed"),
    **{
        f"the gradient of {name}": (partial(exchange_gradient, name), f"{name} has been changed since then")
        for name in ("tail.weight", "head.bias")
    },
}


@pytest.mark.parametrize("parameters", [False, True])
@pytest.mark.parametrize(("write", "match"), WRITES.values(), ids=WRITES)
def test_writes_between_backward_and_step_are_refused(
    mesh: DeviceMesh, write: Any, match: str, parameters: bool
) -> None:
    """By hand, where the backward has updated."""

    def betas_in_tensors(params: Any) -> torch.optim.Optimizer:
        betas = (torch.tensor(0.9), torch.tensor(0.99))
        return torch.optim.AdamW(params, lr=0.02, betas=betas, foreach=False, capturable=False)

    policy = clipping(parameters=parameters, bucket_bytes=2048)
    loop = Loop(mesh, betas_in_tensors, policy, net=PartOfRoot).train(3)
    loop.backward(3)
    with torch.no_grad():
        write(loop)
    with pytest.raises(RuntimeError, match=match):
        loop.step()


@pytest.mark.parametrize("clips", [False, True])
def test_weights_written_through_a_view_that_is_older_are_refused(mesh: DeviceMesh, clips: bool) -> None:
    """As nobody is told of that, and take-back would lose it; whether the loop clips or not."""
    loop = Loop(mesh, adamw, clipping()).train_clipped([NEVER] * 4) if clips else Loop(mesh, adamw, clipping()).train(4)
    view = local_shard(loop.model.head.weight)
    loop.backward(4)
    with torch.no_grad():
        view.mul_(0.5)
    with pytest.raises(RuntimeError, match=r"head\.weight has been written since then"):
        loop.step()


# Writes that no version counts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("behind", [False, True], ids=["before the step", "behind it"])
@EVERY_POLICY
def test_writes_through_tensors_that_were_taken_earlier(mesh: DeviceMesh, fields: dict[str, Any], behind: bool) -> None:
    """Weight surgery keeps lists of local tensors; loads for the step may have brought older bytes to the device."""
    plain, loop = pair(mesh, on_host(fields, passing=100 * 8192))
    ways = (lambda param: param.to_local().detach(), lambda param: param.detach().to_local())
    taken = {one: [ways[n % 2](param) for n, param in enumerate(one.model.parameters())] for one in (plain, loop)}

    def shrunk(one: Loop, step: int) -> None:
        one.backward(step)
        if not behind and step > 1:
            torch._foreach_mul_(taken[one], 0.9)
        one.step()
        if behind:
            synchronize(one.optimizer)
            torch._foreach_mul_(taken[one], 0.9)

    assert_same_each_step(plain, loop, 8, shrunk)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@EVERY_POLICY
def test_compiled_blocks_on_the_host(mesh: DeviceMesh, fields: dict[str, Any]) -> None:
    torch._dynamo.reset()

    def compile_blocks(model: Net) -> None:
        for block in model.blocks:
            block.compile(backend="eager")

    assert_same_each_step(*pair(mesh, on_host(fields), prepare=compile_blocks), 4)


@EVERY_POLICY
def test_two_optimizers_of_parameters_on_the_host_are_refused(mesh: DeviceMesh, fields: dict[str, Any]) -> None:
    """Whichever of the two has them there: each would have its own newest bytes."""
    on_host_or_not = [policy_of(fields, parameters=streams) for streams in (True, False)]
    updates_early = policy_of({}), policy_of(POLICIES["iteration"])  # the first would step with gradients that are gone
    for first, second in (on_host_or_not, on_host_or_not[::-1], on_host_or_not[:1] * 2, updates_early):
        loop = Loop(mesh, adamw, first)
        other = adamw(list(loop.model.parameters()))
        with pytest.raises((RuntimeError, ValueError), match=r"also of another offloaded|another optimizer has put it"):
            attach(other, model=loop.model, policy=second)


@EVERY_POLICY
@pytest.mark.parametrize(
    "penalty",
    [lambda p: p.pow(2).sum().full_tensor(), lambda p: p.full_tensor().pow(2).sum()],
    ids=["itself", "full tensor"],
)
def test_a_penalty_on_weights_on_the_host_is_refused(mesh: DeviceMesh, fields: dict[str, Any], penalty: Any) -> None:
    """Autograd cannot follow a parameter to the host."""
    loop = Loop(mesh, adamw, on_host(fields)).train(2)
    loss = loop.model(loop.batch(2)) + 0.01 * penalty(loop.model.blocks[0].up.weight)
    with pytest.raises(RuntimeError, match="a loss depends on a parameter that lives on the host"):
        loss.backward()


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


@pytest.mark.parametrize("looks", [False, True], ids=["for-good", "as-a-guess"])
def test_a_plain_optimizer_may_not_step_where_the_backward_updates(mesh: DeviceMesh, looks: bool) -> None:
    """An error names the parameter with two optimizers; a guess is taken back, so that the other may go on alone."""
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
        saved = loop.copy()
        engine = engine_of(loop.optimizer)
        if engine is not None:
            engine.wait_all_home()
            engine.lending.lend(Reading(), [shard.home for shard in engine.plan.shards.values()])
        loop.backward(3)
        loop.restore(saved)
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
    assert engine_of(loop.optimizer).core.reductions.counts
    assert hasattr(hooks._groups[0]._group, "_fsdp_offload_points")
